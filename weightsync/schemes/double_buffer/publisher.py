"""The trainer's end of the double buffer: writes a free slot, then commits it by a rename."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING

import numpy as np
import torch

from weightsync.chunks import Copier, Digests, Geometry, SlotWriter
from weightsync.deadline import Deadline
from weightsync.errors import (
    DeadlineError,
    ProtocolError,
    SenderBusyError,
    SourceError,
    VersionError,
    WeightSyncError,
)
from weightsync.files import Directory, Lock, is_locked
from weightsync.manifest import Manifest, describe
from weightsync.report import ReceiverReport
from weightsync.schemes.double_buffer import layout
from weightsync.schemes.double_buffer.layout import Commit
from weightsync.schemes.double_buffer.slot import Slot, copy_tensor, require_room, slot_size
from weightsync.source import Inventory, WeightSource
from weightsync.tensors import plain_address
from weightsync.transport import Published, Publisher
from weightsync.version import Version

if TYPE_CHECKING:
    from weightsync.schemes.double_buffer import DoubleBufferScheme

BUSY_SECONDS = 2.0
"""How long a sender waits for another one that is just about to end."""


class Generation:
    """The slots for one manifest, mapped for writing."""

    def __init__(self, directory: Directory, name: str, manifest: Manifest, slots: int) -> None:
        self.directory = directory
        self.name = name
        self.manifest = manifest
        self.geometry = Geometry(manifest)
        self.index = {spec.name: number for number, spec in enumerate(manifest.tensors)}
        size = slot_size(manifest)
        # The locks come first: whoever sees a slot's bytes can lease them.
        self.locks = [Lock(directory, layout.slot_lock(n), create=True) for n in range(slots)]
        self.slots = [Slot.create(directory, n, size) for n in range(slots)]

    def view(self, slot: int, tensor: int) -> torch.Tensor:
        return self.slots[slot].view(self.manifest.tensors[tensor])


class DoubleBufferPublisher(Publisher):
    """See :class:`~weightsync.transport.Publisher`; the protocol is in docs/architecture.md."""

    def __init__(self, scheme: DoubleBufferScheme) -> None:
        self._scheme = scheme
        self._run: Directory | None = None
        self._lock: Lock | None = None
        self._epoch = 0
        self._generation: Generation | None = None
        self._head: Commit | None = None
        self._head_digests: Digests | None = None
        self._last: Version | None = None
        # Answers to an earlier attempt at the head's version, which do not count for this one.
        self._stale: dict[str, bytes] = {}
        self._copier = Copier(scheme.threads)
        self._pid = os.getpid()
        self._end: Finalize[None] | None = None

    # ---------------------------------------------------------------- owning the run

    def open(self, deadline: Deadline) -> int:
        if self._lock is not None and self._lock.exists:
            return self._epoch
        if self._end is not None:  # the directory was removed behind our back
            self._end()
        run, lock = self._own(deadline)
        try:
            self._take_over(run, lock)
        except BaseException:
            run.discard(layout.SENDER_LOCK)
            lock.release()
            raise
        self._run, self._lock, self._pid = run, lock, os.getpid()
        # Also when the trainer ends without shutdown(), or lets go of the sender. Unlike atexit,
        # this runs at the end of multiprocessing's children too.
        arguments = run, lock, self._scheme.keep_files, self._pid
        self._end = Finalize(self, _end, arguments, exitpriority=0)
        return self._epoch

    def _take_over(self, run: Directory, lock: Lock) -> None:
        """Begin a new epoch, and remove what the former sender's death left."""
        self._generation = None
        self._head_digests = None
        before = self._former_epoch(run)
        self._head = self._former_head(run)
        if self._head is not None:
            before = max(before, self._head.version.epoch)
        # The clock keeps epochs growing over a directory that was removed and made again; one tick
        # of it passes, so that the next sender's is another even if this one ends at once.
        time.sleep(0.001)
        self._epoch = max(before + 1, self._epoch + 1, int(time.time() * 1000))
        lock.write(
            json.dumps(
                {"epoch": self._epoch, "host": socket.gethostname(), "pid": os.getpid()}
            ).encode()
        )
        run.subdirectory(layout.RECEIVERS, create=True)
        self._sweep(run)

    def _own(self, deadline: Deadline) -> tuple[Directory, Lock]:
        path = self._scheme.path

        def attempt() -> tuple[Directory, Lock] | None:
            try:
                run = Directory.open(path, create=True)
            except FileNotFoundError:
                parent = os.path.dirname(path)
                raise WeightSyncError(f"{path}: there is no directory {parent}") from None
            # A former sender may remove the lock, and the directory, between any two steps.
            try:
                lock = Lock(run, layout.SENDER_LOCK, create=True)
            except FileNotFoundError:
                return None
            if lock.try_exclusive() and lock.exists:
                return run, lock
            lock.release()
            return None

        owned = deadline.at_most(BUSY_SECONDS).wait(attempt)
        if owned is None:
            raise SenderBusyError(
                f"{path}: another sender ({_owner(path)}) is alive and owns this run; "
                "give each trainer a path of its own"
            )
        return owned

    @staticmethod
    def _former_epoch(run: Directory) -> int:
        try:
            epoch = json.loads(run.read(layout.SENDER_LOCK, layout.MAX_RECORD))["epoch"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError, WeightSyncError):
            return 0
        return epoch if type(epoch) is int and 0 <= epoch < 1 << 53 else 0

    @staticmethod
    def _former_head(run: Directory) -> Commit | None:
        """The last commit of a former sender, readable until the first new one."""
        try:
            return Commit.from_json(run.read(layout.HEAD, layout.MAX_HEAD), layout.HEAD)
        except FileNotFoundError:
            return None
        except ProtocolError:
            run.remove(layout.HEAD)
            return None

    def _sweep(self, run: Directory) -> None:
        """Remove what dead processes left: half-written files, records, generations."""
        for name in run.names():
            if layout.is_temporary(name):
                run.discard(name)
        records = run.subdirectory(layout.RECEIVERS)
        for name in records.names():
            receiver = layout.receiver_of(name)
            if receiver is not None:
                _forget(records, receiver, name)
        self._drop_generations(run)

    def _drop_generations(self, run: Directory) -> None:
        """Remove every generation but the current one and the head's, unless somebody reads it."""
        keep = {self._generation.name} if self._generation else set()
        if self._head:
            keep.add(self._head.generation)
        for name in run.names():
            if layout.generation_number(name) is not None and name not in keep:
                _remove_generation(run, name)

    # ---------------------------------------------------------------- room for a manifest

    def prepare(self, manifest: Manifest, deadline: Deadline) -> None:
        run = self._owned()
        current = self._generation
        if current is not None and _same(current.manifest, manifest):
            return
        reused = self._reusable(run, manifest)
        name = reused or layout.generation_name(
            max((layout.generation_number(n) or 0 for n in run.names()), default=0) + 1
        )
        if reused is None and current is None and self._head is not None and not self._leased(run):
            # Left by a dead sender with another model, and nobody reads it: room for the new one.
            run.remove(layout.HEAD)
            self._head = None
            self._drop_generations(run)
        if reused is None:
            require_room(run, self._scheme.slots * slot_size(manifest))
        directory = run.subdirectory(name, create=True)
        for entry in filter(layout.is_temporary, directory.names()):
            directory.remove(entry)
        try:
            generation = Generation(directory, name, manifest, self._scheme.slots)
            if not reused:
                directory.replace(layout.MANIFEST, manifest.to_json())
        except BaseException:
            if not reused:
                del directory
                _remove_generation(run, name)
            raise
        self._generation = generation
        self._head_digests = None

    def _reusable(self, run: Directory, manifest: Manifest) -> str | None:
        """A generation that a dead sender left for the same manifest: its pages are warm."""
        wanted = {layout.slot_bytes(slot) for slot in range(self._scheme.slots)}
        for name in run.names():
            if layout.generation_number(name) is None:
                continue
            try:
                generation = run.subdirectory(name)
                slots = {entry for entry in generation.names() if entry.endswith(".bin")}
                data = generation.read(layout.MANIFEST, layout.MAX_MANIFEST)
                if slots == wanted and _same(Manifest.from_json(data), manifest):
                    return name
            except (OSError, WeightSyncError):
                continue
        return None

    @staticmethod
    def _leased(run: Directory) -> bool:
        """Whether a live process reads any slot of any generation."""
        for name in run.names():
            if layout.generation_number(name) is None:
                continue
            generation = run.subdirectory(name)
            for entry in generation.names():
                if entry.endswith(".lock"):
                    lock = Lock(generation, entry)
                    free = lock.try_exclusive()
                    lock.release()
                    if not free:
                        return True
        return False

    # ---------------------------------------------------------------- publishing

    def publish(
        self,
        version: Version,
        weights: WeightSource,
        deadline: Deadline,
        receivers: Sequence[str] | None = None,
    ) -> Published:
        began = time.perf_counter()
        self._require_newer(version)
        self._forget_signed_off()
        for receiver in receivers or ():
            if not layout.is_receiver_id(receiver):
                raise WeightSyncError(f"not a receiver's id: {receiver!r:.80}")
        inventory = weights.inventory()
        manifest = inventory.manifest if inventory is not None else weights.manifest()
        looked = time.perf_counter() - began
        self.prepare(manifest, deadline)
        generation = self._generation
        assert generation is not None
        nbytes = manifest.payload
        count = len(manifest.tensors)
        slot = self._free_slot(generation, deadline)
        if slot is None:
            return Published(nbytes, count, None, looked, 0.0, skipped=True)
        try:
            generation.directory.remove(layout.slot_record(slot))
            writer = SlotWriter(generation.geometry, generation.slots[slot].bytes, self._copier)
            streamed = 0.0
            if inventory is not None:
                _write_inventory(generation, slot, inventory, writer)
            else:
                streamed = self._stream(generation, slot, weights, writer, deadline)
            digests = writer.digests()
            commit = Commit(
                version,
                generation.name,
                slot,
                layout.digest_of(manifest, digests),
                manifest.nbytes,
                None if receivers is None else tuple(receivers),
                time.time(),
            )
            same = self._same_number(commit)
            if not same:
                generation.directory.replace(
                    layout.slot_digests(slot), digests.astype("<u8").tobytes()
                )
                generation.directory.replace(layout.slot_record(slot), commit.to_json())
        finally:
            # Free before it becomes the head, so that the first reader finds it so.
            generation.locks[slot].unlock()
        changed = self._changed(generation, digests)
        run = self._owned()
        self._stale = self._records() if version == self._last else {}
        if same:
            # Nothing but the addressees can differ: the same weights stay where they are.
            assert self._head is not None
            commit = replace(self._head, receivers=commit.receivers, time=commit.time)
        else:
            self._head_digests = digests
        try:
            run.replace(layout.HEAD, commit.to_json())
            self._head = commit
            self._last = commit.version
        except BaseException:
            # An interrupt may come just after the rename: what is there counts.
            self._head = self._former_head(run)
            self._head_digests = None
            if self._head is None or self._head.version != commit.version:
                generation.directory.remove(layout.slot_record(slot))
            raise
        self._drop_generations(run)
        extract = looked + streamed
        return Published(nbytes, count, changed, extract, time.perf_counter() - began - extract)

    def _require_newer(self, version: Version) -> None:
        if version.epoch != self._epoch:
            raise VersionError(f"{version} is not of this sender's epoch {self._epoch}")
        last = self._last
        if last is not None and version < last:
            raise VersionError(f"version {version.number} is older than the last, {last.number}")

    def _same_number(self, commit: Commit) -> bool:
        """Whether this is the head's version once more, with the same weights."""
        if self._head is None or self._head.version != commit.version:
            return False
        if (self._head.generation, self._head.digest) != (commit.generation, commit.digest):
            raise VersionError(
                f"version {commit.version.number} was published before with other weights: "
                "receivers that hold it would never see these; use a newer number"
            )
        return True

    def _changed(self, generation: Generation, digests: Digests) -> int | None:
        before = self._head_digests
        if before is None or len(before) != len(digests):
            return None
        return generation.geometry.changed(before, digests)

    def _free_slot(self, generation: Generation, deadline: Deadline) -> int | None:
        """Lock a slot that is neither the head's nor leased, the longest unused one first."""
        head = self._head
        taken = head.slot if head and head.generation == generation.name else -1
        order = [(taken + 1 + n) % len(generation.slots) for n in range(len(generation.slots))]

        def attempt() -> int | None:
            for slot in order:
                if slot != taken and generation.locks[slot].try_exclusive():
                    return slot
            if taken >= 0 and self._refused() and generation.locks[taken].try_exclusive():
                self._withdraw(generation)
                return taken
            return None

        slot = attempt()
        if slot is not None or self._scheme.on_busy == "skip":
            return slot
        slot = deadline.wait(attempt)
        if slot is None:
            late = [r for r in self.receivers() if r.state != "dead" and r.version != _at(head)]
            who = "; ".join(map(str, late)) or "a reader that is no receiver"
            raise DeadlineError(
                f"no free slot within {deadline.seconds:.1f} s: every slot but the newest is in "
                f"use by {who}. More slots= give slow receivers more time; on_busy='skip' leaves "
                "versions out instead of waiting"
            )
        return slot

    def _refused(self) -> bool:
        """Whether every live receiver has tried the head's version, and some went back to theirs.

        Then nobody is about to read it, and the versions they went back to hold the other slots.
        """
        head = self._head
        live = [report for report in self.receivers() if report.state not in ("dead", "failed")]
        tried = [
            report
            for report in live
            if head is not None
            and report.attempted is not None
            and report.attempted >= head.version
        ]
        failed = [report for report in tried if report.error is not None]
        return bool(failed) and len(tried) == len(live)

    def _withdraw(self, generation: Generation) -> None:
        """Make the newest other whole version the head again, before the head's slot is written."""
        run = self._owned()
        assert self._head is not None
        commits = []
        for slot in range(len(generation.slots)):
            with contextlib.suppress(FileNotFoundError, ProtocolError):
                name = layout.slot_record(slot)
                data = generation.directory.read(name, layout.MAX_HEAD)
                commits.append(Commit.from_json(data, name))
        others = [commit for commit in commits if commit.slot != self._head.slot]
        self._head_digests = None
        if others:
            self._head = max(others, key=lambda commit: commit.version)
            run.replace(layout.HEAD, self._head.to_json())
        else:
            self._head = None
            run.remove(layout.HEAD)

    def _stream(
        self,
        generation: Generation,
        slot: int,
        weights: WeightSource,
        writer: SlotWriter,
        deadline: Deadline,
    ) -> float:
        """Write a stream of tensors, letting go of them bucket by bucket.

        Returns:
            The seconds the source took.
        """
        bucket = _Bucket(writer)
        streamed = 0.0
        specs = generation.manifest.tensors
        seen: set[int] = set()
        stream = iter(weights.tensors())
        while True:
            asked = time.perf_counter()
            entry = next(stream, None)
            streamed += time.perf_counter() - asked
            if entry is None:
                break
            name, tensor = entry
            number = generation.index.get(name)
            if number is None or number in seen:
                what = "sent twice" if number is not None else "not in the manifest"
                raise SourceError(f"tensor {name!r} is {what}")
            seen.add(number)
            spec = specs[number]
            cast = tensor.dtype.is_floating_point and spec.dtype.is_floating_point
            if tensor.shape != spec.shape or not (cast or tensor.dtype == spec.dtype):
                sent = describe(tensor.dtype, tensor.shape)
                raise SourceError(f"tensor {name!r} is {sent}, its manifest says {spec}")
            address = plain_address(tensor, spec)
            if address == 0:
                copy_tensor(generation.view(slot, number), tensor, name)
            bucket.add(number, tensor, address)
            if bucket.nbytes >= self._scheme.bucket_bytes:
                bucket.write()
            if deadline.expired:
                raise DeadlineError(
                    f"the source was not done within {deadline.seconds:.1f} s; "
                    f"it had come to {name!r}"
                )
        bucket.write()
        missing = writer.missing()
        if missing:
            names = ", ".join(repr(specs[number].name) for number in missing[:5])
            raise SourceError(f"{len(missing)} tensors of the manifest were not sent: {names} ...")
        return streamed

    # ---------------------------------------------------------------- receivers

    def receivers(self) -> list[ReceiverReport]:
        return [self._checked(report) for report in read_receivers(self._owned())]

    def _checked(self, report: ReceiverReport) -> ReceiverReport:
        if report.version is None or report.version.epoch <= self._epoch:
            return report
        # Its engine would take this sender's versions for older ones.
        error = f"it holds version {report.version}, of a sender whose clock was ahead"
        return replace(report, state="failed", version=None, error=error)

    def wait_applied(
        self, version: Version, deadline: Deadline, receivers: Sequence[str] | None = None
    ) -> list[ReceiverReport]:
        settled: dict[str, ReceiverReport] = {}
        stale = self._stale

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
                said.update(self._records())
            for report, signed_off in _read_records(self._owned()):
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
        records = self._owned().subdirectory(layout.RECEIVERS)
        for report in reports:
            if report.state in ("dead", "failed"):  # said once; the next update does without it
                _forget(records, report.receiver)
        return reports

    def _forget_signed_off(self) -> None:
        records = self._owned().subdirectory(layout.RECEIVERS)
        for name in records.names():
            if name.endswith(".left"):
                records.discard(name)

    def _records(self) -> dict[str, bytes]:
        """What each receiver's record says, times included."""
        records = self._owned().subdirectory(layout.RECEIVERS)
        found = {}
        for name in records.names():
            if name.endswith(".json"):
                with contextlib.suppress(FileNotFoundError):
                    found[name[:-5]] = records.read(name, layout.MAX_RECORD)
        return found

    # ---------------------------------------------------------------- the end

    def close(self) -> None:
        self._generation = None
        self._copier.close()
        self._run = self._lock = None
        if self._end is not None:
            self._end()

    def _owned(self) -> Directory:
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


def _at(head: Commit | None) -> Version | None:
    return head.version if head else None


def _same(one: Manifest, other: Manifest) -> bool:
    return one is other or one.fingerprint == other.fingerprint


class _Bucket:
    """Tensors of a stream that are held until they have been written."""

    def __init__(self, writer: SlotWriter) -> None:
        self._writer = writer
        self._held: list[torch.Tensor] = []
        self._numbers: list[int] = []
        self._addresses: list[int] = []
        self.nbytes = 0

    def add(self, number: int, tensor: torch.Tensor, address: int) -> None:
        """``address`` is 0 if the tensor is in the slot already."""
        self._numbers.append(number)
        self._addresses.append(address)
        if address:
            self._held.append(tensor)
            self.nbytes += tensor.nbytes

    def write(self) -> None:
        self._writer.write(self._numbers, self._addresses)
        self._held, self._numbers, self._addresses, self.nbytes = [], [], [], 0


def _write_inventory(
    generation: Generation, slot: int, inventory: Inventory, writer: SlotWriter
) -> None:
    for number in np.flatnonzero(inventory.addresses == 0).tolist():
        spec = generation.manifest.tensors[number]
        copy_tensor(generation.view(slot, number), inventory.tensors[number], spec.name)
    writer.write_all(inventory.addresses)


def _owner(path: str) -> str:
    try:
        record = json.loads(Directory.open(path).read(layout.SENDER_LOCK, layout.MAX_RECORD))
        return f"pid {int(record['pid'])} on {record['host']!s:.80}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError, WeightSyncError):
        return "unknown"


def _forget(records: Directory, receiver: str, *others: str) -> None:
    """Remove a dead receiver's files; one that was just restarted under its name keeps them."""
    lock = Lock(records, f"{receiver}.lock", create=True)
    if lock.try_exclusive() and lock.exists:
        for name in (f"{receiver}.json", f"{receiver}.left", *others, f"{receiver}.lock"):
            records.discard(name)
    lock.release()


def _remove_generation(run: Directory, name: str) -> None:
    """Remove a generation's files, if no process leases one of its slots."""
    try:
        generation = run.subdirectory(name)
    except (FileNotFoundError, WeightSyncError):
        return
    locks = [Lock(generation, entry) for entry in generation.names() if entry.endswith(".lock")]
    if all(lock.try_exclusive() for lock in locks):
        _empty_generation(generation)
        run.remove_subdirectory(name)
    for lock in locks:
        lock.release()


def _empty_generation(generation: Directory) -> None:
    names = [entry for entry in generation.names() if layout.is_generation_file(entry)]
    # Records first: without one nobody looks for the bytes.
    for entry in sorted(names, key=lambda entry: not entry.endswith(".json")):
        generation.remove(entry)


def _remove_run(run: Directory) -> None:
    """Remove everything that is ours. Mappings of readers stay valid, names are free at once."""
    run.discard(layout.HEAD)
    for name in run.names():
        if layout.generation_number(name) is not None:
            with contextlib.suppress(FileNotFoundError, WeightSyncError):
                _empty_generation(run.subdirectory(name))
                run.remove_subdirectory(name)
        elif layout.is_temporary(name):
            run.discard(name)
    # A receiver may be writing its record at this very moment.
    Deadline(1.0).wait(lambda: _remove_records(run) or None)
    run.discard(layout.SENDER_LOCK)
    with contextlib.suppress(OSError):  # somebody else's files are in it
        os.rmdir(run.path)


def _remove_records(run: Directory) -> bool:
    """Whether none of ours are left."""
    try:
        records = run.subdirectory(layout.RECEIVERS)
    except (FileNotFoundError, WeightSyncError):
        return True
    for entry in records.names():
        if layout.receiver_of(entry) is not None:
            records.discard(entry)
    run.remove_subdirectory(layout.RECEIVERS)
    return not any(map(layout.receiver_of, records.names()))


def _end(run: Directory, lock: Lock, keep_files: bool, pid: int) -> None:
    if os.getpid() != pid or lock.released:
        return  # a forked child ends without touching its parent's run
    try:
        if lock.exists and not keep_files:
            _remove_run(run)
    finally:
        lock.release()
