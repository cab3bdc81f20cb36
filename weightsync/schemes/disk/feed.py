"""Taking weights out of a source, in the order in which a version's files want them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch

from weightsync.deadline import Deadline
from weightsync.intake import Intake, copy_tensor
from weightsync.schemes.disk.writer import VersionWriter
from weightsync.source import Inventory
from weightsync.tensors import plain_address

STAGING = 32 << 20
"""Bytes. How much is cast, made contiguous or fetched from a device before it is written."""


def write_all(writer: VersionWriter, inventory: Inventory, deadline: Deadline) -> float:
    """Write every tensor of a source.

    Tensors that exist anyway are written when a stream has come past them, so that neighbours in a
    file are written one after the other.

    Returns:
        The seconds the source took.

    Raises:
        SourceError, DeadlineError: see :class:`~weightsync.intake.Intake`.
    """
    order = writer.order
    rank = {tensor: rank for rank, tensor in enumerate(order)}
    resident = deque(n for n in order if isinstance(inventory.values[n], torch.Tensor))
    intake = Intake(inventory, inventory.streamed(), deadline)
    batch = _Batch(writer, inventory)
    for number, tensor in intake:
        while resident and rank[resident[0]] < rank[number]:
            batch.add(resident.popleft())
        batch.write()
        _write_one(writer, inventory, number, tensor)
        del tensor  # before the next one is made
    for number in resident:
        batch.add(number)
    batch.write()
    return intake.seconds


class _Batch:
    """Tensors that exist anyway and are written together: many threads want much to do."""

    def __init__(self, writer: VersionWriter, inventory: Inventory) -> None:
        self._writer = writer
        self._inventory = inventory
        self._tensors: list[int] = []
        self._addresses: list[int] = []
        self._staged: list[torch.Tensor] = []
        self._nbytes = 0

    def add(self, number: int) -> None:
        spec = self._inventory.manifest.tensors[number]
        value = self._inventory.values[number]
        assert isinstance(value, torch.Tensor)
        address = int(self._inventory.addresses[number])
        if address == 0:
            if spec.nbytes > STAGING:
                self.write()
                _write_one(self._writer, self._inventory, number, value)
                return
            if self._nbytes + spec.nbytes > STAGING:
                self.write()
            staged = torch.empty(spec.shape, dtype=spec.dtype)
            copy_tensor(staged, value, spec.name)
            self._staged.append(staged)
            self._nbytes += spec.nbytes
            address = staged.data_ptr()
        self._tensors.append(number)
        self._addresses.append(address)

    def write(self) -> None:
        self._writer.write(self._tensors, self._addresses)
        self._tensors, self._addresses, self._staged, self._nbytes = [], [], [], 0


def _write_one(
    writer: VersionWriter, inventory: Inventory, number: int, tensor: torch.Tensor
) -> None:
    spec = inventory.manifest.tensors[number]
    address = plain_address(tensor, spec.dtype)
    if address:
        writer.write_part(number, 0, spec.nbytes, address)
        return
    for offset, part in _parts(tensor, spec.dtype, spec.name):
        writer.write_part(number, offset, part.nbytes, part.data_ptr())


def _parts(
    tensor: torch.Tensor, dtype: torch.dtype, name: str
) -> Iterator[tuple[int, torch.Tensor]]:
    """A tensor in pieces that are plain memory, each with its offset in bytes."""
    nbytes = tensor.numel() * dtype.itemsize
    if nbytes <= STAGING:
        part = torch.empty(tensor.shape, dtype=dtype)
        copy_tensor(part, tensor, name)
        yield 0, part
        return
    row = nbytes // len(tensor)
    at_once = STAGING // row
    if at_once:
        for begin in range(0, len(tensor), at_once):
            rows = tensor[begin : begin + at_once]
            part = torch.empty(rows.shape, dtype=dtype)
            copy_tensor(part, rows, name)
            yield begin * row, part
    else:
        for index in range(len(tensor)):
            for offset, part in _parts(tensor[index], dtype, name):
                yield index * row + offset, part
