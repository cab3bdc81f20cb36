"""Memory whose pages are there before anybody writes: a first touch costs several times a copy."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable

import torch

_HUGEPAGE, _POPULATE_WRITE = 14, 23
"""MADV_HUGEPAGE and MADV_POPULATE_WRITE (Linux 5.14), madvise(2)."""

_STEP = 256 << 20
"""Bytes between two looks at whether to stop."""


def give_pages(memory: torch.Tensor, stop: Callable[[], bool] = lambda: False) -> None:
    """Have the kernel give memory its pages now, huge ones where it can. Content stays.

    Where there is no such call it does nothing: pages come as they are written to, as ever.

    Args:
        memory: contiguous, on the host.
        stop: asked every now and then; what is missing then comes as it is written to.
    """
    page = mmap.PAGESIZE
    begin = -(-memory.data_ptr() // page) * page
    end = (memory.data_ptr() + memory.nbytes) // page * page
    if end <= begin:
        return
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.madvise(begin, end - begin, _HUGEPAGE)
    for at in range(begin, end, _STEP):
        if stop() or libc.madvise(at, min(_STEP, end - at), _POPULATE_WRITE) != 0:
            return
