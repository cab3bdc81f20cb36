"""A receiver's place in a run: it finds the sender, watches the head and says how it went."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from weightsync.deadline import Deadline
from weightsync.errors import DeadlineError, ProtocolError, VersionGoneError, WeightSyncError
from weightsync.files import Directory, Lock, WatchedFile, is_locked
from weightsync.notice import Notice
from weightsync.report import ReceiverReport
from weightsync.run.records import (
    MAX_RECORD,
    RECEIVERS,
    SENDER_LOCK,
    report_to_json,
    require_receiver_id,
)
from weightsync.version import Version

_LAG = 5.0
"""Seconds after which a run that others know of is there on every host that has it mounted."""


class Announcement(Protocol):
    """What the head of a run says, as far as it matters here."""

    @property
    def version(self) -> Version: ...

    @property
    def receivers(self) -> tuple[str, ...] | None:
        """The ids of those it is meant for; None for everybody."""


A = TypeVar("A", bound=Announcement)


def announced(head: Announcement, after: Version | None, receiver: str | None, where: str) -> bool:
    """Whether a head is news for a receiver that holds ``after``.

    Raises:
        ProtocolError: it can never be, nor can what follows it.
    """
    if after is not None and head.version <= after:
        if head.version.epoch < after.epoch:
            raise ProtocolError(
                f"{where}: version {head.version} comes from a sender whose clock is "
                f"behind that of {after}, which is held; start it again with a right clock"
            )
        return False
    return head.receivers is None or receiver in head.receivers


class Membership(Generic[A]):
    """A receiver, or a mere reader (without an id), of the run at a path.

    Args:
        head: the name of the file that says what is newest.
        parse: what its content says; raises ProtocolError, with the name given to it.
    """

    def __init__(
        self, path: str, receiver: str | None, head: str, parse: Callable[[bytes, str], A]
    ) -> None:
        require_receiver_id(receiver)
        self.path = path
        self._receiver = receiver
        self._head_name = head
        self._parse = parse
        self._run: Directory | None = None
        self._reached = False
        self._mine: Lock | None = None
        self._said: ReceiverReport | None = None
        self._watched: WatchedFile | None = None
        self._seen: tuple[bytes, A] | None = None
        self._notice = Notice()
        # One thread may wait for the next version while another applies this one.
        self._looking = threading.RLock()
        self._closed = False

    def open(self, deadline: Deadline) -> None:
        """See :meth:`weightsync.transport.Subscriber.open`."""
        self._closed = False
        if deadline.wait(self._attach) is None:
            raise DeadlineError(
                f"no live sender at {self.path} within {deadline.seconds:.1f} s: is its "
                "connect() done, has it not ended (its run ends with it), and is the path the same "
                "on both sides?"
            )

    def reach(self, deadline: Deadline) -> None:
        """Find the run for reading: a version in it matters, not who is alive.

        Raises:
            VersionGoneError: the run is gone: its sender has ended, and its versions do not come
                back. Said at once by who has read from it before.
        """
        patience = deadline.at_most(0 if self._reached else _LAG)
        if patience.wait(self._find) is None:
            raise VersionGoneError(
                f"{self.path} is gone, and its versions with it: has its sender ended?"
            )

    def _find(self) -> bool | None:
        with self._looking:
            if self._run is None or not self._run.exists:
                try:
                    self._look_at(Directory.open(self.path))
                except FileNotFoundError:
                    return None
            return True

    def _attach(self) -> bool | None:
        """Find the run of a live sender, and enter this receiver into it; None to look again.

        Looks again as well when the sender has ended: it, or the next one, may have removed the
        directory or this receiver's record.
        """
        with self._looking:
            if self._closed:  # by another thread, meanwhile
                return None
            if self._attached():
                return True
            if self._mine is not None:
                self._mine.release()
                self._mine = None
            try:
                run = Directory.open(self.path)
                if not is_locked(run, SENDER_LOCK) or not self._enter(run):
                    return None
            except FileNotFoundError:  # not made yet, or just being removed
                return None
            self._look_at(run)
            if self._said is not None:
                with contextlib.suppress(FileNotFoundError):
                    self.acknowledge(self._said)
            return True

    def _attached(self) -> bool:
        if self._receiver is not None:
            return self._mine is not None and self._mine.exists
        return self._run is not None and self._run.exists

    def _enter(self, run: Directory) -> bool:
        """Lock this receiver's name in a run."""
        if self._receiver is not None:
            records = run.subdirectory(RECEIVERS)
            mine = Lock(records, f"{self._receiver}.lock", create=True)
            # The sender may just be looking whether this receiver's predecessor is alive.
            if not Deadline(0.2).wait(lambda: mine.try_exclusive() or None):
                mine.release()
                raise WeightSyncError(
                    f"{self.path}: another live receiver is called {self._receiver!r}"
                )
            if not mine.exists:
                mine.release()
                return False
            for suffix in (".json", ".left"):  # what a predecessor said
                records.remove(f"{self._receiver}{suffix}")
            self._mine = mine
        return True

    def _look_at(self, run: Directory) -> None:
        if self._watched is not None:
            self._watched.close()
        self._run, self._reached = run, True
        self._watched = WatchedFile(run, self._head_name, MAX_RECORD)
        self._seen = None

    def wait(self, after: Version | None, deadline: Deadline) -> Version | None:
        """See :meth:`weightsync.transport.Subscriber.wait`."""

        def attempt() -> Version | None:
            if self._attach() is None:
                return None
            head = self.head()
            if head is None or not announced(head, after, self._receiver, self.path):
                return None
            return head.version

        return deadline.wait(attempt, self._pause)

    def _pause(self, seconds: float) -> None:
        run = self._run
        if run is None:
            time.sleep(seconds)
        else:
            self._notice.wait(run, seconds)

    def head(self) -> A | None:
        """What is newest; None if nothing was published."""
        with self._looking:
            run = self.directory()
            assert self._watched is not None
            data = self._watched.read()
            if data is None:
                return None
            if self._seen is None or self._seen[0] is not data:
                self._seen = data, self._parse(data, f"{run.path}/{self._head_name}")
            return self._seen[1]

    def directory(self) -> Directory:
        """The run's directory.

        Raises:
            WeightSyncError: it was not found yet.
        """
        if self._run is None:
            raise WeightSyncError("the subscriber is not open")
        return self._run

    def acknowledge(self, report: ReceiverReport) -> None:
        """See :meth:`weightsync.transport.Subscriber.acknowledge`."""
        self._said = report
        run = self.directory()
        if self._receiver is None:
            raise WeightSyncError("this subscriber has no id to acknowledge under")
        if self._attached():  # else it is said again to the next sender
            run.subdirectory(RECEIVERS).replace(f"{self._receiver}.json", report_to_json(report))

    def leave(self) -> None:
        """Sign off. Idempotent."""
        with self._looking:
            self._closed = True
            run, self._run = self._run, None
            self._seen = None
            if self._watched is not None:
                self._watched.close()
            mine, self._mine = self._mine, None
            if mine is None:
                return
            if run is not None and mine.exists:
                with contextlib.suppress(FileNotFoundError):
                    self._sign_off(run.subdirectory(RECEIVERS))
            mine.release()

    def _sign_off(self, records: Directory) -> None:
        # A sender may be about to read what it waits for, or why nobody is there.
        if self._said is None or self._said.state != "failed":
            records.rename(f"{self._receiver}.json", f"{self._receiver}.left")
        records.remove(f"{self._receiver}.lock")
