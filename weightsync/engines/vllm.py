"""vLLM's ``LLM`` as an engine, driven through its own weight-transfer life cycle.

Weights never cross vLLM's RPC: each worker process opens the snapshot itself, in the plug-in's
half (``weightsync.vllm_worker``). This half runs in the process that holds the ``LLM``.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from weightsync.deadline import Deadline, call_with_deadline
from weightsync.engine import Engine, Update
from weightsync.errors import DeadlineError, EngineDiedError, EngineError
from weightsync.version import Version

BACKEND = "weightsync"
_CALL = "weightsync_call"
_GRACE = 10.0
"""Seconds that workers, who keep the deadline themselves, have to say that it is over."""

T = TypeVar("T")


class VLLMEngine(Engine):
    """Drives a ``vllm.LLM`` made with ``WeightTransferConfig(backend="weightsync")``.

    Args:
        llm: the engine. Calls of it must come from one thread at a time: put them inside
            ``with receiver.hold():`` if the receiver follows in the background.
        mode: what becomes of requests that run while weights change: ``"keep"`` freezes them and
            lets them go on with the new weights (their cache is computed anew), ``"wait"`` lets
            them end first, ``"abort"`` ends them.
    """

    def __init__(self, llm: Any, *, mode: Literal["keep", "wait", "abort"] = "keep") -> None:
        if mode not in ("keep", "wait", "abort"):
            raise EngineError(f"mode={mode!r}: 'keep', 'wait' or 'abort'")
        self._llm = llm
        self._mode = mode
        self._was_paused = False

    @property
    def target(self) -> Any:
        return self._llm

    @property
    def workers(self) -> int:
        config = self._llm.llm_engine.vllm_config.parallel_config
        return int(config.world_size * config.data_parallel_size)

    def connect(self, url: str, deadline: Deadline) -> None:
        config = getattr(self._llm.llm_engine.vllm_config, "weight_transfer_config", None)
        backend = getattr(config, "backend", None)
        if backend != BACKEND:
            made = f"with backend={backend!r}" if backend else "without weight_transfer_config"
            raise EngineError(
                f"the LLM was made {made}: make it with "
                f"LLM(..., weight_transfer_config=WeightTransferConfig(backend={BACKEND!r}))"
            )
        info = {"init_info": {"scheme": url, "driven": True}}
        self._bounded(lambda: self._llm.init_weight_transfer_engine(info), deadline, "init")
        self._require_ok(deadline)

    def stage(self, update: Update, deadline: Deadline) -> None:
        request = {
            "op": "stage",
            "scheme": update.url,
            "version": list(update.version),
            "timeout": deadline.remaining,
            "driver": [socket.gethostname(), os.getpid()],
        }
        self._ask(request, deadline)

        def attempt() -> bool | None:
            states = self._require_ok(deadline)
            return True if not any(state["staging"] for state in states) else None

        if deadline.wait(attempt) is None:
            raise DeadlineError(f"workers had not verified {update.version} in time")
        # Between two steps of the model, and before anything is paused or touched.
        self._ask({"op": "check"}, deadline)
        self._require_ok(deadline)

    def pause(self, deadline: Deadline) -> None:
        # An engine that its user put to sleep is left so.
        self._was_paused = bool(
            self._bounded(self._llm.llm_engine.is_sleeping, deadline, "is_sleeping")
        )
        if not self._was_paused:
            self._bounded(lambda: self._llm.sleep(level=0, mode=self._mode), deadline, "pause")

    def unstage(self) -> None:
        with contextlib.suppress(Exception):  # an engine that is gone has nothing to release
            self._ask({"op": "release"}, Deadline(_GRACE))

    def apply(self, update: Update, deadline: Deadline) -> None:
        info = {
            "scheme": update.url,
            "version": list(update.version),
            "timeout": deadline.remaining,
            "driven": True,
        }
        try:
            self._bounded(self._llm.start_weight_update, deadline, "start_weight_update")
            self._require_ok(deadline)
            self._bounded(
                lambda: self._llm.update_weights({"update_info": info}), deadline, "update_weights"
            )
            self._require_ok(deadline)
        except EngineDiedError:
            raise
        except BaseException:
            # One rank's failure must undo the session on all of them, or they would differ; and a
            # session left open would leave layers without memory.
            self._undo()
            raise
        self._bounded(self._llm.finish_weight_update, deadline, "finish_weight_update")
        for state in self._require_ok(deadline):
            if state["held"] != list(update.version):
                raise EngineError(f"worker {state['rank']} holds {state['held']} after the update")

    def _undo(self) -> None:
        deadline = Deadline(_GRACE)
        with contextlib.suppress(Exception):
            self._ask({"op": "abandon"}, deadline)
            self._bounded(self._llm.finish_weight_update, deadline, "finish_weight_update")
        self.unstage()

    def flush(self, deadline: Deadline) -> None:
        llm = self._llm

        # Running requests were kept with their old cache blocks: preempt them, so that theirs is
        # computed anew too; without it vLLM refuses while any block is in use.
        def attempt() -> bool | None:
            done = self._bounded(
                lambda: llm.reset_prefix_cache(reset_running_requests=True),
                deadline,
                "reset_prefix_cache",
            )
            return done or None

        if deadline.wait(attempt) is None:
            raise EngineError("vLLM did not confirm that its prefix cache is empty")
        # Outputs of vision and audio encoders are computed with weights, too.
        self._bounded(llm.llm_engine.reset_encoder_cache, deadline, "reset_encoder_cache")

    def label(self, version: Version | None) -> None:
        say = getattr(self._llm, "update_weight_version", None)
        if say is None:  # before vLLM 0.26 an LLM has no label
            return
        words = str(version) if version else "unusable"
        self._bounded(lambda: say(words), Deadline(_GRACE), "update_weight_version")

    def resume(self) -> None:
        if not self._was_paused:
            self._bounded(
                lambda: self._llm.wake_up(tags=["scheduling"]), Deadline(_GRACE), "wake_up"
            )

    def close(self) -> None:
        self.unstage()

    # ---------------------------------------------------------------- talking to the workers

    def _ask(self, request: dict[str, Any], deadline: Deadline) -> list[dict[str, Any]]:
        text = json.dumps(request)
        answers = self._bounded(
            lambda: self._llm.collective_rpc(_CALL, args=(text,)), deadline, str(request["op"])
        )
        return [json.loads(answer) for answer in answers]

    def _require_ok(self, deadline: Deadline) -> list[dict[str, Any]]:
        """Every worker's state.

        Raises:
            EngineError: some have recorded an error; quotes each.
        """
        states = self._ask({"op": "status"}, deadline)
        failed = [f"worker {s.get('rank')}: {s['error']}" for s in states if s["error"]]
        if failed:
            raise EngineError("; ".join(failed))
        return states

    def _bounded(self, function: Callable[[], T], deadline: Deadline, what: str) -> T:
        return call_vllm(self._llm, function, deadline, what)


def call_vllm(llm: Any, function: Callable[[], T], deadline: Deadline, what: str) -> T:
    """Call a ``vllm.LLM``, and stop waiting when its engine process dies or does not answer.

    Raises:
        EngineDiedError: it died: vLLM notices that, but does not tell a call that waits for it.
        DeadlineError: it had not answered a grace time after the deadline.
    """
    # vLLM's own RPC timeouts leave replies behind that later calls would get. The workers keep the
    # deadline themselves; this catches those that do not answer at all.

    def require_alive() -> None:
        core = getattr(llm.llm_engine, "engine_core", None)
        if getattr(getattr(core, "resources", None), "engine_dead", False):
            raise EngineDiedError("vLLM's engine process died")

    within = Deadline(deadline.remaining + _GRACE)
    return call_with_deadline(function, within, f"vLLM's {what}", require_alive)


def accepts(target: Any) -> bool:
    return any(
        kind.__name__ == "LLM" and kind.__module__.partition(".")[0] == "vllm"
        for kind in type(target).__mro__
    )
