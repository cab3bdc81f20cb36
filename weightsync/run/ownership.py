"""One sender per run: the lock that it holds while it lives, and its epoch."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.util import Finalize
from typing import Any

from weightsync.deadline import Deadline
from weightsync.errors import SenderBusyError, VersionError, WeightSyncError
from weightsync.files import Directory, Lock
from weightsync.run.process import busy_words, self_description
from weightsync.run.receivers import names_of_records, sweep_records
from weightsync.run.records import MAX_RECORD, SENDER_LOCK
from weightsync.version import Version, require_newer

BUSY_SECONDS = 2.0
"""How long a sender waits for another one that is just about to end."""


class Ownership:
    """A sender's hold on its run.

    It ends with ``release``, with the process, or when this object is let go.

    Args:
        path: of the run's directory, which is made if its parent is there.
        at_end: what is done with the directory then, unless it was removed. It must not refer to
            the publisher: that could not be let go.

    Attributes:
        epoch: of this sender; 0 before the first one.
    """

    def __init__(self, path: str, at_end: Callable[[Directory], None] | None = None) -> None:
        self.path = path
        self.epoch = 0
        self._at_end = at_end
        self._run: Directory | None = None
        self._lock: Lock | None = None
        self._pid = os.getpid()
        self._end: Finalize[None] | None = None

    @property
    def held(self) -> bool:
        return self._lock is not None and self._lock.exists

    @contextmanager
    def taking(self, deadline: Deadline) -> Iterator[Directory]:
        """Take the run; whatever fails inside the block gives it back.

        Raises:
            SenderBusyError: another live sender owns it.
        """
        self.release()  # the directory was removed behind our back
        run, lock, left = self._lock_run(deadline)
        self._run, self._lock, self._pid = run, lock, os.getpid()
        before = self.epoch
        try:
            sweep_records(run, left)
            yield run
        except BaseException:
            self._run = self._lock = None
            if lock.is_empty:  # nobody has begun here yet
                run.discard(SENDER_LOCK)
            elif self.epoch != before:
                _say_ended(run, lock)
            lock.release()
            raise
        # Also when the trainer ends without shutdown(), or lets go of the sender. Unlike atexit,
        # this runs at the end of multiprocessing's children too.
        self._end = Finalize(self, _end, (run, lock, self._at_end, self._pid), exitpriority=0)

    def _lock_run(self, deadline: Deadline) -> tuple[Directory, Lock, list[str]]:
        """The run, its lock, and what receivers had left before it was locked."""

        def attempt() -> tuple[Directory, Lock, list[str]] | None:
            try:
                run = Directory.open(self.path, create=True)
            except FileNotFoundError:
                parent = os.path.dirname(self.path)
                raise WeightSyncError(f"{self.path}: there is no directory {parent}") from None
            # A former sender may remove the lock, and the directory, between any two steps.
            try:
                lock = Lock(run, SENDER_LOCK, create=True)
            except FileNotFoundError:
                return None
            # Looked at first: receivers come as soon as they see the lock.
            left = names_of_records(run)
            if lock.try_exclusive() and lock.exists:
                return run, lock, left
            lock.release()
            return None

        owned = deadline.at_most(BUSY_SECONDS).wait(attempt)
        if owned is None:
            raise SenderBusyError(
                f"{self.path}: "
                + busy_words(_owner_at(self.path), "give each trainer a path of its own")
            )
        return owned

    def begin(self, epoch: int | None = None, seen: Version | None = None) -> None:
        """Begin an epoch that is later than all before.

        Args:
            epoch: to be used; None draws one.
            seen: a version that stands in the run.

        Raises:
            VersionError: the epoch is not later.
        """
        before = max(epoch_of(self.directory()), seen.epoch if seen else 0, self.epoch)
        if epoch is None:
            # The clock keeps epochs growing over a directory that was removed and made again; one
            # tick of it passes, so that the next sender's is another even if this one ends at once.
            time.sleep(0.001)
            epoch = max(before + 1, int(time.time() * 1000))
        if epoch <= before:
            raise VersionError(
                f"{self.path} has seen a sender of epoch {before}; {epoch} is not later"
            )
        assert self._lock is not None
        self._lock.write(json.dumps({"epoch": epoch, **self_description()}).encode())
        self.epoch = epoch

    def directory(self) -> Directory:
        """The run's directory.

        Raises:
            WeightSyncError: it is not, or no longer, this sender's.
        """
        if self._run is None or self._lock is None:
            raise WeightSyncError("the publisher is not open")
        if self._lock.released or self._pid != os.getpid():
            raise WeightSyncError(
                "this publisher was opened in another process; open one in this process"
            )
        if not self._lock.exists:
            raise WeightSyncError(
                f"{self._run.path} was removed while the sender was using it; connect() again"
            )
        return self._run

    def require_newer(self, version: Version, last: Version | None) -> None:
        """
        Raises:
            VersionError: the version is of another epoch, or older than the last one.
        """
        require_newer(version, self.epoch, last)

    def release(self) -> None:
        """Do what is to be done at the end, and let others have the run. Idempotent."""
        self._run = self._lock = None
        if self._end is not None:
            self._end()


def epoch_of(run: Directory) -> int:
    """The epoch of the last sender that owned a run; 0 if there is none."""
    try:
        epoch = json.loads(run.read(SENDER_LOCK, MAX_RECORD))["epoch"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError, WeightSyncError):
        return 0
    return epoch if type(epoch) is int and 0 <= epoch < 1 << 53 else 0


def owner_of(run: Directory) -> dict[str, Any]:
    """What the last sender that owned a run wrote of itself; empty if that cannot be read."""
    try:
        record = json.loads(run.read(SENDER_LOCK, MAX_RECORD))
    except (OSError, ValueError, RecursionError, WeightSyncError):
        return {}
    return record if isinstance(record, dict) else {}


def _owner_at(path: str) -> dict[str, Any]:
    try:
        return owner_of(Directory.open(path))
    except (OSError, WeightSyncError):
        return {}


def _end(run: Directory, lock: Lock, at_end: Callable[[Directory], None] | None, pid: int) -> None:
    if os.getpid() != pid or lock.released:
        return  # a forked child ends without touching its parent's run
    try:
        if lock.exists and at_end is not None:
            at_end(run)
    finally:
        if lock.exists:
            _say_ended(run, lock)
        lock.release()


def _say_ended(run: Directory, lock: Lock) -> None:
    """For who looks at what stays: a killed sender does not come to this."""
    with suppress(OSError, RecursionError):
        lock.write(json.dumps({**owner_of(run), "ended": time.time()}).encode())


def has_ended(owner: Mapping[str, Any]) -> bool:
    """Whether a sender, by its own words, has ended by itself."""
    return isinstance(owner.get("ended"), (int, float))
