"""How memory of one process is shown to another: the only part of the scheme that needs a GPU."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

import torch

from weightsync.device import Device, device_of, driver
from weightsync.device.driver import DriverError
from weightsync.errors import NoRoomError, SchemeError, WeightSyncError

HANDLE_BYTES = 64


class Room:
    """Memory that can be shown to others, for as long as this object is kept.

    Attributes:
        tensor: uint8, all of it.
    """

    def __init__(self, tensor: torch.Tensor, free: Callable[[], None]) -> None:
        self.tensor = tensor
        # Not when Python ends: the driver may be gone by then, and takes it along.
        weakref.finalize(self, free).atexit = False


class Exchange(ABC):
    """Hands out allocations of this process, and maps those of others."""

    @abstractmethod
    def require(self) -> None:
        """
        Raises:
            SchemeError: nothing can be shown to others here; says what to use instead.
        """

    @abstractmethod
    def main_place(self) -> torch.device:
        """Where to put what lies elsewhere, if nothing lies there yet."""

    @abstractmethod
    def shows(self, place: torch.device) -> bool:
        """Whether tensors of such a place can be shown at all."""

    @abstractmethod
    def identity(self, place: torch.device) -> str:
        """What the device is called in every process."""

    @abstractmethod
    def place_of(self, identity: str) -> torch.device | None:
        """The reverse; None: it cannot be used from this process."""

    @abstractmethod
    def synchronise(self, place: torch.device) -> None:
        """Wait until everything queued on the device by this process is done."""

    @abstractmethod
    def allocation(self, place: torch.device, address: int) -> tuple[int, int]:
        """Where the allocation begins in which an address lies, and how many bytes it has.

        Also of one that :meth:`open` has mapped.

        Raises:
            WeightSyncError: there is none.
        """

    @abstractmethod
    def serials(self, place: torch.device, addresses: Iterable[int]) -> list[int | None]:
        """The numbers of allocations, which no others have, not even at the same address.

        None: no memory is there any more.
        """

    @abstractmethod
    def handle(self, place: torch.device, base: int) -> bytes:
        """By which another process maps an allocation.

        Raises:
            WeightSyncError: it cannot be shown.
        """

    @abstractmethod
    def open(self, place: torch.device, handle: bytes) -> int:
        """Map another process's allocation; returns its address here.

        Raises:
            WeightSyncError: it is gone, or cannot be mapped.
        """

    @abstractmethod
    def close(self, place: torch.device, address: int) -> None:
        """Undo one :meth:`open`."""

    @abstractmethod
    def allocate(self, place: torch.device, nbytes: int) -> Room:
        """Memory of our own.

        Raises:
            NoRoomError: there is too little memory.
        """

    def device(self, place: torch.device) -> Device:
        device = device_of(place)
        if device is None:
            raise SchemeError(f"{place} has no driver of NVIDIA's that can be used")
        return device


class CUDAExchange(Exchange):
    """CUDA's interprocess handles."""

    def require(self) -> None:
        if not torch.cuda.is_available() or torch.version.cuda is None:
            raise SchemeError(
                "CUDAIPCScheme is for a trainer and an engine on one NVIDIA GPU, and there is none "
                "to be seen here; use DoubleBufferScheme, which needs none"
            )

    def main_place(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def shows(self, place: torch.device) -> bool:
        return place.type == "cuda"

    def identity(self, place: torch.device) -> str:
        return str(torch.cuda.get_device_properties(place).uuid)

    def place_of(self, identity: str) -> torch.device | None:
        for index in range(torch.cuda.device_count()):
            place = torch.device("cuda", index)
            if self.identity(place) == identity:
                return place
        return None

    def synchronise(self, place: torch.device) -> None:
        torch.cuda.synchronize(place)

    def allocation(self, place: torch.device, address: int) -> tuple[int, int]:
        return driver.allocation(place.index, address)

    def serials(self, place: torch.device, addresses: Iterable[int]) -> list[int | None]:
        return driver.allocation_serials(place.index, addresses)

    def handle(self, place: torch.device, base: int) -> bytes:
        return driver.ipc_handle(place.index, base)

    def open(self, place: torch.device, handle: bytes) -> int:
        torch.cuda.synchronize(place)  # the context is there, and torch's own
        return driver.ipc_open(place.index, handle)

    def close(self, place: torch.device, address: int) -> None:
        driver.ipc_close(place.index, address)

    def allocate(self, place: torch.device, nbytes: int) -> Room:
        # Not torch's own: expandable segments cannot be shown, and small tensors share a block.
        try:
            address = driver.allocate(place.index, nbytes)
        except DriverError:
            torch.cuda.empty_cache()  # what torch keeps for later may be all there is
            try:
                address = driver.allocate(place.index, nbytes)
            except DriverError as error:
                raise NoRoomError(f"{place} has no room for {nbytes:,} bytes: {error}") from None
        tensor = self.device(place).tensor_at(address, nbytes)
        return Room(tensor, partial(_free, place.index, address))


def _free(device: int, address: int) -> None:
    with suppress(WeightSyncError, RuntimeError):  # after a fault of the GPU nothing can be freed
        torch.cuda.synchronize(device)
        driver.free(device, address)
