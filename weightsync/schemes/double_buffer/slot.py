"""One slot: a file as long as the weights, mapped once and written in place for its whole life."""

from __future__ import annotations

import mmap
import os
import threading
import warnings
import weakref

import torch

from weightsync.device import Device, PageLock
from weightsync.errors import NoRoomError, ProtocolError
from weightsync.files import Directory
from weightsync.manifest import Manifest, ParamSpec
from weightsync.schemes.double_buffer import layout

PAGE = 4096


def slot_size(manifest: Manifest) -> int:
    """Bytes of a slot's file: whole pages, and at least one."""
    return max(PAGE, -(-manifest.nbytes // PAGE) * PAGE)


class Slot:
    """The mapping of one slot's bytes, and typed views into it."""

    def __init__(self, mapping: mmap.mmap, file: os.stat_result) -> None:
        self._file = file.st_dev, file.st_ino
        self.bytes = memoryview(mapping)
        self._locks: dict[str, PageLock | None] = {}
        self._locking = threading.Lock()
        with warnings.catch_warnings():
            # Readers' mappings are read-only on purpose; torch has no read-only tensors.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            self._tensor = torch.frombuffer(mapping, dtype=torch.uint8)

    @classmethod
    def create(cls, generation: Directory, number: int, size: int) -> Slot:
        """Open a slot for writing, with all its pages allocated and mapped.

        A first touch of fresh shared memory costs five to fifteen times a warm copy, and may kill
        the process where there is too little room: both are over and done with here.

        Raises:
            NoRoomError: there is too little room; says how much is missing.
        """
        fd = generation.open_file(layout.slot_bytes(number), os.O_RDWR | os.O_CREAT)
        try:
            status = os.fstat(fd)
            try:
                if status.st_size != size:
                    os.ftruncate(fd, size)
                os.posix_fallocate(fd, 0, size)
            except OSError as error:
                raise NoRoomError(
                    f"{generation.path}: {error.strerror} for a buffer of {size:,} bytes"
                ) from None
            populate = getattr(mmap, "MAP_POPULATE", 0)
            return cls(mmap.mmap(fd, size, flags=mmap.MAP_SHARED | populate), status)
        finally:
            os.close(fd)

    @classmethod
    def open(cls, generation: Directory, number: int, size: int, writable: bool = False) -> Slot:
        """Map a slot that another process made.

        Raises:
            FileNotFoundError: it is gone. ProtocolError: the file is shorter than its manifest.
            NoRoomError: there are not so many addresses.
        """
        name = layout.slot_bytes(number)
        fd = generation.open_file(name, os.O_RDWR if writable else os.O_RDONLY)
        try:
            status = os.fstat(fd)
            found = status.st_size
            if found < size:  # reading past its end would be a bus error
                raise ProtocolError(f"{generation.path}/{name}: {found} bytes instead of {size}")
            access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            try:
                mapping = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=access)
            except (OSError, OverflowError) as error:
                words = f"{size} bytes cannot be mapped: {error}"
                raise NoRoomError(f"{generation.path}/{name}: {words}") from None
            return cls(mapping, status)
        finally:
            os.close(fd)

    def is_file(self, generation: Directory, number: int) -> bool:
        """Whether this is the mapping of that very file, not of one that was there before."""
        fd = generation.open_file(layout.slot_bytes(number), os.O_RDONLY)
        try:
            status = os.fstat(fd)
        finally:
            os.close(fd)
        return self._file == (status.st_dev, status.st_ino)

    @property
    def address(self) -> int:
        return self._tensor.data_ptr()

    def page_lock(self, device: Device) -> bool:
        """Have copies between the slot and a device run at the speed of the bus, from now on.

        Takes seconds the first time; then it is so for all devices of the kind. False: it cannot
        be done.
        """
        kind = device.place.type
        with self._locking:
            if kind not in self._locks:
                lock = device.page_lock(self.address, len(self.bytes), not self.bytes.readonly)
                self._locks[kind] = lock
                if lock is not None:  # before the mapping goes
                    weakref.finalize(self, lock.release).atexit = False
            return self._locks[kind] is not None

    def offset(self, view: torch.Tensor) -> int:
        """Where a view of the slot begins, in bytes."""
        return view.data_ptr() - self._tensor.data_ptr()

    def view(self, spec: ParamSpec) -> torch.Tensor:
        """The tensor at its place in the slot."""
        flat = self._tensor[spec.offset : spec.offset + spec.nbytes]
        return flat.view(spec.dtype).view(spec.shape)


def require_room(directory: Directory, needed: int) -> None:
    """Refuse early, and with a number, what would fail half-way.

    Raises:
        NoRoomError: fewer than ``needed`` bytes are free on the file system.
    """
    free = directory.free_bytes()
    if free < needed:
        raise NoRoomError(
            f"{directory.path}: the buffers need {needed:,} more bytes, {free:,} are free "
            "(fewer slots=, a smaller dtype=, or another file system?)"
        )
