"""An NVIDIA GPU: lanes are streams, many copies are one kernel."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from weightsync.device import driver
from weightsync.device.device import Device, Lane, Mark, Moves, PageLock
from weightsync.device.host import HostDevice
from weightsync.errors import NoRoomError
from weightsync.tensors import Addresses

log = logging.getLogger("weightsync")


@contextmanager
def _on(stream: torch.cuda.Stream) -> Iterator[None]:
    """Torch's current stream inside.

    With the device around it: to put back the stream of a thread that has used no GPU yet, torch
    would select the first one, and CUDA makes a context there, of hundreds of MiB.
    """
    if stream == torch.cuda.current_stream(stream.device):
        with torch.cuda.device(stream.device):
            yield
        return
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


class CUDAMark(Mark):
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.event.synchronize()


class CUDALane(Lane):
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self._device = stream.device_index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CUDALane) and bool(self.stream == other.stream)

    def __hash__(self) -> int:
        return hash(self.stream)

    def copy(self, into: int, out_of: int, nbytes: int) -> None:
        if nbytes:
            driver.copy(self._device, into, out_of, nbytes, self.stream.cuda_stream)

    def copy_rows(
        self, into: int, into_pitch: int, out_of: int, out_of_pitch: int, width: int, count: int
    ) -> None:
        if width and count:
            stream = self.stream.cuda_stream
            driver.copy_rows(
                self._device, into, into_pitch, out_of, out_of_pitch, width, count, stream
            )

    def empty(self, count: int) -> torch.Tensor:
        place = self.stream.device
        try:
            with _on(self.stream):  # torch keeps memory apart for each
                return torch.empty(count, dtype=torch.int64, device=place)
        except torch.cuda.OutOfMemoryError:
            raise NoRoomError(f"{place} has no room for {8 * count:,} bytes") from None

    def after(self, mark: Mark) -> None:
        if isinstance(mark, CUDAMark):
            self.stream.wait_event(mark.event)
        else:
            mark.wait()

    def mark(self) -> Mark:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return CUDAMark(event)


class CUDAPageLock(PageLock):
    def __init__(self, device: int, address: int, nbytes: int, writable: bool) -> None:
        driver.host_register(device, address, nbytes, writable)
        self._release = weakref.finalize(self, _unregister, device, address)
        self._release.atexit = False  # the driver may be gone by then, and takes it along

    def release(self) -> None:
        self._release()


def _unregister(device: int, address: int) -> None:
    try:
        driver.host_unregister(device, address)
    except driver.DriverError as error:
        log.warning("memory was not unlocked: %s", error)


class CUDAMoves(Moves):
    """Of a machine on which kernels cannot be compiled: one copy after the other."""

    def __init__(self, device: int, into: Addresses, out_of: Addresses, length: Addresses) -> None:
        rows = zip(into.tolist(), out_of.tolist(), length.tolist(), strict=True)
        self._rows = [piece for row in rows for piece in _pieces(device, *row)]

    def run(self, lane: Lane, base: int = 0) -> None:
        for into, out_of, length in self._rows:
            lane.copy(into, out_of + base, length)


def _pieces(device: int, into: int, out_of: int, length: int) -> Iterator[tuple[int, int, int]]:
    """A copy in parts, each within one allocation on either side: the driver refuses others.

    Neighbours in a copy plan may be neighbours in memory by chance.
    """
    while length > 0:
        part = min(length, _room(device, into), _room(device, out_of))
        yield into, out_of, part
        into, out_of, length = into + part, out_of + part, length - part


def _room(device: int, address: int) -> int:
    """Bytes from an address to the end of its allocation; of an offset, which has none, any."""
    try:
        base, nbytes = driver.allocation(device, address)
    except driver.DriverError:
        return 1 << 62
    return base + nbytes - address


class KernelMoves(Moves):
    def __init__(self, moves: Any) -> None:
        self._moves = moves

    def run(self, lane: Lane, base: int = 0) -> None:
        assert isinstance(lane, CUDALane)
        with _on(lane.stream):
            self._moves.run_on_current(base)


class CUDADevice(Device):
    """
    Attributes:
        kernels: the module, or None where Triton or its C compiler is missing.
    """

    def __init__(self, index: int) -> None:
        self.place = torch.device("cuda", index)
        self.kernels = self._compiled()

    def _compiled(self) -> Any:
        """Triton's kernels, after they were seen to work here."""
        try:
            from weightsync.device import kernels

            chunk = torch.arange(1 << 17, dtype=torch.int64)
            data = chunk.to(self.place)
            found = torch.zeros(1, dtype=torch.int64, device=self.place)
            with torch.cuda.device(self.place):
                kernels.digest_chunks(data.data_ptr(), 1, found)
                kernels.compile_moves(self.place)
            wanted = torch.zeros(1, dtype=torch.int64)
            HostDevice().digests(HostDevice().current(), chunk.data_ptr(), 1, wanted)
            if found.cpu().equal(wanted):
                return kernels
            log.warning("digests made on the GPU are wrong here: they are made on the processor")
        except Exception as error:
            words = f"{type(error).__name__}: {error!s:.300}"
            log.warning("no GPU kernels (%s): digests and copies take longer", words)
        return None

    def empty(self, nbytes: int) -> torch.Tensor:
        try:
            with torch.inference_mode(False):
                return torch.empty(nbytes, dtype=torch.uint8, device=self.place)
        except torch.cuda.OutOfMemoryError:
            raise NoRoomError(f"{self.place} has no room for {nbytes:,} bytes") from None

    def free_bytes(self) -> tuple[int, int]:
        # What torch keeps for itself is free to others of this process.
        free, total = torch.cuda.mem_get_info(self.place)
        kept = torch.cuda.memory_reserved(self.place) - torch.cuda.memory_allocated(self.place)
        return free + kept, total

    def lane(self) -> Lane:
        return CUDALane(torch.cuda.Stream(self.place))  # type: ignore[no-untyped-call]

    def current(self) -> Lane:
        return CUDALane(torch.cuda.current_stream(self.place))

    def page_lock(self, address: int, nbytes: int, writable: bool) -> PageLock | None:
        try:
            return CUDAPageLock(self.place.index, address, nbytes, writable)
        except driver.DriverError as error:
            log.warning("%s bytes could not be page-locked: %s", f"{nbytes:,}", error)
            return None

    def digests(self, lane: Lane, address: int, count: int, into: torch.Tensor) -> None:
        assert isinstance(lane, CUDALane)
        with _on(lane.stream):
            if self.kernels is not None:
                self.kernels.digest_chunks(address, count, into)
                return
            data = self.tensor_at(address, count << 20).cpu()
            found = torch.zeros(count, dtype=torch.int64)
            HostDevice().digests(HostDevice().current(), data.data_ptr(), count, found)
            into[:count].copy_(found)

    def moves(
        self, into: Addresses, out_of: Addresses, length: Addresses, gentle: bool = False
    ) -> Moves:
        if self.kernels is None:
            return CUDAMoves(self.place.index, into, out_of, length)
        return KernelMoves(self.kernels.GPUMoves(self.place, into, out_of, length, gentle))

    def tensor_at(self, address: int, nbytes: int) -> torch.Tensor:
        if not nbytes:
            return self.empty(0)
        return torch.as_tensor(_Foreign(address, nbytes), device=self.place)


class _Foreign:
    """Device memory of somebody else's, in numba's interface, which torch reads."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": np.dtype(np.uint8).str,
            "data": (address, False),
            "version": 3,
            "strides": None,
        }
