"""The slots for one manifest, on the trainer's side, and how weights get into one of them."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from weightsync.chunks import Geometry, SlotWriter
from weightsync.deadline import Deadline
from weightsync.errors import DeadlineError, SourceError
from weightsync.files import Directory, Lock
from weightsync.manifest import Manifest, describe
from weightsync.schemes.double_buffer import layout
from weightsync.schemes.double_buffer.slot import Slot, copy_tensor, slot_size
from weightsync.source import Inventory
from weightsync.tensors import plain_address


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

    A stream may hand out one staging buffer again and again, or take memory back.

    Returns:
        The seconds the source took.

    Raises:
        SourceError: a tensor is not what the manifest says, comes twice, or does not come.
        DeadlineError: the source was not done in time.
    """
    streamed = 0.0
    specs = generation.manifest.tensors
    left = set(awaited)
    stream = inventory.stream()
    while True:
        asked = time.perf_counter()
        entry = next(stream, None)
        streamed += time.perf_counter() - asked
        if entry is None:
            break
        name, tensor = entry
        number = generation.index.get(name)
        if number is None or number not in left:
            what = "sent twice" if number is not None else "not in the manifest"
            raise SourceError(f"tensor {name!r} is {what}")
        left.remove(number)
        spec = specs[number]
        cast = tensor.dtype.is_floating_point and spec.dtype.is_floating_point
        if tensor.shape != spec.shape or not (cast or tensor.dtype == spec.dtype):
            sent = describe(tensor.dtype, tensor.shape)
            raise SourceError(f"tensor {name!r} is {sent}, its manifest says {spec}")
        address = plain_address(tensor, spec.dtype)
        if address == 0:
            copy_tensor(generation.view(slot, number), tensor, name)
        writer.write([number], [address])
        del entry, tensor
        if deadline.expired:
            raise DeadlineError(
                f"the source was not done within {deadline.seconds:.1f} s; it had come to {name!r}"
            )
    if left:
        names = ", ".join(repr(specs[number].name) for number in sorted(left)[:5])
        raise SourceError(f"{len(left)} tensors of the manifest were not sent: {names} ...")
    return streamed
