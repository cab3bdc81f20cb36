"""The receivers of a run, as its sender sees them: who is there, and how did it go."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from weightsync.deadline import Deadline
from weightsync.errors import ProtocolError, WeightSyncError
from weightsync.files import Directory, Lock, is_locked
from weightsync.notice import Notice
from weightsync.report import ReceiverReport
from weightsync.run.records import (
    MAX_RECORD,
    RECEIVERS,
    is_receiver_id,
    receiver_of,
    report_from_json,
)
from weightsync.version import Version


@dataclass(frozen=True)
class Record:
    """What a receiver last said (``dead`` where it is gone), and whether it signed off then."""

    report: ReceiverReport
    signed_off: bool = False


class Records(ABC):
    """Where receivers leave what they say."""

    @abstractmethod
    def read(self) -> list[Record]:
        """What each said last. One that failed in its set-up is gone on purpose: not ``dead``."""

    @abstractmethod
    def raw(self) -> dict[str, bytes]:
        """What each receiver's record says, times included."""

    @abstractmethod
    def forget(self, receiver: str) -> None:
        """Remove what a dead receiver said; one just restarted under its name keeps it."""

    @abstractmethod
    def forget_signed_off(self) -> None:
        """Remove what receivers that have ended said last."""

    def pause(self, seconds: float) -> None:
        """Wait until one says something, and for so long at most."""
        time.sleep(seconds)


class Receivers:
    """The receivers of a run.

    Args:
        records: what they say.
        epoch: gives the sender's.
    """

    def __init__(self, records: Records, epoch: Callable[[], int]) -> None:
        self.records = records
        self._epoch = epoch

    def reports(self) -> list[ReceiverReport]:
        return [self._checked(r.report) for r in self.records.read() if not r.signed_off]

    def _checked(self, report: ReceiverReport) -> ReceiverReport:
        if report.version is None or report.version.epoch <= self._epoch():
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
                said.update(self.records.raw())
            for record in self.records.read():
                report = record.report
                if record.signed_off and not answered(report):
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

        reports = deadline.wait(attempt, self.records.pause)
        if reports is None:
            wanted = list(settled) if receivers is None else list(receivers)
            absent = [name for name in wanted if name not in settled]
            reports = [
                r if answered(r) else replace(r, state="waiting", error=r.error or "late")
                for r in (settled[name] for name in wanted if name in settled)
            ]
            reports += [ReceiverReport(name, "waiting", error="never connected") for name in absent]
        for report in reports:
            if report.state in ("dead", "failed"):  # said once; the next update does without it
                self.records.forget(report.receiver)
        return reports

    def want_no_more(self, version: Version, meant_for: Sequence[str] | None) -> bool:
        """Whether nobody is about to read a version.

        It is meant for nobody who lives, or all whom it is meant for have tried it and some went
        back to their own, which is then what they hold.
        """
        live = [report for report in self.reports() if report.state not in ("dead", "failed")]
        if meant_for is not None:
            live = [report for report in live if report.receiver in meant_for]
            if not live:
                return True
        tried = [r for r in live if r.attempted is not None and r.attempted >= version]
        # One of its engines may have failed, and the others hold the version.
        holding = [r for r in tried if r.version is not None and r.version >= version]
        failed = [r for r in tried if r.error is not None and r not in holding]
        return bool(failed) and len(tried) == len(live)


class RecordFiles(Records):
    """Records in a run's directory: a lock beside each says whether its receiver is alive.

    Args:
        run: gives the directory, or raises if it is not to be used any more.
    """

    def __init__(self, run: Callable[[], Directory]) -> None:
        self._run = run
        self._notice = Notice()

    def read(self) -> list[Record]:
        try:
            records = self._run().subdirectory(RECEIVERS)
        except FileNotFoundError:
            return []
        found = [_read(records, name) for name in records.names()]
        return [record for record in found if record is not None]

    def pause(self, seconds: float) -> None:
        try:
            records = self._run().subdirectory(RECEIVERS)
        except FileNotFoundError:
            time.sleep(seconds)
        else:
            self._notice.wait(records, seconds)

    def raw(self) -> dict[str, bytes]:
        records = self._run().subdirectory(RECEIVERS, create=True)
        found = {}
        for name in records.names():
            if name.endswith(".json"):
                with contextlib.suppress(FileNotFoundError):
                    found[name[:-5]] = records.read(name, MAX_RECORD)
        return found

    def forget(self, receiver: str) -> None:
        _forget(self._run().subdirectory(RECEIVERS), receiver)

    def forget_signed_off(self) -> None:
        # Made again if it is gone: whoever removes empty directories finds this one empty.
        records = self._run().subdirectory(RECEIVERS, create=True)
        for name in records.names():
            if name.endswith(".left"):
                records.discard(name)


def read_receivers(run: Directory) -> list[ReceiverReport]:
    """What the receivers of a run last said, for whoever looks at it from outside."""
    return [record.report for record in RecordFiles(lambda: run).read() if not record.signed_off]


def _read(records: Directory, name: str) -> Record | None:
    receiver, suffix = name[:-5], name[-5:]
    if suffix not in (".json", ".left") or not is_receiver_id(receiver):
        return None
    try:
        data = records.read(name, MAX_RECORD)
        report = report_from_json(data, f"{records.path}/{name}")
    except FileNotFoundError:
        return None
    except ProtocolError as error:
        report = ReceiverReport(receiver, "failed", error=str(error))
    if report.receiver != receiver:
        report = ReceiverReport(receiver, "failed", error=f"{name} is of another receiver")
    signed_off = suffix == ".left"
    alive = signed_off or is_locked(records, f"{receiver}.lock")
    if report.state != "failed" and not alive:
        if records.status(name) is None:  # it said goodbye in between
            return None
        report = replace(report, state="dead", error=report.error or "its process is gone")
    return Record(report, signed_off)


def _forget(records: Directory, receiver: str, *others: str) -> None:
    lock = Lock(records, f"{receiver}.lock", create=True)
    if lock.try_exclusive() and lock.exists:
        for name in (f"{receiver}.json", f"{receiver}.left", *others, f"{receiver}.lock"):
            records.discard(name)
    lock.release()


def names_of_records(run: Directory) -> list[str]:
    """The files that receivers have left so far; none if there is no such directory of ours."""
    try:
        return run.subdirectory(RECEIVERS).names()
    except (FileNotFoundError, WeightSyncError):
        return []


def sweep_records(run: Directory, left: Sequence[str]) -> None:
    """Make room for records, and remove those of ``left`` whose receivers are dead.

    Others may be of this sender's own time already: one whose set-up fails is dead soon.
    """
    records = run.subdirectory(RECEIVERS, create=True)
    for name in left:
        receiver = receiver_of(name)
        if receiver is not None:
            _forget(records, receiver, name)


def remove_records(run: Directory) -> bool:
    """Remove all that receivers left. Whether none of it is left."""
    try:
        records = run.subdirectory(RECEIVERS)
    except (FileNotFoundError, WeightSyncError):
        return True
    for entry in records.names():
        if receiver_of(entry) is not None:
            records.discard(entry)
    run.remove_subdirectory(RECEIVERS)
    return not any(map(receiver_of, records.names()))
