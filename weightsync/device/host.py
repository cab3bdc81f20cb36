"""The processor's own memory as a device: copies are done at once, when they are queued."""

from __future__ import annotations

import ctypes
import os

import numpy as np
import torch
from xxhash import xxh3_64_intdigest

from weightsync.chunks import CHUNK, Copier, move
from weightsync.device.device import Device, Lane, Mark, Moves, PageLock, split
from weightsync.errors import NoRoomError
from weightsync.tensors import Addresses

_LONGEST = 1 << 20
"""Bytes that one thread copies before it looks for more."""


class HostMark(Mark):
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class HostLane(Lane):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, HostLane)

    def __hash__(self) -> int:
        return hash(HostLane)

    def copy(self, into: int, out_of: int, nbytes: int) -> None:
        ctypes.memmove(into, out_of, nbytes)

    def copy_rows(
        self, into: int, into_pitch: int, out_of: int, out_of_pitch: int, width: int, count: int
    ) -> None:
        for row in range(count):
            ctypes.memmove(into + row * into_pitch, out_of + row * out_of_pitch, width)

    def empty(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.int64)

    def after(self, mark: Mark) -> None:
        mark.wait()

    def mark(self) -> Mark:
        return HostMark()


class HostMoves(Moves):
    def __init__(
        self, copier: Copier, into: Addresses, out_of: Addresses, length: Addresses
    ) -> None:
        self._copier = copier
        self._into, self._out_of, self._length = split(into, out_of, length, _LONGEST)
        # Rows that one thread takes together: about as many bytes as the longest row has.
        ends = np.cumsum(self._length)
        self._bounds = [0]
        while self._bounds[-1] < len(ends):
            begin = self._bounds[-1]
            upto = (ends[begin - 1] if begin else 0) + _LONGEST
            self._bounds.append(max(begin + 1, int(np.searchsorted(ends, upto, side="right"))))

    def run(self, lane: Lane, base: int = 0) -> None:
        out_of = self._out_of + base
        bounds = self._bounds

        def work(part: int) -> None:
            move(self._into, out_of, self._length, bounds[part], bounds[part + 1], True)

        self._copier.each(len(bounds) - 1, work)


class HostDevice(Device):
    place = torch.device("cpu")

    def __init__(self) -> None:
        self._copier = Copier()

    def empty(self, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            try:
                raw = torch.empty(nbytes + 256, dtype=torch.uint8)
            except (RuntimeError, MemoryError):
                raise NoRoomError(f"no memory for a buffer of {nbytes:,} bytes") from None
            begin = -raw.data_ptr() % 256
            return raw[begin : begin + nbytes]

    def free_bytes(self) -> tuple[int, int]:
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page

    def lane(self) -> Lane:
        return HostLane()

    def current(self) -> Lane:
        return HostLane()

    def page_lock(self, address: int, nbytes: int, writable: bool) -> PageLock | None:
        return None

    def digests(self, lane: Lane, address: int, count: int, into: torch.Tensor) -> None:
        memory = memoryview((ctypes.c_ubyte * (count * CHUNK)).from_address(address)).cast("B")
        found = into.numpy().view(np.uint64)

        def work(chunk: int) -> None:
            found[chunk] = xxh3_64_intdigest(memory[chunk * CHUNK : (chunk + 1) * CHUNK])

        self._copier.each(count, work)

    def moves(
        self, into: Addresses, out_of: Addresses, length: Addresses, gentle: bool = False
    ) -> Moves:
        return HostMoves(self._copier, into, out_of, length)

    def tensor_at(self, address: int, nbytes: int) -> torch.Tensor:
        return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)
