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
