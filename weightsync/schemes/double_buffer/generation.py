"""The slots for one manifest, on the trainer's side, and how weights get into one of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
import torch

from weightsync.chunks import Copier, Geometry, SlotWriter
from weightsync.deadline import Deadline
from weightsync.download import Blocks, Download, Downloads, Landed, Packer, Plan, SlotFlow
from weightsync.files import Directory, Lock
from weightsync.intake import Intake, copy_tensor
from weightsync.manifest import Manifest, ParamSpec
from weightsync.schemes.double_buffer import layout
from weightsync.schemes.double_buffer.progress import Arrived, Progress
from weightsync.schemes.double_buffer.slot import Slot, slot_size
from weightsync.source import Inventory
from weightsync.tensors import Addresses, plain_address

PORTION = 512 << 20
"""Bytes that are written before readers are told, at least, of tensors in ordinary memory."""


@dataclass(frozen=True)
class Placement:
    """From where the tensors of an inventory come that exist anyway, by their numbers in it.

    Attributes:
        addresses: of the inventory. It is the very same array for as long as all of this holds.
        converted: those that are copied by torch, one by one.
        here: those that lie in the slot then, or in memory at their addresses: neighbours that are
            written at a time.
        elsewhere: those on GPUs: by which way they come, and how.
    """

    addresses: Addresses
    converted: list[int]
    here: list[Addresses]
    elsewhere: list[tuple[Download, list[int], Plan]]


class Generation:
    """The slots for one manifest, mapped for writing."""

    def __init__(self, directory: Directory, name: str, manifest: Manifest, slots: int) -> None:
        self.directory = directory
        self.name = name
        self.manifest = manifest
        self.geometry = Geometry(manifest)
        size = slot_size(manifest)
        # The locks come first: whoever sees a slot's bytes can lease them.
        self.locks = [Lock(directory, layout.slot_lock(n), create=True) for n in range(slots)]
        self.slots = [Slot.create(directory, n, size) for n in range(slots)]
        self.progress = [Progress(directory, n) for n in range(slots)]
        self._placement: Placement | None = None

    def placement(self, inventory: Inventory, downloads: Downloads) -> Placement:
        if self._placement is None or self._placement.addresses is not inventory.addresses:
            self._placement = self._place(inventory, downloads)
        return self._placement

    def _place(self, inventory: Inventory, downloads: Downloads) -> Placement:
        here: list[int] = []
        converted: list[int] = []
        elsewhere: dict[Download, list[int]] = {}
        for number, value in enumerate(inventory.values):
            if not isinstance(value, torch.Tensor):
                continue
            download = downloads.of(value.device, self.geometry.nbytes)
            if download is None or not value.numel():
                here.append(number)
                if inventory.addresses[number] == 0 and value.numel():
                    converted.append(number)
            else:
                elsewhere.setdefault(download, []).append(number)
        plans = [
            (way, numbers, self._plan(way, inventory, numbers))
            for way, numbers in elsewhere.items()
        ]
        return Placement(inventory.addresses, converted, self._neighbours(here), plans)

    def _plan(self, download: Download, inventory: Inventory, numbers: list[int]) -> Plan:
        specs = [self.manifest.tensors[number] for number in numbers]
        offsets, sizes = [s.offset for s in specs], [s.nbytes for s in specs]
        return download.plan(Blocks.of(specs, offsets, sizes), _tensors(inventory, numbers))

    def _neighbours(self, numbers: list[int]) -> list[Addresses]:
        """The same, in groups between which tensors of others lie, or which have bytes enough."""
        which = np.array(numbers, dtype=np.int64)
        mine = np.zeros(len(self.geometry.sizes), dtype=bool)
        mine[which] = True
        others = np.cumsum(self.geometry.nonempty & ~mine)[which]
        portion = self.geometry.offsets[which] // PORTION
        cuts = np.flatnonzero((np.diff(others) != 0) | (np.diff(portion) != 0)) + 1
        return [group for group in np.split(which, cuts) if len(group)]


class Filling:
    """One slot, while it is being filled with one version.

    Attributes:
        generation, inventory: which slots, and what is written.
        slot: the one. writer: has the digests of what is written so far.
    """

    def __init__(
        self,
        generation: Generation,
        slot: int,
        inventory: Inventory,
        copier: Copier,
        downloads: Downloads,
    ) -> None:
        self.generation, self.inventory, self._downloads = generation, inventory, downloads
        self.slot = generation.slots[slot]
        self.writer = SlotWriter(generation.geometry, self.slot.bytes, copier)
        self._arrived = Arrived(generation.progress[slot], generation.geometry.nbytes)

    def write_resident(self) -> None:
        """Write the tensors that exist anyway: many at a time, and those of all GPUs at once."""
        inventory, geometry = self.inventory, self.generation.geometry
        placement = self.generation.placement(inventory, self._downloads)
        with ExitStack() as flows:
            work = []
            for download, numbers, plan in placement.elsewhere:
                flow = flows.enter_context(self._flow(download))
                tensors = _tensors(inventory, numbers)
                work += [(w.origin, w, download, plan, tensors, flow) for w in plan.windows]
            for _, window, download, plan, tensors, flow in sorted(work, key=itemgetter(0)):
                download.run(plan, window, tensors, flow)
            for number in placement.converted:
                value, spec = inventory.values[number], self._spec(number)
                assert isinstance(value, torch.Tensor)
                copy_tensor(self.slot.view(spec), value, spec.name)
            for group in placement.here:
                if len(group) == len(inventory.values):
                    self.writer.write_all(inventory.addresses)
                else:
                    self.writer.write(group.tolist(), inventory.addresses[group])
                ends = geometry.offsets[group[-1]] + geometry.sizes[group[-1]]
                self._arrived.add(int(geometry.offsets[group[0]]), int(ends))

    def write_stream(self, deadline: Deadline, awaited: Sequence[int]) -> float:
        """Write what comes as a stream, each tensor before the next one is asked for.

        Returns:
            The seconds the source took.

        Raises:
            SourceError, DeadlineError: see :class:`~weightsync.intake.Intake`.
        """
        intake = Intake(self.inventory, awaited, deadline)
        packers: dict[Download, Packer] = {}
        with ExitStack() as flows:
            for number, tensor in intake:
                spec = self._spec(number)
                download = self._downloads.of(tensor.device, self.generation.geometry.nbytes)
                if download is None or not spec.nbytes:
                    self._write(number, tensor)
                else:
                    if download not in packers:
                        packers[download] = Packer(flows.enter_context(self._flow(download)))
                    packers[download].put(spec, tensor)
                del tensor  # before the next one is made
            for packer in packers.values():
                packer.flush()
        return intake.seconds

    def _write(self, number: int, tensor: torch.Tensor) -> None:
        spec = self._spec(number)
        address = plain_address(tensor, spec.dtype)
        if address == 0:
            copy_tensor(self.slot.view(spec), tensor, spec.name)
        self.writer.write([number], [address])
        if spec.nbytes:
            self._arrived.add(spec.offset, spec.offset + spec.nbytes)

    def _spec(self, number: int) -> ParamSpec:
        return self.generation.manifest.tensors[number]

    def _flow(self, download: Download) -> AbstractContextManager[SlotFlow]:
        return flow_into(self.slot, download, self.writer, self._arrived.add, self._downloads)


def flow_into(
    slot: Slot, download: Download, writer: SlotWriter, landed: Landed, downloads: Downloads
) -> AbstractContextManager[SlotFlow]:
    """A way from a GPU into a slot, page-locked if that can be done."""
    if not slot.page_lock(download.device) and download.device.place.type != "cpu":
        downloads.note(
            f"the buffers could not be page-locked for {download.device.place} (on a disk's file "
            "system, or more than may be locked?): copies from there are slower"
        )
    return download.flow(slot.address, writer, landed)


def _tensors(inventory: Inventory, numbers: Sequence[int]) -> list[torch.Tensor]:
    return [v for v in map(inventory.values.__getitem__, numbers) if isinstance(v, torch.Tensor)]
