"""The trainer's tensors where they are, and in a buffer of our own those that cannot be shown."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch

from weightsync.deadline import Deadline
from weightsync.errors import WeightSyncError
from weightsync.intake import Intake, copy_tensor
from weightsync.manifest import Manifest
from weightsync.run.process import this_process
from weightsync.schemes.cuda_ipc.handles import Exchange, Room
from weightsync.schemes.cuda_ipc.layout import Allocation, Table
from weightsync.source import Inventory
from weightsync.tensors import Addresses, Facts, plain_address

_ALIGNMENT = 256


@dataclass(frozen=True)
class Shown:
    """What one update shows to others.

    Attributes:
        table: the very same object as of the update before if nothing moved.
        copied: bytes that were copied into our own buffer, of so many tensors.
        seconds: spent in the source.
    """

    table: Table
    copied: int
    tensors: int
    seconds: float


@dataclass(frozen=True)
class _Look:
    """What was found out of one set of tensors, and holds while they stay what they are.

    Attributes:
        shown: the address and number of each allocation that tensors lie in.
        copied: the tensors, by their index, that have to be copied, and where to in ``room``.
    """

    fingerprint: str
    facts: Facts
    devices: list[torch.device]
    place: torch.device
    shown: tuple[tuple[int, int | None], ...]
    copied: dict[int, int]
    room: Room | None
    table: Table


class Exports:
    """Finds out where tensors lie, and by which handles others map that memory."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._look: _Look | None = None

    def show(self, inventory: Inventory, deadline: Deadline) -> Shown:
        """Have everything in memory that others can map, and final.

        Raises:
            SourceError: a tensor cannot be copied. NoRoomError: no memory for what has to be.
            DeadlineError: the source was not done in time.
        """
        there = [value for value in inventory.values if isinstance(value, torch.Tensor)]
        facts, devices = Facts.of(there), list(map(attrgetter("device"), there))
        look = self._look
        if look is None or not self._holds(look, inventory.manifest, facts, devices):
            look = self._look_at(inventory, facts, devices)
        seconds = self._copy(inventory, look, deadline)
        for place in {look.place, *filter(self._exchange.shows, devices)}:
            self._exchange.synchronise(place)
        specs = inventory.manifest.tensors
        copied = sum(specs[number].nbytes for number in look.copied)
        return Shown(look.table, copied, len(look.copied), seconds)

    def clear(self) -> None:
        """Free the buffer. What was shown of it may still be mapped by readers."""
        self._look = None

    def _holds(
        self, look: _Look, manifest: Manifest, facts: Facts, devices: list[torch.device]
    ) -> bool:
        """Whether a look is as good as a new one.

        Memory that was freed and allocated again may have its former address, but not its number.
        """
        if (look.fingerprint, look.facts, look.devices) != (manifest.fingerprint, facts, devices):
            return False
        now = self._exchange.serials(look.place, (address for address, _ in look.shown))
        return None not in now and now == [serial for _, serial in look.shown]

    def _look_at(self, inventory: Inventory, facts: Facts, devices: list[torch.device]) -> _Look:
        self._look = None  # its buffer goes before there is another one
        manifest, place = inventory.manifest, self._place(devices)
        specs = manifest.tensors
        addresses: Addresses = np.zeros(len(specs), dtype=np.int64)
        for number, (spec, value) in enumerate(zip(specs, inventory.values, strict=True)):
            if isinstance(value, torch.Tensor):
                addresses[number] = plain_address(value, spec.dtype, place)
        shown, places = self._locate(manifest, addresses, place)
        copied: dict[int, int] = {}
        end = 0
        for number, spec in enumerate(specs):
            if spec.nbytes and places[number] is None:
                copied[number] = end
                end += -(-spec.nbytes // _ALIGNMENT) * _ALIGNMENT
        room, allocations = None, list(shown)
        if copied:
            room = self._exchange.allocate(place, end)
            begin = room.tensor.data_ptr()
            ours = self._allocation(place, begin)
            assert ours is not None, "memory made to be shown cannot be shown"
            allocations.append(ours)
            for number, offset in copied.items():
                places[number] = len(shown), begin - ours.address + offset
        table = Table(
            manifest,
            self._exchange.identity(place),
            this_process(),
            tuple(allocations),
            tuple(found or (0, 0) for found in places),
        )
        begins = [allocation.address for allocation in shown]
        serials = tuple(zip(begins, self._exchange.serials(place, begins), strict=True))
        self._look = _Look(
            manifest.fingerprint, facts, devices, place, serials, copied, room, table
        )
        return self._look

    def _place(self, devices: list[torch.device]) -> torch.device:
        """The device on which most of the tensors are."""
        count = Counter(filter(self._exchange.shows, devices))
        return count.most_common(1)[0][0] if count else self._exchange.main_place()

    def _locate(
        self, manifest: Manifest, addresses: Addresses, place: torch.device
    ) -> tuple[list[Allocation], list[tuple[int, int] | None]]:
        """The allocations that tensors lie in, and where; None: it cannot be shown there."""
        allocations: list[Allocation] = []
        places: list[tuple[int, int] | None] = [None] * len(addresses)
        last: Allocation | None = None
        for number in np.argsort(addresses).tolist():
            spec, address = manifest.tensors[number], int(addresses[number])
            if address == 0:
                continue
            if last is None or address >= last.address + last.nbytes:
                last = self._allocation(place, address)
                if last is not None:
                    allocations.append(last)
            if last is None:
                continue
            offset = address - last.address
            if offset + spec.nbytes <= last.nbytes and offset % spec.dtype.itemsize == 0:
                places[number] = len(allocations) - 1, offset
        return allocations, places

    def _allocation(self, place: torch.device, address: int) -> Allocation | None:
        """The allocation of an address; None: it cannot be shown."""
        try:
            base, nbytes = self._exchange.allocation(place, address)
            return Allocation(self._exchange.handle(place, base), nbytes, base)
        except WeightSyncError:
            return None

    def _copy(self, inventory: Inventory, look: _Look, deadline: Deadline) -> float:
        """Bring what has to be copied up to date; returns the seconds the source took."""
        specs = inventory.manifest.tensors

        def room_for(number: int) -> torch.Tensor:
            assert look.room is not None
            spec, begin = specs[number], look.copied[number]
            flat = look.room.tensor[begin : begin + spec.nbytes]
            return flat.view(spec.dtype).view(spec.shape)

        for number in look.copied:
            value = inventory.values[number]
            if isinstance(value, torch.Tensor):
                copy_tensor(room_for(number), value, specs[number].name)
        intake = Intake(inventory, inventory.streamed(), deadline)
        for number, tensor in intake:
            if specs[number].nbytes:
                copy_tensor(room_for(number), tensor, specs[number].name)
            del tensor  # before the next one is made
        return intake.seconds
