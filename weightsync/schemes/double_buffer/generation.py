"""The slots for one manifest, on the trainer's side, and how weights get into one of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weightsync.chunks import Geometry, SlotWriter
from weightsync.deadline import Deadline
from weightsync.files import Directory, Lock
from weightsync.intake import Intake, copy_tensor
from weightsync.manifest import Manifest
from weightsync.schemes.double_buffer import layout
from weightsync.schemes.double_buffer.slot import Slot, slot_size
from weightsync.source import Inventory
from weightsync.tensors import plain_address


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

    def view(self, slot: int, tensor: int) -> torch.Tensor:
        return self.slots[slot].view(self.manifest.tensors[tensor])


def write_resident(
    generation: Generation, slot: int, inventory: Inventory, writer: SlotWriter
) -> None:
    """Write the tensors that exist anyway, all at once."""
    specs = generation.manifest.tensors
    there = []
    for number, value in enumerate(inventory.values):
        if isinstance(value, torch.Tensor):
            there.append(number)
            if inventory.addresses[number] == 0:
                copy_tensor(generation.view(slot, number), value, specs[number].name)
    if len(there) == len(specs):
        writer.write_all(inventory.addresses)
    elif there:
        writer.write(there, inventory.addresses[there])


def write_stream(
    generation: Generation,
    slot: int,
    inventory: Inventory,
    writer: SlotWriter,
    deadline: Deadline,
    awaited: Sequence[int],
) -> float:
    """Write what comes as a stream, each tensor before the next one is asked for.

    Returns:
        The seconds the source took.

    Raises:
        SourceError, DeadlineError: see :class:`~weightsync.intake.Intake`.
    """
    intake = Intake(inventory, awaited, deadline)
    for number, tensor in intake:
        spec = generation.manifest.tensors[number]
        address = plain_address(tensor, spec.dtype)
        if address == 0:
            copy_tensor(generation.view(slot, number), tensor, spec.name)
        writer.write([number], [address])
        del tensor  # before the next one is made
    return intake.seconds
