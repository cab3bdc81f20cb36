"""The inference end of the double buffer: watches the head and leases slots."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from weightsync.chunks import CHUNK, Copier, Digests, Geometry
from weightsync.deadline import Deadline
from weightsync.device import Device
from weightsync.errors import (
    CorruptError,
    DeadlineError,
    ManifestError,
    VersionGoneError,
    WeightSyncError,
)
from weightsync.files import Directory, Lock
from weightsync.intake import copy_tensor
from weightsync.manifest import Manifest
from weightsync.report import ReceiverReport
from weightsync.run.membership import Membership
from weightsync.run.records import MAX_RECORD
from weightsync.schemes.double_buffer import layout
from weightsync.schemes.double_buffer.layout import Commit
from weightsync.schemes.double_buffer.progress import ProgressView
from weightsync.schemes.double_buffer.slot import Slot, slot_size
from weightsync.transport import Arriving, Memory, Snapshot, Subscriber, Targets
from weightsync.version import Version

if TYPE_CHECKING:
    from weightsync.schemes.double_buffer import DoubleBufferScheme

_STILL = 2.0
"""Seconds after which what does not grow is not waited for: its sender may be dead."""


class MappedGeneration:
    """A generation as its readers see it: the validated manifest, and the slots mapped so far."""

    def __init__(self, directory: Directory, name: str) -> None:
        self.directory = directory
        self.name = name
        try:
            self.manifest = Manifest.from_json(directory.read(layout.MANIFEST, layout.MAX_MANIFEST))
        except ManifestError as error:
            raise ManifestError(f"{directory.path}/{layout.MANIFEST}: {error}") from None
        self.index = {spec.name: number for number, spec in enumerate(self.manifest.tensors)}
        self._slots: dict[int, Slot] = {}
        self._views: list[ProgressView] = []
        self._grew: dict[int, tuple[int, int, float]] = {}

    @cached_property
    def geometry(self) -> Geometry:
        """Made when a slot is there that is as long as the manifest says: it costs memory."""
        return Geometry(self.manifest)

    def arriving(self, newest: Version | None) -> SlotArriving | None:
        """The newest version that is being written into a slot, if it is newer than another."""
        if not self._views:
            self._views = self._progress()
        found: tuple[Version, int, int] | None = None
        for number, view in enumerate(self._views):
            seen = view.look()
            if seen is None or (newest is not None and seen[1] <= newest):
                continue
            attempt, version, written = seen
            if found is not None and version <= found[0]:
                continue
            if not self._stands_still(number, attempt, written):
                found = version, number, attempt
        if found is None:
            return None
        version, number, attempt = found
        try:
            memory = SlotMemory(self.slot(number), self, None, attempt, str(version))
        except (OSError, WeightSyncError):
            return None
        return SlotArriving(version, self.manifest, attempt, memory, self._views[number])

    def _progress(self) -> list[ProgressView]:
        views: list[ProgressView] = []
        with contextlib.suppress(OSError, WeightSyncError):
            while (view := ProgressView.open(self.directory, len(views))) is not None:
                views.append(view)
        return views

    def _stands_still(self, number: int, attempt: int, written: int) -> bool:
        """Whether a slot is not whole and has not grown for a while: its sender may be dead."""
        now = time.monotonic()
        before = self._grew.get(number)
        if before is None or before[:2] != (attempt, written):
            before = self._grew[number] = attempt, written, now
        return written < self.manifest.nbytes and now - before[2] > _STILL

    def slot(self, number: int) -> Slot:
        if number not in self._slots:
            opened = Slot.open(self.directory, number, slot_size(self.manifest))
            self._slots.setdefault(number, opened)  # another thread may have been faster
        return self._slots[number]


class SlotMemory(Memory):
    """The mapping of a slot."""

    def __init__(
        self,
        slot: Slot,
        generation: MappedGeneration,
        digests: Digests | None,
        attempt: int,
        where: str,
    ) -> None:
        self._slot, self._generation, self._where = slot, generation, where
        self.address, self.nbytes = slot.address, generation.manifest.nbytes
        self.digests, self.attempt = digests, attempt

    def page_lock(self, device: Device) -> bool:
        return self._slot.page_lock(device)

    def wrong(self, chunks: Sequence[int]) -> CorruptError:
        tensors = self._generation.geometry.tensors_in(chunks)
        names = ", ".join(repr(self._generation.manifest.tensors[n].name) for n in tensors[:5])
        return CorruptError(
            f"{self._where}: {len(chunks)} chunks do not match their digests; "
            f"{len(tensors)} tensors lie in them: {names}"
        )


class SlotArriving(Arriving):
    """A version that is being written into a slot."""

    def __init__(
        self,
        version: Version,
        manifest: Manifest,
        attempt: int,
        memory: SlotMemory,
        view: ProgressView,
    ) -> None:
        self.version, self.manifest, self.attempt = version, manifest, attempt
        self.memory = memory
        self._view = view
        self._written, self._grew = 0, time.monotonic()

    def written(self) -> int | None:
        seen = self._view.look()
        if seen is None or seen[0] != self.attempt:
            return None
        if seen[2] > self._written:
            self._written, self._grew = seen[2], time.monotonic()
        elif self._written < self.memory.nbytes and time.monotonic() - self._grew > _STILL:
            return None
        return self._written


class DoubleBufferSubscriber(Subscriber):
    """See :class:`~weightsync.transport.Subscriber`; the protocol is in docs/architecture.md."""

    def __init__(self, scheme: DoubleBufferScheme, receiver: str | None) -> None:
        self._scheme = scheme
        self._path = scheme.reader_path or scheme.path
        self._member = Membership(self._path, receiver, layout.HEAD, Commit.from_json)
        self._generation: MappedGeneration | None = None
        self._newest: Version | None = None
        self._copier = Copier(scheme.threads)

    def open(self, deadline: Deadline) -> None:
        self._member.open(deadline)

    def wait(self, after: Version | None, deadline: Deadline) -> Version | None:
        return self._member.wait(after, deadline)

    def acknowledge(self, report: ReceiverReport) -> None:
        self._member.acknowledge(report)

    def arriving(self) -> Arriving | None:
        generation, head = self._generation, self._newest
        return None if generation is None else generation.arriving(head)

    # ---------------------------------------------------------------- data

    def snapshot(self, version: Version, deadline: Deadline) -> Snapshot:
        self._member.reach(deadline)

        def attempt() -> DoubleBufferSnapshot | None:
            found = self._find(version)
            if found is None:
                raise VersionGoneError(
                    f"{self._path} no longer holds version {version}: newer ones have taken its "
                    "place (more slots= keep versions longer)"
                )
            return self._lease(found)

        snapshot = deadline.wait(attempt)
        if snapshot is None:
            raise DeadlineError(
                f"no lease on version {version} at {self._path} within {deadline.seconds:.1f} s"
            )
        return snapshot

    def _find(self, version: Version) -> Commit | None:
        run, head = self._member.directory(), self._member.head()
        if head is not None and head.version == version:
            return head
        for name in run.names():
            if layout.generation_number(name) is None:
                continue
            try:
                generation = run.subdirectory(name)
            except FileNotFoundError:
                continue
            for entry in generation.names():
                if re.fullmatch(r"slot\d{1,2}\.json", entry):
                    record = _read_record(generation, entry)
                    if record is not None and record.version == version:
                        return record
        return None

    def _lease(self, commit: Commit) -> DoubleBufferSnapshot | None:
        """Lease the slot of a commit, if it still holds that commit; None to look again."""
        try:
            generation = self._map(commit.generation)
            lock = Lock(generation.directory, layout.slot_lock(commit.slot))
        except FileNotFoundError:
            self._generation = None
            return None
        try:
            # Locked first, read then: what the record says now stays true while the lock is held.
            if lock.try_shared():
                record = _read_record(generation.directory, layout.slot_record(commit.slot))
                if record is not None and record.version == commit.version:
                    self._newest = max(record.version, self._newest or record.version)
                    return DoubleBufferSnapshot(
                        record, generation, lock, self._copier, self._scheme.verify
                    )
        except FileNotFoundError:
            pass  # the sender is just ending, and removes its files
        except BaseException:
            lock.release()
            raise
        lock.release()
        return None

    def _map(self, name: str) -> MappedGeneration:
        directory = self._member.directory().subdirectory(name)
        current = self._generation
        if current is None or current.name != name or not current.directory.exists:
            current = self._generation = MappedGeneration(directory, name)
        return current

    def close(self) -> None:
        self._generation = None
        self._copier.close()
        self._member.leave()


class DoubleBufferSnapshot(Snapshot):
    """A shared kernel lock on a slot, and the views into it."""

    def __init__(
        self,
        commit: Commit,
        generation: MappedGeneration,
        lock: Lock,
        copier: Copier,
        verified: bool,
    ) -> None:
        self.version = commit.version
        self.manifest = generation.manifest
        self._generation = generation
        self._attempt = commit.attempt
        self._index = generation.index
        self._lock = lock
        self._copier = copier
        self._slot: Slot | None = generation.slot(commit.slot)
        self._where = f"version {commit.version} in {generation.directory.path} slot {commit.slot}"
        self._digests = self._read_digests(generation, commit) if verified else None
        self._geometry = generation.geometry

    def _read_digests(self, generation: MappedGeneration, commit: Commit) -> Digests:
        count = -(-generation.manifest.nbytes // CHUNK)
        try:
            data = generation.directory.read(layout.slot_digests(commit.slot), count * 8)
        except FileNotFoundError:
            if generation.directory.status(layout.slot_record(commit.slot)) is None:
                raise
            data = b""
        if len(data) == count * 8:
            digests: Digests = np.frombuffer(data, dtype="<u8").astype(np.uint64)
            if layout.digest_of(generation.manifest, digests) == commit.digest:
                return digests
        raise CorruptError(f"{self._where}: its digests do not match its record")

    def tensor(self, name: str) -> torch.Tensor:
        return self._leased().view(self.manifest.spec(name))

    def verify(self, names: Sequence[str] | None = None) -> None:
        slot = self._leased()
        if self._digests is None:
            return
        geometry = self._geometry
        chunks = range(geometry.chunks)
        if names is not None:
            numbers = [self._index[self.manifest.spec(n).name] for n in names]
            chunks = sorted({c for n in numbers for c in geometry.chunks_of(n)})  # type: ignore[assignment]
        wrong = self._copier.verify(geometry, slot.bytes, self._digests, chunks)
        self._refuse(wrong)

    def memory(self) -> Memory:
        slot = self._leased()
        return SlotMemory(slot, self._generation, self._digests, self._attempt, self._where)

    def copy_into(self, targets: Targets) -> None:
        slot, rest = self._leased().bytes, targets.rest
        if targets.addresses.any():
            wrong = self._copier.read(self._geometry, slot, targets.addresses, self._digests)
            self._refuse(wrong)
        else:
            self.verify(list(rest))
        targets.on_gpus.write(self.memory())
        for name, target in rest.items():
            # .data: also for modules built under inference_mode, which refuse copy_ outside it.
            copy_tensor(target.data, self.tensor(name), name)

    def _refuse(self, wrong: Sequence[int]) -> None:
        if wrong:
            raise self.memory().wrong(wrong)

    def _leased(self) -> Slot:
        if self._slot is None or self._lock.released:
            raise WeightSyncError(f"{self._where}: the snapshot is closed")
        return self._slot

    def close(self) -> None:
        self._slot = None  # a mapping keeps its memory, also after the file was removed
        self._lock.release()


def _read_record(generation: Directory, name: str) -> Commit | None:
    try:
        data = generation.read(name, MAX_RECORD)
    except FileNotFoundError:
        return None
    return Commit.from_json(data, f"{generation.path}/{name}")
