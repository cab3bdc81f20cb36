"""A version's bytes on their way from host memory into a device's: kept there, or passed through.

They cross the bus in windows of 64 MiB, and are digested where they arrive, whole chunks at a time.
A rank that needs only parts of chunks has them digested by the processor before.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from xxhash import xxh3_64_intdigest

from weightsync.chunks import CHUNK, Copier, Digests, Geometry
from weightsync.deadline import Deadline
from weightsync.device import Device, Lane, Mark, Moves, settle
from weightsync.errors import DeadlineError
from weightsync.selection import Block, Selection, cut
from weightsync.tensors import Addresses
from weightsync.transport import Arriving, Memory
from weightsync.version import Version

WINDOW = 64 * CHUNK

_BUFFERS = 3

_QUEUED = 6
"""Windows. What has been queued is waited for, whatever happens: a few milliseconds."""

_LOOK = 0.0005
"""Seconds between two looks at a version that is being written."""


class _Arrived:
    """The digests of what has arrived in a device's memory, chunk by chunk.

    The last chunk, if it is not a whole one, is brought back for that.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        self._nbytes, self._whole = nbytes, nbytes // CHUNK
        self._digests = torch.zeros(self._whole, dtype=torch.int64, device=device.place)
        self._tail = torch.empty(nbytes % CHUNK, dtype=torch.uint8)

    def digest(self, lane: Lane, address: int, begin: int, end: int) -> None:
        """Queue those of the bytes ``begin`` to ``end`` of the layout, which lie at an address."""
        first, last = begin // CHUNK, end // CHUNK
        if last > first:
            self._device.digests(lane, address, last - first, self._digests[first:last])
        if end == self._nbytes and len(self._tail):
            lane.copy(self._tail.data_ptr(), address + last * CHUNK - begin, len(self._tail))

    def wrong(self, expected: Digests | None) -> list[int]:
        """The chunks that differ from what they are to be, once nothing is queued any more."""
        if expected is None:
            return []
        found: Digests = self._digests.cpu().numpy().view(np.uint64)
        if len(self._tail):
            tail = np.array([xxh3_64_intdigest(self._tail.numpy().tobytes())], dtype=np.uint64)
            found = np.concatenate([found, tail])
        wrong: list[int] = np.flatnonzero(found != expected).tolist()
        return wrong


def _bytes(memory: Memory) -> memoryview:
    return memoryview((ctypes.c_ubyte * memory.nbytes).from_address(memory.address)).cast("B")


class _Way:
    """What crosses the bus for a selection, window by window, and how it is verified."""

    def __init__(self, device: Device, geometry: Geometry, selection: Selection) -> None:
        self.device, self.geometry, self.selection = device, geometry, selection
        self.windows = selection.windows(WINDOW)
        self.upto = [max(block.end for block in blocks) for blocks in self.windows]
        self.arrived = _Arrived(device, geometry.nbytes if selection.whole else 0)
        self._touched = _touched(selection, geometry.chunks)
        self._copier = Copier()
        weakref.finalize(self, self._copier.close)

    def bounds(self, window: int) -> tuple[int, int]:
        """Of a window, in the memory that keeps the selection."""
        begin = self.windows[window][0].place // WINDOW * WINDOW
        return begin, min(begin + WINDOW, self.selection.nbytes)

    def copy(self, lane: Lane, memory: Memory, window: int, base: int) -> None:
        """Queue a window's copies. ``base``: where the kept memory begins, or would begin."""
        for block in self.windows[window]:
            _copy(lane, block, base, memory.address)

    def digest(self, lane: Lane, window: int, base: int) -> None:
        if self.selection.whole:
            begin, end = self.bounds(window)
            self.arrived.digest(lane, base + begin, begin, end)

    def wrong(self, memory: Memory) -> list[int]:
        """The chunks that were digested where they arrived, and are not what they are to be."""
        return self.arrived.wrong(memory.digests) if self.selection.whole else []

    def require_right(self, memory: Memory) -> None:
        """Compare the chunks of which parts are kept, before any is.

        Raises:
            CorruptError: some are wrong.
        """
        if self.selection.whole or memory.digests is None:
            return
        # All of them: which of them other ranks need too, and verify, is not known here.
        touched: list[int] = self._touched.tolist()
        wrong = self._copier.verify(self.geometry, _bytes(memory), memory.digests, touched)
        if wrong:
            raise memory.wrong(wrong)


def _touched(selection: Selection, chunks: int) -> Addresses:
    """The chunks of which any byte is selected."""
    begun = np.bincount(selection.begin // CHUNK, minlength=chunks + 1)
    ended = np.bincount((selection.begin + selection.length - 1) // CHUNK + 1, minlength=chunks + 1)
    return np.flatnonzero(np.cumsum(begun - ended))


def _copy(lane: Lane, block: Block, base: int, source: int) -> None:
    into, out_of = base + block.place, source + block.begin
    if block.count == 1:
        lane.copy(into, out_of, block.width)
    else:
        lane.copy_rows(into, block.place_pitch, out_of, block.pitch, block.width, block.count)


class _Queue:
    """Windows that were queued: only so many at a time."""

    def __init__(self) -> None:
        self._marks: deque[Mark] = deque()

    def add(self, mark: Mark) -> None:
        """One more, which is done when the mark is. Waits for one of those before it."""
        self._marks.append(mark)
        if len(self._marks) > _QUEUED:
            self._marks.popleft().wait()


def _require_time(deadline: Deadline, done: int, of: int) -> None:
    if deadline.expired:
        raise DeadlineError(
            f"{done} of {of} windows had crossed the bus within {deadline.seconds:.1f} s"
        )


class Staging:
    """Device memory that holds one version, or parts of one that is on its way.

    Attributes:
        version: the one that is there, whole and verified; None: none is.
        attempt: of the write that all bytes there come from; 0: not known.

    Raises:
        NoRoomError: the device has too little room.
    """

    def __init__(self, device: Device, geometry: Geometry, selection: Selection) -> None:
        self._way = _Way(device, geometry, selection)
        self.buffer = device.empty(selection.nbytes)
        self.version: Version | None = None
        self.attempt = 0
        self._lane, self._digesting = device.lane(), device.lane()
        self._there = [False] * len(self._way.windows)
        self._ahead = True  # whether what is read ahead can be of use
        device.current().wait()  # the memory may have been another tensor's, still in use there

    @property
    def device(self) -> Device:
        return self._way.device

    def addresses(self, offsets: Addresses) -> Addresses:
        """Where bytes of the layout, which are among those selected, lie on the device."""
        return self._way.selection.places(offsets) + self.buffer.data_ptr()

    def follow(self, arriving: Arriving, give_up: Callable[[], bool]) -> bool:
        """Read a version while it is being written. False: not to its end, or of no use."""
        if not self._ahead:
            return False
        self._begin(arriving.attempt)
        arriving.memory.page_lock(self.device)
        queue = _Queue()
        try:
            for window, upto in enumerate(self._way.upto):
                if self._there[window]:
                    continue  # its sender stood still for a while
                while not give_up() and (written := arriving.written()) is not None:
                    if written >= upto:
                        break
                    time.sleep(_LOOK)
                else:
                    return False
                self._fetch(arriving.memory, window, queue)
            return True
        finally:
            settle(self._lane, self._digesting)

    def _begin(self, attempt: int) -> None:
        self.version = None
        if attempt == 0 or attempt != self.attempt:
            self._there = [False] * len(self._there)
        self.attempt = attempt

    def _fetch(self, memory: Memory, window: int, queue: _Queue) -> None:
        base = self.buffer.data_ptr()
        self._way.copy(self._lane, memory, window, base)
        self._digesting.after(self._lane.mark())
        self._way.digest(self._digesting, window, base)
        self._there[window] = True
        queue.add(self._digesting.mark())

    def take(self, memory: Memory, version: Version, deadline: Deadline) -> None:
        """Have a leased version here, and verified; what was read ahead of it is not read again.

        Parts of chunks are read now: those read ahead could be compared with nothing, so that how
        much was written would have to be believed.

        Raises:
            CorruptError: some chunks are not what they were. DeadlineError: it took too long.
        """
        self._ahead = self._way.selection.whole or memory.digests is None
        self._begin(memory.attempt if self._ahead else 0)
        memory.page_lock(self.device)
        self._way.require_right(memory)
        ahead = any(self._there)
        self._read(memory, deadline)
        wrong = self._way.wrong(memory)
        if wrong and ahead:
            for chunk in wrong:
                self._there[chunk * CHUNK // WINDOW] = False
            self._read(memory, deadline)
            wrong = self._way.wrong(memory)
        if wrong:
            self._begin(0)
            raise memory.wrong(wrong)
        self.version, self.attempt = version, memory.attempt

    def _read(self, memory: Memory, deadline: Deadline) -> None:
        queue = _Queue()
        try:
            for window, there in enumerate(self._there):
                if not there:
                    _require_time(deadline, window, len(self._there))
                    self._fetch(memory, window, queue)
        finally:
            settle(self._lane, self._digesting)


class Through:
    """Bytes of versions on their way to places of the device, with nothing kept in between.

    Args:
        into, offset, length: int64: addresses on the device, the layout's bytes that go there.

    Raises:
        NoRoomError: the device has too little room for a few windows.
    """

    def __init__(
        self,
        device: Device,
        geometry: Geometry,
        selection: Selection,
        into: Addresses,
        offset: Addresses,
        length: Addresses,
    ) -> None:
        self._way = _Way(device, geometry, selection)
        room, count = min(WINDOW, selection.nbytes), min(_BUFFERS, len(self._way.windows))
        self._buffers = [device.empty(room) for _ in range(count)]
        self._lane, self._work = device.lane(), device.lane()
        self._moves = self._moved(device, into, offset, length)
        device.current().wait()  # the memory may have been another tensor's, still in use there

    def _moved(
        self, device: Device, into: Addresses, offset: Addresses, length: Addresses
    ) -> list[Moves | None]:
        into, offset, length = into[length > 0], offset[length > 0], length[length > 0]
        order = np.argsort(offset, kind="stable")
        into, length = into[order], length[order]
        place = self._way.selection.places(offset[order])
        into, length, place = cut(into, length, place, WINDOW)
        number = place // WINDOW
        order = np.argsort(number, kind="stable")
        into, length, place, number = into[order], length[order], place[order], number[order]
        moves: list[Moves | None] = []
        for window in range(len(self._way.windows)):
            begin, _ = self._way.bounds(window)
            low, high = np.searchsorted(number, [begin // WINDOW, begin // WINDOW + 1])
            some = slice(int(low), int(high))
            found = None
            if high > low:
                found = device.moves(into[some], place[some] - begin, length[some])
            moves.append(found)
        return moves

    def run(self, memory: Memory, deadline: Deadline, verified: bool = False) -> None:
        """Bring a leased version to its places.

        Args:
            verified: its bytes were compared with their digests since they were leased.

        Raises:
            CorruptError, DeadlineError: as for :meth:`Staging.take`. Some or all of the places may
            have been written then.
        """
        way, device = self._way, self._way.device
        memory.page_lock(device)
        if not verified:
            way.require_right(memory)
        self._work.after(device.current().mark())
        free = [self._work.mark()] * len(self._buffers)
        queue = _Queue()
        try:
            for window, moves in enumerate(self._moves):
                _require_time(deadline, window, len(self._moves))
                which = window % len(self._buffers)
                self._lane.after(free[which])
                self._pass(memory, window, moves, self._buffers[which].data_ptr())
                free[which] = self._work.mark()
                queue.add(free[which])
        finally:
            settle(self._lane, self._work)
        wrong = [] if verified else way.wrong(memory)
        if wrong:
            raise memory.wrong(wrong)

    def _pass(self, memory: Memory, window: int, moves: Moves | None, buffer: int) -> None:
        base = buffer - self._way.bounds(window)[0]
        self._way.copy(self._lane, memory, window, base)
        self._work.after(self._lane.mark())
        if moves is not None:
            moves.run(self._work, buffer)
        if memory.digests is not None:
            self._way.digest(self._work, window, base)


def merged(
    into: Addresses, offset: Addresses, length: Addresses
) -> tuple[Addresses, Addresses, Addresses]:
    """The same copies, in the order of the layout, those that go on where one ends joined to it."""
    order = np.argsort(offset, kind="stable")
    into, offset, length = into[order], offset[order], length[order]
    joined = (into[1:] == into[:-1] + length[:-1]) & (offset[1:] == offset[:-1] + length[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~joined])) if len(into) else order
    if len(first) == 0:
        return into, offset, length
    return into[first], offset[first], np.add.reduceat(length, first)
