"""Who is told of each update: what a listener hears, and how it is called."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from weightsync.errors import ReceiverError
from weightsync.report import Seconds, SyncReport
from weightsync.version import Version
from weightsync.words import one_line, size

if TYPE_CHECKING:
    from weightsync.scheme_end import SchemeEnd

log = logging.getLogger("weightsync")

Side = Literal["sender", "receiver"]


@dataclass(frozen=True)
class Outcome:
    """What came of one update at one end, or of the attempt at one.

    Attributes:
        end: the sender or receiver.
        version: of the update; None if it failed before that was known.
        seconds: of its phases, as far as it came.
        time: when it was over, in seconds since 1970.
        report: what was done; None if nothing was.
        error: what was raised, if it failed. Beside a report: the version is published, but a
            receiver failed, died or is late.
    """

    end: SchemeEnd
    version: Version | None
    seconds: Seconds
    time: float
    report: SyncReport | None = None
    error: BaseException | None = None

    @property
    def side(self) -> Side:
        return self.end.side

    @property
    def scheme(self) -> str:
        """Its name; of a fallback's, with what was used behind it: ``fallback:disk``."""
        return self.report.scheme if self.report is not None else self.end.scheme.url_scheme

    @property
    def run(self) -> str:
        """The scheme's URL without options: which run it is, and no secret."""
        return self.end.scheme.where()

    @property
    def receiver(self) -> str:
        """The receiver's id; empty of a sender."""
        return self.end.id

    def __str__(self) -> str:
        """One line, for logs."""
        who = f"receiver {self.receiver}" if self.side == "receiver" else f"sender to {self.run}"
        what = f"version {self.version}" if self.version is not None else "no version"
        took = f"{self.seconds.total:.3f} s"
        if self.report is None:
            return f"{who}: {what} by {self.scheme} failed after {took}: {one_line(self.error)}"
        if self.report.skipped:
            return f"{who}: {what} by {self.scheme} was skipped: no buffer was free"
        stopped = f", requests stopped for {self.seconds.pause:.3f} s"
        pause = stopped if self.side == "receiver" else ""
        failed = f"; {one_line(self.error)}" if self.error is not None else ""
        done = f"{size(self.report.nbytes)} in {took}"
        return f"{who}: {what} by {self.scheme}, {done}{pause}{failed}"


Listener = Callable[[Outcome], None]
"""Called after each update, in the thread that made it, which waits for it.

What it raises is logged, once, and fails no update.
"""


@dataclass
class Call:
    """A call that may become an update. Whoever makes one notes here what is known of it."""

    began: float = field(default_factory=time.perf_counter)
    version: Version | None = None
    seconds: Seconds | None = None
    report: SyncReport | None = None

    def outcome(self, end: SchemeEnd, error: BaseException | None = None) -> Outcome:
        report = error.report if isinstance(error, ReceiverError) else self.report
        version = report.version if report is not None else self.version
        seconds = report.seconds if report is not None else self.seconds
        if seconds is None:
            seconds = Seconds(total=time.perf_counter() - self.began)
        return Outcome(end, version, seconds, time.time(), report, error)


@dataclass(eq=False)
class _Subscription:
    listener: Listener
    failed: bool = False


class Listeners:
    """Those of one end. May be changed by one thread while another tells them something."""

    def __init__(self, listeners: Iterable[Listener] = ()) -> None:
        self._all: tuple[_Subscription, ...] = ()
        for listener in listeners:
            self.add(listener)

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(self, listener: Listener) -> None:
        """One that is there already hears everything once."""
        if not callable(listener):
            raise TypeError(f"a listener is called with each outcome; {listener!r:.80} cannot be")
        if all(listener != known.listener for known in self._all):
            self._all = (*self._all, _Subscription(listener))

    def remove(self, listener: Listener) -> None:
        self._all = tuple(known for known in self._all if known.listener != listener)

    def tell(self, outcome: Outcome) -> None:
        for each in self._all:
            try:
                each.listener(outcome)
            except Exception:
                if not each.failed:
                    each.failed = True
                    log.exception(
                        "listener %r failed, which is said once (%s)", each.listener, outcome
                    )


everywhere = Listeners()
"""Those of all ends of this process."""


def subscribe(listener: Listener) -> None:
    """Have a callable hear of each update of every sender and receiver of this process, also of
    those that a framework makes, and of those that are made later.

    As :meth:`SchemeEnd.subscribe <weightsync.scheme_end.SchemeEnd.subscribe>` otherwise.
    """
    everywhere.add(listener)


def unsubscribe(listener: Listener) -> None:
    """The reverse of :func:`subscribe`. Idempotent."""
    everywhere.remove(listener)
