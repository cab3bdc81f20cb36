"""Deadlines: every wait in the library is bounded by one of these."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from weightsync.errors import DeadlineError

T = TypeVar("T")


class Deadline:
    """A point in monotonic time, shared by the successive waits of one operation."""

    __slots__ = ("_end", "seconds")

    def __init__(self, seconds: float) -> None:
        number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if not number or not seconds >= 0:
            raise ValueError(f"a timeout is a number of seconds, not negative: {seconds!r}")
        self.seconds = float(seconds)
        self._end = time.monotonic() + self.seconds

    @classmethod
    def of(cls, timeout: float | Deadline) -> Deadline:
        return timeout if isinstance(timeout, Deadline) else cls(timeout)

    @property
    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._end - time.monotonic())

    @property
    def expired(self) -> bool:
        return time.monotonic() >= self._end

    def at_most(self, seconds: float) -> Deadline:
        """The earlier of this deadline and one ``seconds`` from now."""
        return Deadline(min(self.remaining, seconds))

    def wait(
        self, ready: Callable[[], T | None], pause: Callable[[float], object] = time.sleep
    ) -> T | None:
        """Call ``ready`` until it returns something other than None, or the time is up.

        Polls every 0.5 ms at first, so that a version is seen within a millisecond of its
        commit, and every 2 ms after a while, which costs under 1 % of a core.

        Args:
            pause: waits for so many seconds, or less.
        """
        polls = 0
        while True:
            result = ready()
            if result is not None:
                return result
            left = self.remaining
            if left <= 0:
                return None
            polls += 1
            pause(min(left, 0.0005 if polls < 200 else 0.002))


def call_with_deadline(
    function: Callable[[], T],
    deadline: Deadline,
    what: str,
    check: Callable[[], None] = lambda: None,
) -> T:
    """Run a call that has no deadline of its own, and stop waiting for it at the deadline.

    The call itself cannot be cancelled: it keeps its (daemon) thread until it returns. This is
    the last line of defence against a peer that never answers, not a way to schedule work.

    Args:
        check: called every tenth of a second; what it raises ends the wait as well.

    Raises:
        DeadlineError: ``what`` did not return in time.
    """
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(function())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name=f"weightsync {what}", daemon=True)
    thread.start()
    try:
        thread.join(min(deadline.remaining, 0.1))
        while thread.is_alive() and not deadline.expired:
            check()
            thread.join(min(deadline.remaining, 0.1))
    except BaseException:
        # Interrupted: what the caller does next must not meet the call in the middle of a send.
        thread.join(1.0)
        raise
    if failure:
        raise failure[0]
    if not outcome:
        raise DeadlineError(f"{what} did not return within {deadline.seconds:.1f} s")
    return outcome[0]
