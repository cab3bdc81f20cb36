"""The inference end: sees what the trainer shows, maps it, and says when it is done with it."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from weightsync.deadline import Deadline
from weightsync.errors import (
    CorruptError,
    DeadlineError,
    VersionGoneError,
    WeightSyncError,
)
from weightsync.files import Lock, is_locked
from weightsync.intake import copy_tensor
from weightsync.report import ReceiverReport
from weightsync.run.membership import Membership
from weightsync.run.records import SENDER_LOCK
from weightsync.schemes.cuda_ipc import layout
from weightsync.schemes.cuda_ipc.layout import Head, Table
from weightsync.schemes.cuda_ipc.mapped import Mapped
from weightsync.tensors import Addresses
from weightsync.transport import Snapshot, Subscriber, Targets
from weightsync.version import Version

if TYPE_CHECKING:
    from weightsync.schemes.cuda_ipc import CUDAIPCScheme

_LOOKS = 1.0
"""Seconds between two looks whether the trainer lives."""


class CUDAIPCSubscriber(Subscriber):
    """See :class:`~weightsync.transport.Subscriber`; the protocol is in docs/architecture.md."""

    def __init__(self, scheme: CUDAIPCScheme, receiver: str | None) -> None:
        self._exchange = scheme.exchange()
        self._delegated = False
        self._keep = not scheme.release
        self._path = scheme.path
        self._member = Membership(scheme.path, receiver, layout.HEAD, Head.from_json)
        self._mapped: tuple[str, Mapped] | None = None
        self._snapshots: weakref.WeakSet[CUDAIPCSnapshot] = weakref.WeakSet()
        self._mapping = threading.Lock()
        self._watched = False

    def delegate(self, workers: int) -> None:
        self._delegated = workers > 0

    def open(self, deadline: Deadline) -> None:
        if not self._delegated:  # else only the workers need a GPU, which is for them to say
            self._exchange.require()
        self._member.open(deadline)

    def wait(self, after: Version | None, deadline: Deadline) -> Version | None:
        return self._member.wait(after, deadline)

    def acknowledge(self, report: ReceiverReport) -> None:
        """Also ends the leases of what was attempted: the trainer waits for that."""
        everywhere = report.state == "applied" and all(
            engine.version == report.version for engine in report.engines
        )
        for snapshot in list(self._snapshots):
            if report.attempted is not None and snapshot.version <= report.attempted:
                snapshot.end_lease(nobody_reads=everywhere)
        self._member.acknowledge(report)

    # ---------------------------------------------------------------- data

    def snapshot(self, version: Version, deadline: Deadline) -> Snapshot:
        self._member.reach(deadline)
        snapshot = deadline.wait(lambda: self._lease(version))
        if snapshot is None:
            raise DeadlineError(
                f"no lease on version {version} at {self._path} within {deadline.seconds:.1f} s"
            )
        self._snapshots.add(snapshot)
        return snapshot

    def _lease(self, version: Version) -> CUDAIPCSnapshot | None:
        """Lease what is shown now, if it is that version; None to look again."""
        gone = VersionGoneError(
            f"{self._path} shows version {version} no more: the trainer may be changing its "
            "weights already; the next version comes with its next update"
        )
        try:
            lock = Lock(self._member.directory(), layout.lease_name(version))
        except FileNotFoundError:
            raise gone from None
        try:
            # Locked first, read then: what the head says now stays true while the lock is held,
            # unless the trainer's patience ends.
            if not lock.try_shared():
                lock.release()
                return None
            head = self._shown(version)
            if head is None:
                raise gone
            try:
                mapped = self._map(head)
            except FileNotFoundError:
                raise gone from None
            return CUDAIPCSnapshot(version, mapped, lock, lambda: self._shown(version) is not None)
        except BaseException:
            lock.release()
            raise

    def _shown(self, version: Version) -> Head | None:
        """The head, if it is still of that version."""
        head = self._member.head()
        return head if head is not None and head.version == version else None

    def _map(self, head: Head) -> Mapped:
        with self._mapping:
            if self._mapped is None or self._mapped[0] != head.digest:
                run = self._member.directory()
                data = run.read(head.table, layout.MAX_TABLE)
                where = f"{run.path}/{head.table}"
                if layout.digest_of(data) != head.digest:
                    raise CorruptError(f"{where} is not what was written")
                mapped = Mapped(self._exchange, Table.from_json(data, where), self._keep)
                self._let_go()
                self._mapped = head.digest, mapped
            if not self._watched:
                self._watched = True
                watch = partial(_watch, weakref.ref(self))
                threading.Thread(target=watch, name="weightsync trainer", daemon=True).start()
            return self._mapped[1]

    def _let_go(self) -> None:
        former, self._mapped = self._mapped, None
        if former is not None:
            former[1].retire()

    def let_go_of_the_dead(self) -> bool:
        """Unmap the memory of a dead trainer, which is not free before. False: nothing is left."""
        with self._mapping:
            try:
                alive = is_locked(self._member.directory(), SENDER_LOCK)
            except (OSError, WeightSyncError):
                alive = False
            if not alive:
                self._let_go()
            self._watched = self._mapped is not None
            return self._watched

    def close(self) -> None:
        for snapshot in list(self._snapshots):
            snapshot.end_lease(nobody_reads=False)
        with self._mapping:
            self._let_go()
        self._member.leave()


class CUDAIPCSnapshot(Snapshot):
    """A shared kernel lock on a version, and the trainer's own tensors.

    Args:
        shown: whether the trainer still shows the version.
    """

    def __init__(
        self, version: Version, mapped: Mapped, lock: Lock, shown: Callable[[], bool]
    ) -> None:
        self.version = version
        self.manifest = mapped.manifest
        self._mapped = mapped
        self._lock = lock
        self._shown = shown
        self._used = True
        self._ending = threading.Lock()
        mapped.enter()

    def tensor(self, name: str) -> torch.Tensor:
        return self._leased().tensor(self.manifest.spec(name))

    def verify(self, names: Sequence[str] | None = None) -> None:
        """There is nothing to compare with: the bytes are the trainer's own, and never moved."""
        self._leased()

    def addresses(self, place: torch.device) -> Addresses | None:
        return self._leased().addresses(place)

    def copy_into(self, targets: Targets) -> None:
        for name in self._leased().move_into(targets):
            # .data: also for modules built under inference_mode, which refuse copy_ outside it.
            copy_tensor(targets.tensors[name].data, self.tensor(name), name)
        self._mapped.wait()

    def settle(self) -> None:
        self._mapped.wait()
        try:
            shown = self._shown()
        except (OSError, WeightSyncError):
            shown = False
        if not shown:
            raise VersionGoneError(
                f"the trainer took version {self.version} back while it was read here, and may "
                "have changed its weights: its deadline was over, or it has ended"
            )

    def _leased(self) -> Mapped:
        if self._lock.released:
            raise VersionGoneError(
                f"the lease on version {self.version} is over: the trainer keeps no copy, and may "
                "have changed its weights since"
            )
        return self._mapped

    def end_lease(self, nobody_reads: bool) -> None:
        """Let the trainer go on.

        Args:
            nobody_reads: no thread of this process may be in the middle of reading.
        """
        try:
            self._mapped.wait()
        finally:
            self._lock.release()
            if nobody_reads:
                self._leave()

    def _leave(self) -> None:
        with self._ending:
            used, self._used = self._used, False
        if used:
            self._mapped.leave()

    def close(self) -> None:
        if self._used:
            self.end_lease(nobody_reads=True)


def _watch(subscriber: weakref.ref[CUDAIPCSubscriber]) -> None:
    """Until nothing is mapped any more. In a thread: an engine's worker is not asked for anything
    between two updates."""
    while True:
        time.sleep(_LOOKS)
        there = subscriber()
        if there is None or not there.let_go_of_the_dead():
            return
        del there
