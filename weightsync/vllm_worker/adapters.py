"""LoRA adapters inside a vLLM worker: looked at, loaded, dropped, when a driver asks.

Apart from the sessions in which a model's weights change: an adapter that is refused leaves no
error behind for them. As there, nothing is raised through an RPC, so that what one of several
workers refuses is known before any request meets it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from typing import Any

from weightsync.errors import EngineError
from weightsync.sources.adapter import CONFIG_NAME

_MATTERS = ("rank_pattern", "alpha_pattern", "use_rslora")
"""Options that change what an adapter computes, and that not every vLLM knows."""

LOCK_NAME = "lock"
"""The file in a directory of an adapter that says whether somebody needs it."""

_held: dict[int, list[int]] = {}
"""Descriptors of the locks on the files of each adapter that was loaded here, by its number."""


def answer(request: str, worker: Any, number: int) -> str | None:
    """Obey a request whose ``op`` is ``"adapter"``; never raises.

    ========  ==========================================================================
    ``look``  whether vLLM takes what lies at ``path``, by its configuration
    ``load``  load what lies at ``path`` as ``number``, in the place of what has that one; until
              it is dropped, the directories ``held`` are in use
    ``drop``  have vLLM forget ``number``
    ``list``  only answer
    ========  ==========================================================================

    Args:
        number: of the worker, among all of the engine.

    Returns:
        JSON: ``rank``, ``error``, ``loaded``: the numbers of all adapters. None: the request is
        about something else.
    """
    try:
        asked = json.loads(request)
        if asked["op"] != "adapter":
            return None
    except (ValueError, TypeError, KeyError):
        return None
    error: str | None = None
    loaded: list[int] = []
    try:
        _obey(asked, worker)
        loaded = sorted(worker.list_loras())
    except Exception as caught:
        error = str(caught)[:4000] or type(caught).__name__
    return json.dumps({"rank": number, "error": error, "loaded": loaded})


def _obey(asked: dict[str, Any], worker: Any) -> None:
    step = asked["step"]
    if step == "look":
        _look(str(asked["path"]), bool(asked["stacked"]), worker.vllm_config)
    elif step == "load":
        _load(worker, asked)
    elif step == "drop":
        worker.remove_lora(int(asked["number"]))
        _let_go(int(asked["number"]))
    elif step != "list":
        raise EngineError(f"no such request: {step!r:.80}")


def _load(worker: Any, asked: dict[str, Any]) -> None:
    from vllm.lora.request import LoRARequest

    number = int(asked["number"])
    request = LoRARequest(str(asked["name"]), number, str(asked["path"]), load_inplace=True)
    if hasattr(request, "is_3d_lora_weight"):
        request.is_3d_lora_weight = bool(asked["stacked"])
    held = [_hold(str(path)) for path in asked["held"]]
    try:
        worker.add_lora(request)
    except BaseException:
        for lock in held:
            os.close(lock)
        with contextlib.suppress(Exception):  # vLLM keeps one of which it loaded a part
            worker.remove_lora(number)
        raise
    _let_go(number)
    _held[number] = held


def _hold(path: str) -> int:
    """Keep a directory from being taken for a leftover, until this process ends or lets go."""
    lock = os.open(os.path.join(path, LOCK_NAME), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _let_go(number: int) -> None:
    for lock in _held.pop(number, ()):
        os.close(lock)


def _look(path: str, stacked: bool, config: Any) -> None:
    """
    Raises:
        EngineError: this worker does not see the files, or its vLLM would compute something else.
        ValueError, TypeError: vLLM refuses the configuration.
    """
    try:
        with open(os.path.join(path, CONFIG_NAME), "rb") as file:
            options = json.load(file)
    except (OSError, ValueError) as error:
        raise EngineError(
            f"on {socket.gethostname()} it does not see the files that the receiver wrote "
            f"({error}): both need the same directory, and the right to read it; "
            "VLLMAdapter(..., directory=...) chooses one"
        ) from None
    from vllm.lora.peft_helper import PEFTHelper

    # Releases that do not know an option leave it aside, and compute something else.
    known = PEFTHelper.__dataclass_fields__
    unknown = [name for name in _MATTERS if options.get(name) and name not in known]
    if unknown:
        raise EngineError(f"this vLLM does not know {', '.join(unknown)} of a LoRA adapter")
    PEFTHelper.from_dict(options).validate_legal(config.lora_config)
    if stacked:
        _require_stacked_experts(config)


def _require_stacked_experts(config: Any) -> None:
    """vLLM loads stacked experts into any model, and leaves them aside in most.

    Raises:
        EngineError: in this one too.
    """
    from vllm.model_executor.model_loader.utils import get_model_cls

    model = get_model_cls(config.model_config)
    mixed = getattr(config.lora_config, "enable_mixed_moe_lora_format", False)
    if not mixed and not getattr(model, "is_3d_moe_weight", False):
        raise EngineError(
            f"vLLM keeps the experts of {model.__name__} apart, the adapter has them stacked "
            "(target_parameters): make the engine with enable_mixed_moe_lora_format=True"
        )
