"""The receivers' records, as the sender reads them: who is there, and how did it go."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from weightsync.deadline import Deadline
from weightsync.errors import ProtocolError
from weightsync.files import Directory, Lock, is_locked
from weightsync.report import ReceiverReport
from weightsync.schemes.double_buffer import layout
from weightsync.version import Version


class Receivers:
    """The receivers of a run.

    Args:
        run: a method of the publisher: gives the run's directory, or raises if the sender does
            not own it any more.
        epoch: the sender's.
    """

    def __init__(self, run: Callable[[], Directory], epoch: int) -> None:
        # Weak: a circle would keep a publisher that was let go, and its files, until the garbage
        # collector comes by.
        self._owned = weakref.WeakMethod(run)
        self._epoch = epoch

    def _run(self) -> Directory:
        owned = self._owned()
        assert owned is not None
        return owned()

    def reports(self) -> list[ReceiverReport]:
        return [self._checked(report) for report in read_receivers(self._run())]

    def _checked(self, report: ReceiverReport) -> ReceiverReport:
        if report.version is None or report.version.epoch <= self._epoch:
            return report
        # Its engine would take this sender's versions for older ones.
        error = f"it holds version {report.version}, of a sender whose clock was ahead"
        return replace(report, state="failed", version=None, error=error)

    def wait_applied(
        self,
        version: Version,
        deadline: Deadline,
        receivers: Sequence[str] | None,
        stale: Mapping[str, bytes],
    ) -> list[ReceiverReport]:
        """See :meth:`weightsync.transport.Publisher.wait_applied`.

        Args:
            stale: records of an earlier attempt at this version, which are no answer to this one.
        """
        settled: dict[str, ReceiverReport] = {}

        def answered(report: ReceiverReport) -> bool:
            if report.version is not None and report.version >= version:
                return True
            if report.state in ("dead", "failed"):
                return True
            if report.attempted is None or report.attempted < version:
                return False
            return not stale or stale.get(report.receiver) != said.get(report.receiver)

        said: dict[str, bytes] = {}

        def attempt() -> list[ReceiverReport] | None:
            if stale:
                said.update(self.raw())
            for report, signed_off in _read_records(self._run()):
                if signed_off and not answered(report):
                    if receivers is None:  # it does not matter any more
                        settled.pop(report.receiver, None)
                        continue
                    report = replace(report, state="dead", error="it has signed off")
                settled[report.receiver] = self._checked(report)
            wanted = list(settled) if receivers is None else list(receivers)
            found = [settled[name] for name in wanted if name in settled]
            if len(found) == len(wanted) > 0 and all(map(answered, found)):
                return found
            return None

        reports = deadline.wait(attempt)
        if reports is None:
            wanted = list(settled) if receivers is None else list(receivers)
            absent = [name for name in wanted if name not in settled]
            reports = [
                r if answered(r) else replace(r, state="waiting", error=r.error or "late")
                for r in (settled[name] for name in wanted if name in settled)
            ]
            reports += [ReceiverReport(name, "waiting", error="never connected") for name in absent]
        records = self._run().subdirectory(layout.RECEIVERS)
        for report in reports:
            if report.state in ("dead", "failed"):  # said once; the next update does without it
                forget(records, report.receiver)
        return reports

    def have_refused(self, version: Version) -> bool:
        """Whether every live receiver has tried a version, and some went back to theirs.

        Then nobody is about to read it, and the versions they went back to hold the other slots.
        """
        live = [report for report in self.reports() if report.state not in ("dead", "failed")]
        tried = [r for r in live if r.attempted is not None and r.attempted >= version]
        failed = [report for report in tried if report.error is not None]
        return bool(failed) and len(tried) == len(live)

    def forget_signed_off(self) -> None:
        """Remove what receivers that have ended said last."""
        records = self._run().subdirectory(layout.RECEIVERS)
        for name in records.names():
            if name.endswith(".left"):
                records.discard(name)

    def raw(self) -> dict[str, bytes]:
        """What each receiver's record says, times included."""
        records = self._run().subdirectory(layout.RECEIVERS)
        found = {}
        for name in records.names():
            if name.endswith(".json"):
                with contextlib.suppress(FileNotFoundError):
                    found[name[:-5]] = records.read(name, layout.MAX_RECORD)
        return found


def read_receivers(run: Directory) -> list[ReceiverReport]:
    """What the receivers of a run last said; ``dead`` where the process is gone.

    A receiver that failed in its set-up has gone on purpose: it stays ``failed``.
    """
    return [report for report, signed_off in _read_records(run) if not signed_off]


def _read_records(run: Directory) -> list[tuple[ReceiverReport, bool]]:
    """What the receivers last said, and whether they have signed off since."""
    try:
        records = run.subdirectory(layout.RECEIVERS)
    except FileNotFoundError:
        return []
    reports = []
    for name in records.names():
        receiver, suffix = name[:-5], name[-5:]
        if suffix not in (".json", ".left") or not layout.is_receiver_id(receiver):
            continue
        try:
            data = records.read(name, layout.MAX_RECORD)
            report = layout.report_from_json(data, f"{records.path}/{name}")
        except FileNotFoundError:
            continue
        except ProtocolError as error:
            report = ReceiverReport(receiver, "failed", error=str(error))
        if report.receiver != receiver:
            report = ReceiverReport(receiver, "failed", error=f"{name} is of another receiver")
        signed_off = suffix == ".left"
        alive = signed_off or is_locked(records, f"{receiver}.lock")
        if report.state != "failed" and not alive:
            if records.status(name) is None:  # it said goodbye in between
                continue
            report = replace(report, state="dead", error=report.error or "its process is gone")
        reports.append((report, signed_off))
    return reports


def forget(records: Directory, receiver: str, *others: str) -> None:
    """Remove a dead receiver's files; one that was just restarted under its name keeps them."""
    lock = Lock(records, f"{receiver}.lock", create=True)
    if lock.try_exclusive() and lock.exists:
        for name in (f"{receiver}.json", f"{receiver}.left", *others, f"{receiver}.lock"):
            records.discard(name)
    lock.release()
