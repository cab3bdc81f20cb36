"""A LoRA adapter of vLLM's ``LLM`` as an engine: only the adapter changes, the base stays.

vLLM reads adapters from files, and not only once: one that fell out of its cache (another adapter
took the place, the base was updated) is read again in the middle of the next step, and a file that
is not there then ends the engine process. So a version's files stay for as long as a request may
use it.

Every version gets an id, a name and a path of its own: vLLM tells adapters apart by the id in their
cache, by the path in the cache of prefixes, and by the name where it collects those of one step. So
nothing has to be flushed or paused, and a request ends with the version it was started with.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file

from weightsync.deadline import Deadline
from weightsync.engine import Engine, Fit, Update
from weightsync.engines.vllm.llm import LLMClient
from weightsync.errors import (
    EngineError,
    EngineUnusableError,
    MismatchError,
    NoRoomError,
    WeightSyncError,
)
from weightsync.files import Directory, Lock
from weightsync.manifest import Manifest
from weightsync.sources.adapter import CONFIG_NAME
from weightsync.transport import Snapshot
from weightsync.version import Version

_FIRST_ID = 1 << 20
"""vLLM identifies adapters by numbers; those that users choose themselves are small."""

_numbers = itertools.count()

T = TypeVar("T")


class VLLMAdapter(Engine):
    """One LoRA adapter of a ``vllm.LLM`` made with ``enable_lora=True``.

    Takes what an :class:`~weightsync.sources.adapter.AdapterSource` sends. Several of them may
    share one LLM, each with a receiver of its own.

    Args:
        llm: the engine. Calls of it must come from one thread at a time: put them inside
            ``with receiver.hold():`` if the receiver follows in the background.
        name: what vLLM calls the adapter, with the version behind it: ``policy@1:40#7``.
    """

    def __init__(self, llm: Any, name: str = "policy") -> None:
        self._llm = llm
        self._client = LLMClient(llm)
        self._name = name
        self._staged: _Adapter | None = None
        self._loaded: list[_Adapter] = []  # in the order in which vLLM was told of them
        self._current: _Adapter | None = None

    @property
    def target(self) -> Any:
        return self._llm

    @property
    def name(self) -> str:
        return self._name

    @property
    def lora_request(self) -> Any:
        """What to pass to ``llm.generate``: another one after every update.

        Get it anew for every call. A request that is unfinished when an update comes keeps the
        version it was started with; starting one with the object of an older version ends vLLM's
        engine process.

        Raises:
            EngineUnusableError: no version was loaded yet.
        """
        if self._current is None:
            raise EngineUnusableError(f"adapter {self.name!r} holds no version")
        return self._current.request

    # ---------------------------------------------------------------- Engine

    def connect(self, url: str, deadline: Deadline) -> None:
        if self._lora_config is None:
            raise EngineError(
                "the LLM was made without LoRA: make it with LLM(..., enable_lora=True, "
                "max_lora_rank=...)"
            )
        if self._llm.llm_engine.vllm_config.parallel_config.world_size > 1:
            raise EngineError(
                "adapters are loaded by an LLM with one worker only: with several an adapter that "
                "does not fit would leave vLLM's workers out of step; send the model, merged"
            )
        _Folder.remove_leftovers()

    def check(self, manifest: Manifest) -> Fit:
        spec = manifest.by_name.get(CONFIG_NAME)
        if spec is None or spec.dtype != torch.uint8:
            raise MismatchError(
                f"what was sent is no adapter, as it has no {CONFIG_NAME}: send an "
                "AdapterSource(model)",
                missing=(CONFIG_NAME,),
            )
        return Fit()

    def stage(self, update: Update, deadline: Deadline) -> None:
        self.unstage()
        update.snapshot.verify()
        self._staged = self._written(update)

    def unstage(self) -> None:
        staged, self._staged = self._staged, None
        if staged is not None:
            staged.folder.remove()

    def apply(self, update: Update, deadline: Deadline) -> None:
        current = self._current
        if current is not None and current.version == update.version and self._staged is None:
            return  # rolled back to: it was never let go
        adapter, self._staged = self._staged or self._written(update), None
        self._loaded.append(adapter)
        try:
            self._require_awake(deadline)
            self._call("add_lora", lambda e: e.add_lora(adapter.request), deadline)
        except BaseException as error:
            self._unload(adapter)
            if isinstance(error, (WeightSyncError, KeyboardInterrupt, SystemExit)):
                raise
            raise EngineError(f"vLLM did not load adapter {self.name!r}: {error}") from error

    def label(self, version: Version | None) -> None:
        self._current = next((a for a in reversed(self._loaded) if a.version == version), None)
        used = self._in_use()
        for adapter in list(self._loaded):
            if adapter is not self._current and adapter.request.lora_name not in used:
                self._unload(adapter)

    def close(self) -> None:
        # The engine goes on, and so does the version it holds: its files stay as long as the LLM.
        self.unstage()

    def unload(self) -> None:
        """Have vLLM forget the adapter, once no request uses it. A later update loads it again."""
        self.label(None)

    # ---------------------------------------------------------------- inside

    @property
    def _lora_config(self) -> Any:
        return getattr(self._llm.llm_engine.vllm_config, "lora_config", None)

    def _written(self, update: Update) -> _Adapter:
        """A version as files, before vLLM hears of it.

        Raises:
            EngineError: it is of a kind that this vLLM does not load, or could not be written.
        """
        from vllm.lora.request import LoRARequest

        snapshot = update.snapshot
        config = bytes(snapshot.tensor(CONFIG_NAME).numpy())
        self._require_legal(_parsed(config))
        # PEFT stacks the experts of a layer (target_parameters) in one tensor.
        marks = (".experts.lora_", ".experts.base_layer.lora_")
        stacked = any(mark in name for name in snapshot.manifest.by_name for mark in marks)
        if stacked:
            self._require_stacked_experts()
        folder = _Folder(snapshot.manifest.payload, owner=self._llm)
        try:
            folder.write(snapshot, config)
        except BaseException:
            folder.remove()
            raise
        number = next(_numbers)
        request = LoRARequest(
            f"{self.name}@{update.version}#{number}", _FIRST_ID + number, folder.path
        )
        if hasattr(request, "is_3d_lora_weight"):
            request.is_3d_lora_weight = stacked
        return _Adapter(update.version, request, folder)

    def _require_legal(self, config: dict[str, Any]) -> None:
        """
        Raises:
            EngineError: with vLLM's own words.
        """
        from vllm.lora.peft_helper import PEFTHelper

        # Releases that do not know an option leave it aside, and compute something else.
        known = PEFTHelper.__dataclass_fields__
        unknown = [name for name in _MATTERS if config.get(name) and name not in known]
        if unknown:
            raise EngineError(f"this vLLM does not know {', '.join(unknown)} of a LoRA adapter")
        try:
            PEFTHelper.from_dict(config).validate_legal(self._lora_config)
        except (ValueError, TypeError) as error:
            raise EngineError(f"vLLM refuses adapter {self.name!r}: {error}") from None

    def _require_stacked_experts(self) -> None:
        """vLLM loads stacked experts into any model, and leaves them aside in most.

        Raises:
            EngineError: in this one too.
        """
        from vllm.model_executor.model_loader.utils import get_model_cls

        model = get_model_cls(self._llm.llm_engine.vllm_config.model_config)
        mixed = getattr(self._lora_config, "enable_mixed_moe_lora_format", False)
        if not mixed and not getattr(model, "is_3d_moe_weight", False):
            raise EngineError(
                f"vLLM keeps the experts of {model.__name__} apart, the adapter has them stacked "
                "(target_parameters): make the LLM with enable_mixed_moe_lora_format=True"
            )

    def _unload(self, adapter: _Adapter) -> None:
        with contextlib.suppress(Exception):  # gone from its cache already, or all of it is gone
            self._call("remove_lora", lambda e: e.remove_lora(adapter.request.lora_int_id))
        self._loaded.remove(adapter)
        adapter.folder.remove()

    def _in_use(self) -> set[str]:
        """Names of the adapters that unfinished requests were started with."""
        states = self._llm.llm_engine.output_processor.request_states
        return {state.lora_name for state in states.values() if state.lora_name}

    def _require_awake(self, deadline: Deadline) -> None:
        # Asleep, the memory that adapters are copied to is not there.
        if self._call("is_sleeping", lambda e: e.is_sleeping(), deadline):
            raise EngineError("the engine is asleep: an adapter can be loaded after llm.wake_up()")

    def _call(self, what: str, function: Callable[[Any], T], deadline: Deadline | None = None) -> T:
        engine = self._llm.llm_engine
        return self._client.bounded(lambda: function(engine), deadline or Deadline(0.0), what)


_MATTERS = ("rank_pattern", "alpha_pattern", "use_rslora")
"""Options that change what an adapter computes, and that not every vLLM knows."""


def _parsed(config: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(config)
    except ValueError as error:
        raise EngineError(f"{CONFIG_NAME} is no JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise EngineError(f"{CONFIG_NAME} holds a {type(parsed).__name__}, not an object")
    return parsed


@dataclass(frozen=True)
class _Adapter:
    """One version: what to ask vLLM for it with, and where its files are."""

    version: Version
    request: Any
    folder: _Folder


_PREFIX = "weightsync-adapter-"
_TENSORS_NAME = "adapter_model.safetensors"
_LOCK_NAME = "lock"
_FILE_NAMES = (_TENSORS_NAME, CONFIG_NAME, _LOCK_NAME)


class _Folder:
    """A directory of our own with one version's files, in memory if there is room.

    Removed with ``remove``, with its owner, or at the end of the process; what a killed process
    leaves is removed by the next one: its lock died with it.

    Raises:
        NoRoomError: there is too little room for so many bytes.
    """

    def __init__(self, nbytes: int, owner: object) -> None:
        place = next((p for p in _places() if _free_bytes(p) >= 2 * nbytes), None)
        if place is None:
            raise NoRoomError(f"{', '.join(_places())}: an adapter needs {nbytes:,} bytes")
        while True:
            self.path = tempfile.mkdtemp(prefix=_PREFIX, dir=place)
            self._lock = Lock(Directory.open(self.path), _LOCK_NAME, create=True)
            self.remove = weakref.finalize(owner, _remove, self.path, self._lock, os.getpid())
            if self._lock.try_exclusive():  # else somebody took it for a leftover
                break

    def write(self, snapshot: Snapshot, config: bytes) -> None:
        """
        Raises:
            EngineError: the files cannot be written.
        """
        manifest = snapshot.manifest
        tensors = {n: snapshot.tensor(n) for n in manifest.by_name if n != CONFIG_NAME}
        # A tied tensor is written under each of its names; the format knows no ties.
        tensors.update({name: snapshot.tensor(name).clone() for name in manifest.aliases})
        try:
            save_file(tensors, os.path.join(self.path, _TENSORS_NAME))
            with open(os.path.join(self.path, CONFIG_NAME), "wb") as file:
                file.write(config)
        except Exception as error:
            raise EngineError(f"{self.path}: the adapter was not written: {error}") from error

    @staticmethod
    def remove_leftovers() -> None:
        """Remove what killed processes of this user left."""
        for place in _places():
            for name in os.listdir(place):
                if not name.startswith(_PREFIX):
                    continue
                path = os.path.join(place, name)
                with contextlib.suppress(OSError, WeightSyncError):
                    lock = Lock(Directory.open(path), _LOCK_NAME)
                    if lock.try_exclusive():
                        _remove(path, lock, os.getpid())
                    lock.release()


def _places() -> list[str]:
    return [place for place in ("/dev/shm", tempfile.gettempdir()) if os.path.isdir(place)]


def _free_bytes(place: str) -> int:
    status = os.statvfs(place)
    return status.f_bavail * status.f_frsize


def _remove(path: str, lock: Lock, process: int) -> None:
    if os.getpid() != process:  # a forked child ends; the directory is its parent's
        return
    with contextlib.suppress(OSError, WeightSyncError):
        directory = Directory.open(path)
        for name in _FILE_NAMES:
            directory.discard(name)
        os.rmdir(path)
    lock.release()
