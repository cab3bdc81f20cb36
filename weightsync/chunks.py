"""Copies between many tensors and one contiguous slot, with the digests made on the way.

A slot is cut into chunks of 1 MiB. A chunk that is part of one tensor is digested first, which
brings it into the cache, and then written past the cache; so it crosses the memory bus twice, once
in and once out, which is less than a plain ``copy_`` needs. A chunk of many small tensors is copied
first and digested where it lies. Torch is not needed here: tensors are addresses, and the slot is a
buffer.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Thread

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64, xxh3_64_intdigest

from weightsync.manifest import Manifest

CHUNK = 1 << 20
"""Bytes. What one thread digests and copies at a time, out of its core's cache."""

Addresses = npt.NDArray[np.int64]
Digests = npt.NDArray[np.uint64]

_FEW = 8
"""Up to so many pieces of a chunk are digested one by one where they come from."""

# The address space as a buffer: a slice of it is the memory between two addresses.
_MEMORY = memoryview((ctypes.c_ubyte * (1 << 62)).from_address(0)).cast("B")


def _move_slowly(
    into: Addresses, out_of: Addresses, length: Addresses, begin: int, end: int, stream: bool
) -> None:
    """What the compiled ``move`` does, for installations without a compiler."""
    for row in range(begin, end):
        if out_of[row]:
            ctypes.memmove(int(into[row]), int(out_of[row]), int(length[row]))


try:
    from weightsync._rows import move as move
except ImportError:
    move = _move_slowly


class Rows:
    """Pieces of a slot, cut at the borders of chunks: each row lies inside one of them.

    Attributes (int64, one entry per row):
        piece: which of the pieces it belongs to.
        in_slot, in_piece: where it begins. length: in bytes.
    """

    def __init__(self, offsets: Addresses, sizes: Addresses) -> None:
        first = offsets // CHUNK
        last = np.maximum(offsets + sizes - 1, offsets) // CHUNK
        rows = np.where(sizes > 0, last - first + 1, 0)
        self.of_piece = np.concatenate([[0], np.cumsum(rows)])
        self.piece = np.repeat(np.arange(len(sizes)), rows)
        chunk = first[self.piece] + np.arange(len(self.piece)) - self.of_piece[self.piece]
        begin = np.maximum(offsets[self.piece], chunk * CHUNK)
        end = np.minimum(offsets[self.piece] + sizes[self.piece], (chunk + 1) * CHUNK)
        self.in_slot = begin
        self.in_piece = begin - offsets[self.piece]
        self.length = end - begin


class Geometry:
    """Which bytes of which tensors each chunk of a slot holds. Computed once per manifest."""

    def __init__(self, manifest: Manifest) -> None:
        self.nbytes = manifest.nbytes
        self.chunks = -(-manifest.nbytes // CHUNK)
        self.offsets = np.array([spec.offset for spec in manifest.tensors], dtype=np.int64)
        self.sizes = np.array([spec.nbytes for spec in manifest.tensors], dtype=np.int64)
        self.first_chunk = self.offsets // CHUNK
        ends = np.maximum(self.offsets + self.sizes - 1, self.offsets)
        self.last_chunk = ends // CHUNK
        self.nonempty = self.sizes > 0
        self.rows = Rows(self.offsets, self.sizes)
        # Tensors ascend in the slot, so rows are already sorted by chunk.
        chunk = self.rows.in_slot // CHUNK
        self.row_of_chunk = np.searchsorted(chunk, np.arange(self.chunks + 1))
        self.payload = np.bincount(chunk, self.rows.length, self.chunks).astype(np.int64)
        """For each chunk, how many of its bytes belong to tensors."""

    def bounds(self, chunk: int) -> tuple[int, int]:
        return chunk * CHUNK, min((chunk + 1) * CHUNK, self.nbytes)

    def chunks_of(self, tensor: int) -> range:
        """The chunks that hold any byte of a tensor (by its index in the manifest)."""
        if not self.nonempty[tensor]:
            return range(0)
        return range(int(self.first_chunk[tensor]), int(self.last_chunk[tensor]) + 1)

    def tensors_in(self, chunks: Sequence[int]) -> list[int]:
        """The indices of the tensors with a byte in any of these chunks."""
        flagged = np.zeros(self.chunks + 1, dtype=bool)
        flagged[list(chunks)] = True
        rows = flagged[self.rows.in_slot // CHUNK]
        return sorted(set(self.rows.piece[rows].tolist()))

    def changed(self, before: Digests, after: Digests) -> int:
        """How many tensors lie in chunks whose digests differ. An upper bound, exact at zero."""
        different = np.concatenate([[0], np.cumsum(before != after)])
        first, last = self.first_chunk[self.nonempty], self.last_chunk[self.nonempty]
        touched = different[last + 1] > different[first]
        return int(np.count_nonzero(touched))


class Copier:
    """A few threads that move chunks. One per publisher or subscriber; not shared.

    The threads are daemons and know nothing of the interpreter's end, so that they serve programs
    whose main thread has returned, too. A forked child has none of them and starts its own.
    """

    def __init__(self, threads: int | None = None) -> None:
        # Memory bandwidth is spent long before the cores are, on any machine with many of them.
        self.threads = threads or min(8, len(os.sched_getaffinity(0)))
        self._jobs: SimpleQueue[_Job | None] | None = None
        self._pid = 0

    def close(self) -> None:
        if self._jobs is not None and self._pid == os.getpid():
            for _ in range(self.threads - 1):
                self._jobs.put(None)
        self._jobs = None

    def each(self, count: int, work: Callable[[int], None]) -> None:
        """Call ``work(0) ... work(count - 1)``, spread over the threads as they get free.

        Whatever happens, an interrupt included, no thread is at work any more when this returns:
        the memory they write to may be somebody else's next.
        """
        job = _Job(count, work)
        if count >= 4 and self.threads > 1:
            if self._jobs is None or self._pid != os.getpid():
                self._jobs, self._pid = SimpleQueue(), os.getpid()
                for number in range(self.threads - 1):
                    name = f"weightsync copy {number}"
                    Thread(target=_serve, args=(self._jobs,), name=name, daemon=True).start()
            for _ in range(self.threads - 1):
                self._jobs.put(job)
        interrupt: KeyboardInterrupt | None = None
        try:
            job.take()
        finally:
            while True:
                try:
                    job.finish()
                    break
                except KeyboardInterrupt as error:
                    interrupt = error
        if interrupt is not None:
            raise interrupt
        if job.error is not None:
            raise job.error

    def read(
        self,
        geometry: Geometry,
        slot: memoryview,
        targets: Addresses,
        expected: Digests | None,
    ) -> list[int]:
        """Copy the slot into tensors, each chunk only after its digest was found right.

        Args:
            slot: readable, at least ``geometry.nbytes`` long.
            targets: for each tensor the address to write its bytes to, or 0 to leave it out.
            expected: the digests to compare with, or None not to.

        Returns:
            The chunks whose digest is wrong; nothing was copied out of those.
        """
        rows = geometry.rows
        wanted = targets[rows.piece]
        into = wanted + rows.in_piece
        out_of: Addresses = np.where(wanted != 0, rows.in_slot + _address(slot), 0)
        length = rows.length
        row_of_chunk = geometry.row_of_chunk.tolist()
        digests = None if expected is None else expected.tolist()
        wrong: list[int] = []

        def work(chunk: int) -> None:
            begin, end = geometry.bounds(chunk)
            if digests is not None and xxh3_64_intdigest(slot[begin:end]) != digests[chunk]:
                wrong.append(chunk)
            else:
                move(into, out_of, length, row_of_chunk[chunk], row_of_chunk[chunk + 1], True)

        self.each(geometry.chunks, work)
        return sorted(wrong)

    def verify(
        self, geometry: Geometry, slot: memoryview, expected: Digests, chunks: Sequence[int]
    ) -> list[int]:
        """The chunks among ``chunks`` whose digest is wrong."""
        wanted = expected.tolist()
        wrong: list[int] = []

        def work(index: int) -> None:
            begin, end = geometry.bounds(chunks[index])
            if xxh3_64_intdigest(slot[begin:end]) != wanted[chunks[index]]:
                wrong.append(chunks[index])

        self.each(len(chunks), work)
        return sorted(wrong)


class _Job:
    """Some numbered pieces of work, taken by several threads until none is left.

    Without locks: an interrupt could hit the calling thread just after it took one.
    """

    def __init__(self, count: int, work: Callable[[int], None]) -> None:
        self._count = count
        self._work = work
        self._numbers = itertools.count()  # next() on it is atomic, like append and pop of lists
        self._over = False
        self._helping: list[None] = []
        self.error: BaseException | None = None

    def take(self) -> None:
        """Work, until there are no more pieces or the job is over."""
        while not self._over and (number := next(self._numbers)) < self._count:
            self._work(number)

    def help(self) -> None:
        """Work in another thread than the one that waits in ``finish``."""
        self._helping.append(None)  # before looking whether it is over: finish sees one of the two
        try:
            self.take()
        except BaseException as error:
            self.error = self.error or error
            self._over = True
        finally:
            self._helping.pop()

    def finish(self) -> None:
        """Give out no more pieces, and wait for those in work: a few hundred microseconds."""
        self._over = True
        while self._helping:
            time.sleep(0.00005)
        # A thread that comes late finds the job over; until then the job must not hold buffers.
        self._work = _nothing


def _nothing(number: int) -> None:
    pass


def _serve(jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.help()
        del job  # it holds tensors


class SlotWriter:
    """Fills one slot with one version, all at once or bit by bit, and digests it.

    Several processes may fill one slot together, each its own bytes: every one digests the chunks
    that it wrote alone, and one of them the rest.
    """

    def __init__(self, geometry: Geometry, slot: memoryview, copier: Copier) -> None:
        self._geometry = geometry
        self._slot = slot
        self._copier = copier
        self._base = _address(slot)
        self._bytes_left = geometry.payload.copy()
        self._digests = np.zeros(geometry.chunks, dtype=np.uint64)
        self._digested = np.zeros(geometry.chunks, dtype=bool)

    @property
    def chunks(self) -> int:
        """How many the slot has."""
        return self._geometry.chunks

    def write_all(self, addresses: Addresses) -> None:
        """Copy every tensor in.

        Args:
            addresses: for each tensor, where its contiguous bytes lie, or 0 if they are in the
                slot already. The caller keeps them alive until this returns.
        """
        self._write(self._geometry.rows, addresses)

    def write(self, tensors: Sequence[int], addresses: Sequence[int] | Addresses) -> None:
        """Copy some tensors in.

        Args:
            tensors: their indices in the manifest, each at most once in a slot's life.
            addresses: as for ``write_all``, one for each.
        """
        which = np.array(tensors, dtype=np.int64)
        self.write_pieces(self._geometry.offsets[which], self._geometry.sizes[which], addresses)

    def write_pieces(
        self, offsets: Addresses, sizes: Addresses, addresses: Sequence[int] | Addresses
    ) -> None:
        """Copy any bytes of tensors in.

        Args:
            offsets, sizes: of the pieces in the slot, which do not overlap, in bytes.
            addresses: as for ``write_all``, one for each.
        """
        order = np.argsort(offsets, kind="stable")
        self._write(Rows(offsets[order], sizes[order]), np.asarray(addresses, np.int64)[order])

    def _write(self, rows: Rows, addresses: Addresses) -> None:
        geometry = self._geometry
        source = addresses[rows.piece]
        out_of: Addresses = np.where(source != 0, source + rows.in_piece, 0)
        into = rows.in_slot + self._base
        length = rows.length
        chunks, first_row = np.unique(rows.in_slot // CHUNK, return_index=True)
        bounds = [*first_row.tolist(), len(into)]
        if len(into) == 0:
            return
        given = np.add.reduceat(length, first_row)
        self._bytes_left[chunks] -= given
        complete = (self._bytes_left[chunks] == 0).tolist()
        numbers = chunks.tolist()
        # Chunks that come from here as a whole, in few pieces.
        pieces = np.diff(bounds)
        whole = given == geometry.payload[chunks]
        whole &= np.add.reduceat(out_of != 0, first_row) == pieces
        direct = (whole & (pieces <= _FEW)).tolist()

        def work(index: int) -> None:
            begin, end = bounds[index], bounds[index + 1]
            chunk = numbers[index]
            if direct[index]:
                self._digests[chunk] = self._digest_of_pieces(
                    chunk, into, out_of, length, begin, end
                )
                self._digested[chunk] = True
                move(into, out_of, length, begin, end, True)
            else:
                move(into, out_of, length, begin, end, False)
                if complete[index]:
                    self._digest(chunk)

        self._copier.each(len(numbers), work)

    def _digest_of_pieces(
        self,
        chunk: int,
        into: Addresses,
        out_of: Addresses,
        length: Addresses,
        begin: int,
        end: int,
    ) -> int:
        """What the digest of a chunk will be, read from where its pieces come from."""
        low, high = self._geometry.bounds(chunk)
        at, top = self._base + low, self._base + high
        state = xxh3_64()
        for row in range(begin, end):
            place, source = int(into[row]), int(out_of[row])
            if place > at:
                state.update(_MEMORY[at:place])  # padding
            size = int(length[row])
            state.update(_MEMORY[source : source + size])
            at = place + size
        if at < top:
            state.update(_MEMORY[at:top])
        return state.intdigest()

    def digested(self) -> tuple[Addresses, Digests]:
        """The chunks that are whole and digested by now, and their digests."""
        chunks = np.flatnonzero(self._digested)
        return chunks, self._digests[chunks]

    def adopt(self, chunks: Addresses, digests: Digests) -> None:
        """Take over what somebody else wrote and digested: another process, or a GPU."""
        self._digests[chunks] = digests
        self._digested[chunks] = True

    def digests(self) -> Digests:
        """The digest of every chunk, once every byte was written."""
        rest = np.flatnonzero(~self._digested).tolist()
        self._copier.each(len(rest), lambda index: self._digest(rest[index]))
        return self._digests

    def _digest(self, chunk: int) -> None:
        begin, end = self._geometry.bounds(chunk)
        self._digests[chunk] = xxh3_64_intdigest(self._slot[begin:end])
        self._digested[chunk] = True


def _address(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, dtype=np.uint8).__array_interface__["data"][0])
