"""The slots for one manifest, on the trainer's side, and how weights get into one of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from weightsync.chunks import Geometry, SlotWriter
from weightsync.deadline import Deadline
from weightsync.download import Download, Downloads, Flow, Packer
from weightsync.files import Directory, Lock
from weightsync.intake import Intake, copy_tensor
from weightsync.manifest import Manifest
from weightsync.schemes.double_buffer import layout
from weightsync.schemes.double_buffer.progress import Progress
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
        self.progress = [Progress(directory, n) for n in range(slots)]

    def view(self, slot: int, tensor: int) -> torch.Tensor:
        return self.slots[slot].view(self.manifest.tensors[tensor])


def write_resident(
    generation: Generation,
    slot: int,
    inventory: Inventory,
    writer: SlotWriter,
    downloads: Downloads,
) -> None:
    """Write the tensors that exist anyway, all at once."""
    specs = generation.manifest.tensors
    there: list[int] = []
    elsewhere: dict[torch.device, list[int]] = {}
    for number, value in enumerate(inventory.values):
        if isinstance(value, torch.Tensor):
            if not value.is_cpu and downloads.of(value.device, generation.geometry.nbytes):
                elsewhere.setdefault(value.device, []).append(number)
                continue
            there.append(number)
            if inventory.addresses[number] == 0:
                copy_tensor(generation.view(slot, number), value, specs[number].name)
    if len(there) == len(specs):
        writer.write_all(inventory.addresses)
    elif there:
        writer.write(there, inventory.addresses[there])
    progress = generation.progress[slot]
    awaited = inventory.streamed()
    limit = specs[awaited[0]].offset if awaited else generation.geometry.nbytes
    for number, (place, numbers) in enumerate(elsewhere.items()):
        if number + 1 < len(elsewhere):
            limit = 0  # the others' tensors may lie before these
        with _flow(generation, slot, place, writer, downloads, progress, limit) as (download, flow):
            download.write(inventory, generation.geometry, flow, numbers)


@contextmanager
def _flow(
    generation: Generation,
    slot: int,
    place: torch.device,
    writer: SlotWriter,
    downloads: Downloads,
    progress: Progress,
    limit: int,
) -> Iterator[tuple[Download, Flow]]:
    """
    Args:
        limit: what lies behind is not known to be there.
    """
    geometry, memory = generation.geometry, generation.slots[slot]
    download = downloads.of(place, geometry.nbytes)
    assert download is not None
    memory.page_lock(download.device)

    def wrote(upto: int) -> None:
        progress.wrote(min(upto, limit))

    with download.flow(geometry, memory.address, writer, wrote) as flow:
        yield download, flow


def write_stream(
    generation: Generation,
    slot: int,
    inventory: Inventory,
    writer: SlotWriter,
    deadline: Deadline,
    awaited: Sequence[int],
    downloads: Downloads,
) -> float:
    """Write what comes as a stream, each tensor before the next one is asked for.

    Returns:
        The seconds the source took.

    Raises:
        SourceError, DeadlineError: see :class:`~weightsync.intake.Intake`.
    """
    intake = Intake(inventory, awaited, deadline)
    packers: dict[torch.device, Packer] = {}
    with ExitStack() as flows:
        for number, tensor in intake:
            spec = generation.manifest.tensors[number]
            place = tensor.device
            if not spec.nbytes:
                writer.write([number], [0])
            elif downloads.of(place, generation.geometry.nbytes):
                if place not in packers:
                    opened = _flow(
                        generation, slot, place, writer, downloads, generation.progress[slot], 0
                    )
                    _, flow = flows.enter_context(opened)
                    packers[place] = Packer(flow, generation.geometry)
                packers[place].put(number, spec, tensor)
            else:
                address = plain_address(tensor, spec.dtype)
                if address == 0:
                    copy_tensor(generation.view(slot, number), tensor, spec.name)
                writer.write([number], [address])
            del tensor  # before the next one is made
        for packer in packers.values():
            packer.flush()
    return intake.seconds
