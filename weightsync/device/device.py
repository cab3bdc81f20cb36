"""What a device offers to those who move bytes: memory, queues of copies, digests, many copies at
once.

Addresses are plain integers, and who uses them keeps the memory alive until a mark set after the
last use is done.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch

from weightsync.tensors import Addresses


class Mark(ABC):
    """A point in a lane: done once everything queued before it is."""

    @abstractmethod
    def done(self) -> bool: ...

    @abstractmethod
    def wait(self) -> None: ...


class Lane(ABC):
    """Work that is done in order, one piece after the other, while the caller goes on.

    Two objects for one lane are equal.
    """

    @abstractmethod
    def copy(self, into: int, out_of: int, nbytes: int) -> None:
        """Queue a copy, between host and device in either direction, or within one.

        From or to host memory it runs beside everything else if that memory is page-locked.
        """

    @abstractmethod
    def copy_rows(
        self, into: int, into_pitch: int, out_of: int, out_of_pitch: int, width: int, count: int
    ) -> None:
        """Queue ``count`` copies of ``width`` bytes, at distances of a pitch on either side."""

    @abstractmethod
    def empty(self, count: int) -> torch.Tensor:
        """int64[count] on the device, for use on this lane only: whatever other lanes have queued
        is not waited for.

        Raises:
            NoRoomError: there is too little memory.
        """

    @abstractmethod
    def after(self, mark: Mark) -> None:
        """What is queued from now on begins when the mark, of any lane, is done."""

    @abstractmethod
    def mark(self) -> Mark:
        """Done when everything queued so far is."""

    def wait(self) -> None:
        """Until everything queued so far is done."""
        self.mark().wait()


class PageLock(ABC):
    """Host memory that the device reads and writes at the speed of the bus."""

    @abstractmethod
    def release(self) -> None:
        """To be called before the memory is unmapped, when no copy is under way. Idempotent."""


class Moves(ABC):
    """Many copies within a device, done as one."""

    @abstractmethod
    def run(self, lane: Lane, base: int = 0) -> None:
        """Queue all of them.

        Args:
            base: is added to the address of every source.
        """


class Device(ABC):
    """The processor itself, or one of its GPUs."""

    place: torch.device

    @abstractmethod
    def empty(self, nbytes: int) -> torch.Tensor:
        """uint8[nbytes], aligned to 256 bytes at least.

        Also in ``torch.inference_mode``, whose own tensors cannot be written to outside of it.

        Raises:
            NoRoomError: there is too little memory.
        """

    @abstractmethod
    def free_bytes(self) -> tuple[int, int]:
        """Bytes of its memory that nobody uses, and all bytes of it."""

    @abstractmethod
    def lane(self) -> Lane:
        """A new lane, beside all others."""

    @abstractmethod
    def current(self) -> Lane:
        """The lane on which torch computes in this thread."""

    @abstractmethod
    def page_lock(self, address: int, nbytes: int, writable: bool) -> PageLock | None:
        """Page-lock host memory; None if that cannot be done: copies are slower then.

        Args:
            address: of a page's beginning. nbytes: whole pages.
            writable: whether this process may write to it.
        """

    @abstractmethod
    def digests(self, lane: Lane, address: int, count: int, into: torch.Tensor) -> None:
        """Queue the XXH3-64 digests of ``count`` whole chunks of :data:`~weightsync.chunks.CHUNK`.

        Args:
            address: of the first, in the device's memory, aligned to 16 bytes.
            into: int64[count] on the device, taken as unsigned.

        Raises:
            NoRoomError: there is too little memory to make them in.
        """

    @abstractmethod
    def moves(
        self, into: Addresses, out_of: Addresses, length: Addresses, gentle: bool = False
    ) -> Moves:
        """Copies within the device's memory, which do not overlap; lengths in bytes.

        Args:
            gentle: take longer, and leave most of the device to what runs beside them.
        """

    @abstractmethod
    def tensor_at(self, address: int, nbytes: int) -> torch.Tensor:
        """uint8[nbytes] over device memory that is not torch's. Does not keep it alive."""


def settle(*lanes: Lane) -> None:
    """Wait for lanes, an interrupt notwithstanding: the memory may be somebody else's next."""
    interrupt: KeyboardInterrupt | None = None
    while True:
        try:
            for lane in lanes:
                lane.wait()
            break
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


def split(
    into: Addresses, out_of: Addresses, length: Addresses, longest: int
) -> tuple[Addresses, Addresses, Addresses]:
    """The same copies, none longer than ``longest`` bytes; empty ones left out."""
    parts = -(-length // longest)
    row = np.repeat(np.arange(len(length)), parts)
    first = np.cumsum(parts) - parts
    begin = (np.arange(len(row)) - first[row]) * longest
    return into[row] + begin, out_of[row] + begin, np.minimum(length[row] - begin, longest)
