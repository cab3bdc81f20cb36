"""The few functions of NVIDIA's driver that torch has no interface to, called in the driver itself.

``libcuda.so.1`` comes with the driver, whichever CUDA torch was built for, and its functions keep
their form: https://docs.nvidia.com/cuda/cuda-driver-api/. Contexts are the primary ones of each
GPU, which torch uses too.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from weightsync.errors import WeightSyncError

_REGISTER_PORTABLE, _REGISTER_MAPPED, _REGISTER_READ_ONLY = 1, 2, 8
_IPC_LAZY_PEER_ACCESS = 1
_HOST, _DEVICE, _UNIFIED = 1, 2, 4
_BUFFER_ID = 7

_pointer, _size = ctypes.c_uint64, ctypes.c_size_t


class DriverError(WeightSyncError):
    """The driver refused; has its own words."""


class _Copy2D(ctypes.Structure):
    _fields_ = [
        ("out_of_x", _size),
        ("out_of_y", _size),
        ("out_of_type", ctypes.c_int),
        ("out_of_host", ctypes.c_void_p),
        ("out_of", _pointer),
        ("out_of_array", ctypes.c_void_p),
        ("out_of_pitch", _size),
        ("into_x", _size),
        ("into_y", _size),
        ("into_type", ctypes.c_int),
        ("into_host", ctypes.c_void_p),
        ("into", _pointer),
        ("into_array", ctypes.c_void_p),
        ("into_pitch", _size),
        ("width", _size),
        ("height", _size),
    ]


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


_ARGUMENTS = {
    "cuInit": [ctypes.c_uint],
    "cuDevicePrimaryCtxRetain": [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int],
    "cuCtxPushCurrent_v2": [ctypes.c_void_p],
    "cuCtxPopCurrent_v2": [ctypes.POINTER(ctypes.c_void_p)],
    "cuMemHostRegister_v2": [ctypes.c_void_p, _size, ctypes.c_uint],
    "cuMemHostUnregister": [ctypes.c_void_p],
    "cuMemcpyAsync": [_pointer, _pointer, _size, ctypes.c_void_p],
    "cuMemcpy2DAsync_v2": [ctypes.POINTER(_Copy2D), ctypes.c_void_p],
    "cuMemAlloc_v2": [ctypes.POINTER(_pointer), _size],
    "cuMemFree_v2": [_pointer],
    "cuMemGetAddressRange_v2": [ctypes.POINTER(_pointer), ctypes.POINTER(_size), _pointer],
    "cuPointerGetAttribute": [ctypes.c_void_p, ctypes.c_int, _pointer],
    "cuIpcGetMemHandle": [ctypes.POINTER(_IpcHandle), _pointer],
    "cuIpcOpenMemHandle_v2": [ctypes.POINTER(_pointer), _IpcHandle, ctypes.c_uint],
    "cuIpcCloseMemHandle": [_pointer],
    "cuGetErrorString": [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
}


@functools.cache
def _library() -> Any:
    """
    Raises:
        OSError, AttributeError: there is no driver, or a very old one.
    """
    library = ctypes.CDLL("libcuda.so.1")
    for name, arguments in _ARGUMENTS.items():
        getattr(library, name).argtypes = arguments
    library.cuInit(0)
    return library


@functools.cache
def available() -> bool:
    """Whether there is a driver with all of these functions."""
    try:
        _library()
    except (OSError, AttributeError):
        return False
    return True


def _call(name: str, *arguments: Any) -> None:
    code = getattr(_library(), name)(*arguments)
    if code:
        words = ctypes.c_char_p()
        _library().cuGetErrorString(code, ctypes.byref(words))
        said = words.value.decode() if words.value else "an unknown error"
        raise DriverError(f"{name.partition('_')[0]}: {said} ({code})")


@functools.cache
def _context(device: int) -> ctypes.c_void_p:
    """The primary context, kept for good: torch keeps it too."""
    context = ctypes.c_void_p()
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    return context


@contextmanager
def on(device: int) -> Iterator[None]:
    """Calls inside are made on a GPU, in whatever thread."""
    _call("cuCtxPushCurrent_v2", _context(device))
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


def host_register(device: int, address: int, nbytes: int, writable: bool) -> None:
    """Page-lock host memory.

    Raises:
        DriverError: not this memory (a mapped file of a disk, say), or no more of it.
    """
    flags = _REGISTER_PORTABLE | _REGISTER_MAPPED
    with on(device):
        _call(
            "cuMemHostRegister_v2",
            address,
            nbytes,
            flags if writable else flags | _REGISTER_READ_ONLY,
        )


def host_unregister(device: int, address: int) -> None:
    with on(device):
        _call("cuMemHostUnregister", address)


def copy(device: int, into: int, out_of: int, nbytes: int, stream: int) -> None:
    """Queue a copy on a stream, from anywhere to anywhere."""
    with on(device):
        _call("cuMemcpyAsync", into, out_of, nbytes, stream)


def copy_rows(
    device: int,
    into: int,
    into_pitch: int,
    out_of: int,
    out_of_pitch: int,
    width: int,
    count: int,
    stream: int,
) -> None:
    """Queue ``count`` copies of ``width`` bytes at the distances of the pitches."""
    what = _Copy2D(
        out_of_type=_UNIFIED,
        out_of=out_of,
        out_of_pitch=out_of_pitch,
        into_type=_UNIFIED,
        into=into,
        into_pitch=into_pitch,
        width=width,
        height=count,
    )
    with on(device):
        _call("cuMemcpy2DAsync_v2", ctypes.byref(what), stream)


def allocate(device: int, nbytes: int) -> int:
    """Memory of ``cuMemAlloc``, which torch knows nothing of; until :func:`free`.

    Raises:
        DriverError: there is too little.
    """
    address = _pointer()
    with on(device):
        _call("cuMemAlloc_v2", ctypes.byref(address), nbytes)
    return address.value or 0


def free(device: int, address: int) -> None:
    with on(device):
        _call("cuMemFree_v2", address)


def allocation(device: int, address: int) -> tuple[int, int]:
    """Where the allocation begins that an address lies in, and how many bytes it has."""
    base, size = _pointer(), _size()
    with on(device):
        _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
    return base.value, size.value


def allocation_serials(device: int, addresses: Iterable[int]) -> list[int | None]:
    """Numbers that the allocations of addresses have, and no others of this process ever have.

    None: no memory is there any more.
    """
    serial = ctypes.c_uint64()
    attribute, into = _library().cuPointerGetAttribute, ctypes.byref(serial)
    with on(device):
        return [
            None if attribute(into, _BUFFER_ID, address) else serial.value for address in addresses
        ]


def ipc_handle(device: int, address: int) -> bytes:
    """64 bytes by which another process of this host can map the allocation of an address.

    Raises:
        DriverError: it is no memory of ``cuMemAlloc`` (torch's expandable segments are not).
    """
    handle = _IpcHandle()
    with on(device):
        _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
    return bytes(handle.reserved)


def ipc_open(device: int, handle: bytes) -> int:
    """Map another process's allocation; returns where it begins here.

    Raises:
        DriverError: it is gone, on another GPU, or of this very process.
    """
    address = _pointer()
    given = _IpcHandle((ctypes.c_ubyte * 64)(*handle))
    with on(device):
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, _IPC_LAZY_PEER_ACCESS)
    return address.value or 0


def ipc_close(device: int, address: int) -> None:
    with on(device):
        _call("cuIpcCloseMemHandle", address)
