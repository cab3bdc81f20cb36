"""Where a receiving process keeps versions: in its GPU's memory if there is room, or the host's."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weightsync.device import Device
from weightsync.errors import NoRoomError

SPARE = 16
"""What is taken of a GPU's memory unasked leaves free this part of all of it at least."""


@dataclass(frozen=True)
class Place:
    """
    Attributes:
        gpu: whose memory; None: the host's.
        pinned: page-locked, so that copies from and to a GPU run at the speed of the bus.
    """

    gpu: Device | None = None
    pinned: bool = False

    def empty(self, nbytes: int) -> torch.Tensor:
        """uint8[nbytes].

        Raises:
            NoRoomError: there is too little memory.
        """
        if self.gpu is not None:
            return self.gpu.empty(nbytes)
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.pinned)
        except (RuntimeError, MemoryError):
            raise NoRoomError(
                f"no memory for a buffer of {nbytes:,} bytes (buffers=1 needs half as much)"
            ) from None


class Places:
    """One of them for all versions of a process, until larger ones come.

    Args:
        gpu: on which buckets arrive; None: they arrive in host memory, and stay there.
        memory: ``"gpu"``, ``"host"``, or ``"auto"``: the GPU if there is room enough.
    """

    def __init__(self, gpu: Device | None = None, memory: str = "host") -> None:
        self._memory = memory
        self._host = Place(None, gpu is not None and gpu.place.type == "cuda")
        self._gpu = None if gpu is None or memory == "host" else Place(gpu)
        self._needed = 0
        self._chosen = self._host

    def choose(self, needed: int, held: int) -> Place:
        """
        Args:
            needed: bytes of all versions that are to be there; held: of them, on the GPU already.
        """
        if needed > self._needed:
            self._needed = needed
            self._chosen = self._host
            if self._gpu is not None and self._has_room(self._gpu, needed - held):
                self._chosen = self._gpu
        return self._chosen

    def _has_room(self, place: Place, more: int) -> bool:
        if self._memory == "gpu":
            return True
        assert place.gpu is not None
        free, total = place.gpu.free_bytes()
        return free - more >= total // SPARE

    def instead(self, place: Place) -> Place | None:
        """Another one, where there was no room after all; None: there is none that is wanted."""
        if place == self._host or self._memory == "gpu":
            return None
        self._chosen = self._host
        return self._host
