"""The trainer's end: says where the weights lie, and takes that back before they change."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from weightsync.deadline import Deadline
from weightsync.errors import DeadlineError, ProtocolError, VersionError, WeightSyncError
from weightsync.files import Directory, Lock
from weightsync.manifest import Manifest
from weightsync.report import ReceiverReport
from weightsync.run.ownership import Ownership
from weightsync.run.receivers import Receivers, RecordFiles
from weightsync.run.records import addressees
from weightsync.run.removal import remove_temporaries
from weightsync.schemes.cuda_ipc import layout
from weightsync.schemes.cuda_ipc.exports import Exports, Shown
from weightsync.schemes.cuda_ipc.layout import Head, Table
from weightsync.source import WeightSource
from weightsync.transport import Crew, Published, Publisher
from weightsync.version import Version

if TYPE_CHECKING:
    from weightsync.schemes.cuda_ipc import CUDAIPCScheme

log = logging.getLogger("weightsync")


class CUDAIPCPublisher(Publisher):
    """See :class:`~weightsync.transport.Publisher`; the protocol is in docs/architecture.md.

    A version is visible from ``publish`` to ``conclude``, or to the next ``publish``, which
    concludes it.
    """

    def __init__(self, scheme: CUDAIPCScheme) -> None:
        self._exchange = exchange = scheme.exchange()
        self._ownership = ownership = Ownership(scheme.path, layout.remove_run)
        self._records = RecordFiles(ownership.directory)
        self._receivers = Receivers(self._records, lambda: ownership.epoch)
        self._exports = Exports(exchange)
        self._head: Head | None = None
        self._lease: Lock | None = None
        self._last: Version | None = None
        self._written: tuple[Table, str, str] | None = None

    # ---------------------------------------------------------------- owning the run

    def open(self, deadline: Deadline, epoch: int | None = None) -> int:
        if not self._ownership.held:
            self._exchange.require()
            with self._ownership.taking(deadline) as run:
                self._head = self._lease = self._last = self._written = None
                self._ownership.begin(epoch, _version_in(run))
                layout.remove_weights(run)
                remove_temporaries(run)
        elif epoch not in (None, self._ownership.epoch):
            self._ownership.begin(epoch)
        return self._ownership.epoch

    def prepare(self, manifest: Manifest, deadline: Deadline) -> None:
        self._ownership.directory()  # the weights are there already

    # ---------------------------------------------------------------- an update

    def publish(
        self,
        version: Version,
        weights: WeightSource,
        deadline: Deadline,
        receivers: Sequence[str] | None = None,
        crew: Crew | None = None,
    ) -> Published:
        began = time.perf_counter()
        self._ownership.require_newer(version, self._last)
        if version == self._last:
            raise VersionError(
                f"version {version.number} was published before, and no copy of it is kept to see "
                "whether these are the same weights: use a newer number"
            )
        meant_for = addressees(receivers)
        run = self._ownership.directory()
        if self._head is not None:
            self.conclude(self._head.version, deadline)
        self._records.forget_signed_off()
        inventory = weights.inventory()
        looked = time.perf_counter() - began
        shown = self._exports.show(inventory, deadline)
        try:
            self._lease = Lock(run, layout.lease_name(version), create=True)
            table, digest = self._write(run, version, shown.table)
            self._head = Head(version, meant_for, table, digest, time.time())
            run.replace(layout.HEAD, self._head.to_json())
        except BaseException:
            # An interrupt may come just after the rename: nobody is to see what failed here.
            self._withdraw(version)
            raise
        self._last = version
        extract = looked + shown.seconds
        return Published(
            inventory.manifest.payload,
            len(inventory.manifest.tensors),
            None,
            extract,
            time.perf_counter() - began - extract,
            notes=_notes(shown),
        )

    def _write(self, run: Directory, version: Version, table: Table) -> tuple[str, str]:
        """The table's file and digest; written only if it is another than the last one."""
        if self._written is None or self._written[0] is not table:
            former, data = self._written, table.to_json()
            self._written = None
            run.replace(layout.table_name(version), data)
            self._written = table, layout.table_name(version), layout.digest_of(data)
            if former is not None:
                run.discard(former[1])
        return self._written[1:]

    def conclude(
        self, version: Version, deadline: Deadline, answered: Collection[str] = ()
    ) -> list[ReceiverReport]:
        head, lease = self._head, self._lease
        if head is None or lease is None or head.version != version:
            return []
        reports: list[ReceiverReport] = []
        late: list[ReceiverReport] = []

        def over() -> bool | None:
            reports[:] = self._addressed(head, answered)
            late[:] = [report for report in reports if not _has_answered(report, version)]
            # Only who has no lease can be told that there is nothing to read any more.
            return True if not late and lease.try_exclusive() else None

        free = False
        try:
            free = deadline.wait(over) is True
        finally:
            self._withdraw(version)
        for report in reports:
            if report.state in ("dead", "failed"):  # said once; the next update does without it
                self._records.forget(report.receiver)
        if not free:
            log.warning("version %s was taken back: it was still being read", version)
            words = f"late: not done with it within {deadline.seconds:.1f} s, so it was taken back"
            reports = [
                replace(r, state="waiting", error=words) if r in late else r for r in reports
            ]
            if not any(_is_behind(report, version) for report in reports):
                raise DeadlineError(
                    f"version {version.number} was still being read after "
                    f"{deadline.seconds:.1f} s, by a process that is no receiver; it was taken back"
                )
        return reports

    def _addressed(self, head: Head, answered: Collection[str]) -> list[ReceiverReport]:
        return [
            report
            for report in self._receivers.reports()
            if report.receiver not in answered
            and (head.receivers is None or report.receiver in head.receivers)
        ]

    def _withdraw(self, version: Version) -> None:
        """After this nobody begins to read, and who does read will find out."""
        lease, self._head, self._lease = self._lease, None, None
        with suppress(WeightSyncError):  # the directory was removed: so was the head
            run = self._ownership.directory()
            run.discard(layout.HEAD)
            run.discard(layout.lease_name(version))
        if lease is not None:
            lease.release()

    # ---------------------------------------------------------------- receivers

    def receivers(self) -> list[ReceiverReport]:
        return self._receivers.reports()

    def wait_applied(
        self, version: Version, deadline: Deadline, receivers: Sequence[str] | None = None
    ) -> list[ReceiverReport]:
        return self._receivers.wait_applied(version, deadline, receivers, {})

    # ---------------------------------------------------------------- the end

    def close(self) -> None:
        if self._head is not None:
            self._withdraw(self._head.version)
        self._exports.clear()
        self._written = None
        self._ownership.release()


def _version_in(run: Directory) -> Version | None:
    """What a former sender was showing when it died."""
    try:
        head = layout.read_head(run)
    except ProtocolError:
        return None
    return None if head is None else head.version


def _has_answered(report: ReceiverReport, version: Version) -> bool:
    if report.state in ("dead", "failed"):
        return True
    return any(said is not None and said >= version for said in (report.version, report.attempted))


def _is_behind(report: ReceiverReport, version: Version) -> bool:
    return report.version is None or report.version < version


def _notes(shown: Shown) -> tuple[str, ...]:
    if not shown.copied:
        return ()
    return (
        f"{shown.copied:,} bytes of {shown.tensors} tensors were copied on the GPU first: they are "
        "cast, strided, made for the update, or lie in memory that cannot be shown to others",
    )
