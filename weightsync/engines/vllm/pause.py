"""One pause of a vLLM engine: begun, and ended by whoever began it.

Several drivers may share an engine (one for the base, one for each adapter). Those of one process
take turns, so that none lets requests go on while another changes weights.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import Any

from weightsync.deadline import Deadline
from weightsync.engines.vllm.client import GRACE, Mode, VLLMClient
from weightsync.errors import DeadlineError, EngineDiedError, EngineError


@dataclass(eq=False)
class _Turn:
    """
    Attributes:
        stopped: a driver of this process paused the engine, and has not resumed it.
        awake_at: how often it had been paused when it was last known to be awake.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    stopped: bool = False
    awake_at: int | None = None


_turns: weakref.WeakKeyDictionary[Any, _Turn] = weakref.WeakKeyDictionary()
_turns_lock = threading.Lock()


class Pause:
    """
    Args:
        mode: what becomes of requests that run.

    Attributes:
        seconds: that the last one lasted, from before vLLM was asked to stop until it had gone on.
            None: its user's own goes on.
    """

    def __init__(self, client: VLLMClient, mode: Mode) -> None:
        self._client = client
        self._mode = mode
        self._turn = _turn_of(client.target)
        self._has_turn = False
        self._began = False
        self._before: int | None = None
        self._stopped = 0.0
        self.seconds: float | None = None

    def begin(self, deadline: Deadline) -> None:
        """Let no request make progress. An engine that its user paused is left to them.

        Raises:
            DeadlineError: another driver of this process does not end its own.
        """
        if not self._turn.lock.acquire(timeout=deadline.remaining):
            raise DeadlineError(f"the {self._client.name} was in another update all the time")
        self._has_turn = True
        self.seconds = None
        self._before = self._client.pauses()
        if not self._is_paused_by_user(deadline):
            self._began = True
            self._announce(True, deadline)
            self._stopped = time.perf_counter()
            self._client.pause(self._mode, deadline)

    def end(self, in_any_case: bool = False) -> None:
        """Let requests go on, if ``begin`` has stopped them. To be called whatever happens.

        Args:
            in_any_case: also if their user has.
        """
        try:
            if self._began and not in_any_case and self._user_paused_since():
                self._began = False
                self._turn.stopped = False
            elif self._began or in_any_case:
                self._insist_on_resuming(Deadline(GRACE))
                if self._began and self._before is not None and not in_any_case:
                    self._turn.awake_at = self._before + 1
                self.seconds = time.perf_counter() - self._stopped if self._began else None
                self._began = False
                with contextlib.suppress(Exception):  # the engine itself runs
                    self._announce(False, Deadline(GRACE))
        finally:
            if self._has_turn:
                self._has_turn = False
                self._turn.lock.release()

    def _user_paused_since(self) -> bool:
        """Whether somebody else did so in the middle of the update: it is theirs to end."""
        now = self._client.pauses()
        return self._before is not None and now is not None and now > self._before + 1

    def _is_paused_by_user(self, deadline: Deadline) -> bool:
        """Not by a driver of ours that did not live to resume it."""
        if self._client.only_we_pause and self._before == self._turn.awake_at is not None:
            return False  # nobody has, since it was seen to be awake
        if not self._client.is_paused(deadline):
            self._turn.awake_at = self._before
            return False
        if self._client.ends_with_us:
            return not self._turn.stopped
        return not any(json.loads(text).get("paused") for text in self._ask("status", deadline))

    def _insist_on_resuming(self, deadline: Deadline) -> None:
        """An engine that stays paused is worse than one that fails."""
        while True:
            try:
                return self._client.resume(deadline)
            except EngineDiedError:
                raise
            except EngineError:  # data-parallel ranks may still be on their way into the pause
                if deadline.expired:
                    raise
                time.sleep(min(0.1, deadline.remaining))

    def _announce(self, stopped: bool, deadline: Deadline) -> None:
        """Have it known who paused the engine, should this process not live to resume it."""
        self._turn.stopped = stopped
        if not self._client.ends_with_us:
            self._ask("pausing" if stopped else "resumed", deadline)

    def _ask(self, op: str, deadline: Deadline) -> list[str]:
        return self._client.ask(json.dumps({"op": op}), deadline, op)


def _turn_of(target: Any) -> _Turn:
    with _turns_lock:
        try:
            return _turns.setdefault(target, _Turn())
        except TypeError:  # cannot be referred to weakly: it is one driver's own
            return _Turn()
