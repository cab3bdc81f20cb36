"""Versions as they arrive: whole or not at all, in buffers of the receiving process or its GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np
import torch

from weightsync.chunks import Copier, Geometry
from weightsync.deadline import Deadline
from weightsync.device import Device
from weightsync.device_copies import DeviceCopies
from weightsync.errors import CorruptError, NoRoomError, VersionGoneError, WeightSyncError
from weightsync.intake import copy_tensor
from weightsync.manifest import Manifest
from weightsync.pages import give_pages
from weightsync.schemes.nccl.places import Place, Places
from weightsync.tensors import Addresses
from weightsync.transport import Memory, Snapshot, Targets
from weightsync.version import Version


@dataclass(frozen=True)
class Layout:
    """A manifest, and what is computed from it once, when there is memory for what it promises."""

    manifest: Manifest

    @cached_property
    def geometry(self) -> Geometry:
        return Geometry(self.manifest)


class Slot:
    """One buffer. ``version`` is None while nothing whole is in it."""

    def __init__(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self.place = Place()
        self.version: Version | None = None
        self.layout: Layout | None = None
        self.leases = 0
        self.turn = 0
        self.soft = False
        self.filling = False
        self._addresses: tuple[Manifest, Addresses] | None = None
        self._copies: WeakKeyDictionary[Targets, DeviceCopies] = WeakKeyDictionary()

    @property
    def is_free(self) -> bool:
        return not self.filling and (self.leases == 0 or self.soft)

    def fit(self, nbytes: int, place: Place) -> None:
        """
        Raises:
            NoRoomError: there is too little memory.
        """
        if place == self.place and len(self.bytes) >= nbytes > len(self.bytes) // 2:
            return
        self.drop()  # never both at a time
        self.bytes, self.place = place.empty(nbytes), place

    def drop(self) -> None:
        """Have other memory from now on; who holds this one, or may yet write to it, keeps it."""
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self._addresses = None
        self._copies.clear()

    def move_on(self) -> None:
        """Have the same bytes in other memory."""
        held = self.bytes
        self.drop()
        self.bytes = held.clone()

    def addresses(self, manifest: Manifest) -> Addresses:
        """Where each tensor of a manifest lies. The same array while they lie there."""
        if self._addresses is None or self._addresses[0] is not manifest:
            offsets = np.array([spec.offset for spec in manifest.tensors], dtype=np.int64)
            self._addresses = manifest, offsets + self.bytes.data_ptr()
        return self._addresses[1]

    def copies(self, targets: Targets, gpu: Device) -> DeviceCopies:
        """How what lies here, in a GPU's memory, gets into targets."""
        found = self._copies.get(targets)
        if found is None:
            found = DeviceCopies(gpu, targets, self.addresses(targets.manifest))
            self._copies[targets] = found
        return found


class Staging:
    """A few slots, and who uses them.

    A slot that is leased is never written. Of the others, the one that holds what the engine went
    on with last (``keep``) is written only if there is no other.
    """

    def __init__(self, buffers: int, copier: Copier, places: Places | None = None) -> None:
        self._places = places or Places()
        self._slots = [Slot() for _ in range(buffers)]
        self._copier = copier
        self._changed = threading.Condition()
        self._layout: Layout | None = None
        self._refused = False

    def layout(self, fingerprint: str, manifest: str | None) -> Layout:
        """The layout with a fingerprint, read from JSON the first time.

        Raises:
            ManifestError: the JSON is malformed. WeightSyncError: it is of another manifest.
        """
        if self._layout is None or self._layout.manifest.fingerprint != fingerprint:
            read = Manifest.from_json((manifest or "").encode())
            if read.fingerprint != fingerprint:
                raise WeightSyncError("the manifest is not the one that was announced")
            self._layout = Layout(read)
        return self._layout

    def begin(
        self,
        layout: Layout,
        keep: Version | None,
        deadline: Deadline,
        check: Callable[[], None],
    ) -> tuple[Slot, Version | None] | None:
        """A slot to write into, and what it held, which is gone now.

        None: all were in use until the deadline.

        Args:
            check: called while waiting; may raise.
        """
        with self._changed:
            while True:
                check()
                free = [slot for slot in self._slots if slot.is_free]
                if free:
                    slot = min(free, key=lambda slot: _worth(slot, keep))
                    dropped, slot.version, slot.filling = slot.version, None, True
                    slot.turn += 1
                    break
                if deadline.expired:
                    return None
                self._changed.wait(min(0.1, deadline.remaining))
        try:
            if slot.leases:  # leased softly: whoever has views of it keeps the memory
                slot.drop()
                slot.leases, slot.soft = 0, False
            self._fit(slot, max(layout.manifest.nbytes, 1))
        except BaseException:
            self.end(slot, None)
            raise
        slot.layout = layout
        return slot, dropped

    def _fit(self, slot: Slot, nbytes: int) -> None:
        held = sum(len(each.bytes) for each in self._slots if each.place.gpu is not None)
        place: Place | None = self._places.choose(nbytes * len(self._slots), held)
        while place is not None:
            try:
                slot.fit(nbytes, place)
                return
            except NoRoomError:
                place = self._places.instead(place)
                if place is None:
                    raise

    @property
    def lacks_room(self) -> bool:
        """Whether a version is here, and there is no memory yet for one that comes next."""
        slots = self._slots
        bare = not self._refused and any(not len(slot.bytes) for slot in slots)
        return bare and any(slot.version is not None for slot in slots)

    def make_room(self, stop: Callable[[], bool]) -> None:
        """Have memory for the versions to come before they do: the second would be a slow one.

        By the thread that fills slots, while it has nothing else to do.

        Args:
            stop: asked every now and then.
        """
        held = next((slot.layout for slot in self._slots if slot.version is not None), None)
        bare = next((slot for slot in self._slots if not len(slot.bytes)), None)
        if held is None or bare is None:
            return
        try:
            self._fit(bare, max(held.manifest.nbytes, 1))
            if bare.place == Place():
                give_pages(bare.bytes, stop)
        except Exception:  # there may be some when it is needed, and if not, it is said then
            self._refused = True

    def end(self, slot: Slot, version: Version | None) -> None:
        """The slot holds a version now; or nothing, if None."""
        with self._changed:
            for other in self._slots:
                if other is not slot and other.version == version:
                    other.version = None  # the same number once more: this is the newer copy
            slot.version, slot.filling = version, False
            self._refused = False
            self._changed.notify_all()

    def holds(self, version: Version) -> bool:
        with self._changed:
            return any(slot.version == version for slot in self._slots)

    def lease(self, version: Version) -> StagedSnapshot:
        """
        Raises:
            VersionGoneError: it is not here (any more).
        """
        with self._changed:
            for slot in self._slots:
                if slot.version == version and slot.layout is not None:
                    slot.leases += 1
                    return StagedSnapshot(self, slot, version, slot.layout, self._copier)
            newest = max((s.version for s in self._slots if s.version), default=None)
            raise VersionGoneError(
                f"version {version} is not in this process's buffers; the newest there is "
                f"{newest or 'none'}"
            )

    def soften(self) -> None:
        """With one buffer only: what is leased may be given up for a newer version from now on.

        The engine has it; all it could be read for is to go back to it.
        """
        with self._changed:
            if len(self._slots) == 1:
                self._slots[0].soft = True
                self._changed.notify_all()

    def release(self, slot: Slot, turn: int) -> None:
        """End a lease, unless the slot was taken from it."""
        with self._changed:
            if slot.turn == turn:
                slot.leases -= 1
                slot.soft = slot.soft and slot.leases > 0
            self._changed.notify_all()

    def clear(self) -> None:
        """Give the memory back that nobody leases."""
        with self._changed:
            for number, slot in enumerate(self._slots):
                if not slot.leases and not slot.filling:
                    self._slots[number] = Slot()


def _worth(slot: Slot, keep: Version | None) -> tuple[bool, Version]:
    return slot.version is not None and slot.version == keep, slot.version or Version(0, 0)


class StagedMemory(Memory):
    """A slot's bytes, which were compared with their digests when they arrived."""

    def __init__(self, data: torch.Tensor, nbytes: int, version: Version) -> None:
        self._data, self._version = data, version  # kept, also when the slot is given up
        self.address, self.nbytes = data.data_ptr(), nbytes

    def page_lock(self, device: Device) -> bool:
        """Torch did, where there is a GPU."""
        return device.place.type == "cuda" and self._data.is_pinned()

    def wrong(self, chunks: Sequence[int]) -> CorruptError:
        return CorruptError(f"version {self._version}: chunks {list(chunks[:5])} are wrong")


class StagedSnapshot(Snapshot):
    """A lease on a slot. Its bytes were compared with their digests when they arrived."""

    def __init__(
        self, staging: Staging, slot: Slot, version: Version, layout: Layout, copier: Copier
    ) -> None:
        self.version = version
        self.manifest = layout.manifest
        self._layout = layout
        self._staging = staging
        self._slot: Slot | None = slot
        self._turn = slot.turn
        self._bytes, self._gpu = slot.bytes, slot.place.gpu
        self._copier = copier

    def tensor(self, name: str) -> torch.Tensor:
        self._require_open()
        spec = self.manifest.spec(name)
        flat = self._bytes[spec.offset : spec.offset + spec.nbytes]
        return flat.view(spec.dtype).view(spec.shape)

    def verify(self, names: Sequence[str] | None = None) -> None:
        self._require_open()

    def memory(self) -> Memory | None:
        self._require_open()
        if self._gpu is not None:
            return None
        return self._in_host_memory()

    def addresses(self, place: torch.device) -> Addresses | None:
        slot = self._require_open()
        if self._gpu is None or self._gpu.place != place:
            return None
        return slot.addresses(self.manifest)

    def copy_into(self, targets: Targets) -> None:
        slot = self._require_open()
        if self._gpu is not None:
            copies = slot.copies(targets, self._gpu)
            copies.run()
            others = {name: targets.tensors[name] for name in copies.others}
        else:
            host = memoryview(self._bytes.numpy())  # type: ignore[arg-type]
            self._copier.read(self._layout.geometry, host, targets.addresses, None)
            targets.on_gpus.write(self._in_host_memory())
            others = targets.rest
        for name, target in others.items():
            # .data: also for modules built under inference_mode, which refuse copy_ outside it.
            copy_tensor(target.data, self.tensor(name), name)
        if others:
            self.settle()

    def settle(self) -> None:
        """Wait until what this thread has queued on a GPU has read: others may use what it wrote
        then, on streams of their own, and the slot may be written."""
        if self._gpu is not None:
            self._gpu.current().wait()

    def _in_host_memory(self) -> Memory:
        return StagedMemory(self._bytes, self.manifest.nbytes, self.version)

    def _require_open(self) -> Slot:
        if self._slot is None:
            raise WeightSyncError(f"version {self.version}: the snapshot is closed")
        if self._slot.turn != self._turn:
            raise VersionGoneError(
                f"version {self.version} was given up for a newer one: with buffers=1 there is no "
                "going back"
            )
        return self._slot

    def close(self) -> None:
        slot, self._slot = self._slot, None
        if slot is not None:
            self.settle()
            self._staging.release(slot, self._turn)


class DescribedSnapshot(Snapshot):
    """What the end that watches for others knows of a version: its manifest."""

    def __init__(self, version: Version, manifest: Manifest) -> None:
        self.version = version
        self.manifest = manifest

    def tensor(self, name: str) -> torch.Tensor:
        raise WeightSyncError(
            f"version {self.version} went to the engine's workers; this process has no bytes of it"
        )

    def verify(self, names: Sequence[str] | None = None) -> None:
        pass  # each worker has verified its copy when it arrived

    def copy_into(self, targets: Targets) -> None:
        for name in targets.tensors:
            self.tensor(name)

    def close(self) -> None:
        pass
