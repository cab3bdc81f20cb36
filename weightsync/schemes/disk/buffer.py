"""Memory through which bytes go to and from files."""

from __future__ import annotations

import ctypes
import mmap


class Buffer:
    """Some memory, at a multiple of a page.

    Attributes:
        bytes: writable. address: of the first one.
    """

    def __init__(self, size: int) -> None:
        self.bytes = memoryview(mmap.mmap(-1, size))
        self.address = ctypes.addressof(ctypes.c_ubyte.from_buffer(self.bytes))


class Buffers:
    """Buffers of one size, for several threads; those that were given back are used again."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._free: list[Buffer] = []  # append and pop of lists are atomic

    def take(self) -> Buffer:
        try:
            return self._free.pop()
        except IndexError:
            return Buffer(self._size)

    def give(self, buffer: Buffer) -> None:
        self._free.append(buffer)
