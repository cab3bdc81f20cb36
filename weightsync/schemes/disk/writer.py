"""Writing a version's files in blocks, from where the tensors lie, digested on the way.

A block is gathered in a buffer, which is small enough to stay in the cache, digested there, and
written with one call, past the page cache where the file system allows it: that is as fast as the
disk is, while written pages of the cache come to the disk late and in disorder. Blocks that come
from many tensors of a stream wait in their buffers until they are whole. When too many wait, the
longest untouched one is written as it is, and read back when more of it comes: so any order of a
stream works, and memory is bounded.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np
from xxhash import xxh3_64_intdigest

from weightsync.chunks import CHUNK, Addresses, Copier, Digests, Rows, move
from weightsync.deadline import Deadline
from weightsync.errors import DeadlineError, NoRoomError, WeightSyncError
from weightsync.files import FULL, Directory
from weightsync.schemes.disk.buffer import Buffer, Buffers
from weightsync.schemes.disk.layout import PAGE, Checkpoint, Shard

BLOCK = 4 * CHUNK
"""Bytes. What is written with one call."""

_WAITING = 8
"""Blocks that wait in memory for the rest of their bytes, at most."""


class Target:
    """A file that is being written.

    Args:
        direct: write past the page cache, if the file system lets us; into room that is allocated
            now. (Pages of the cache are written faster to room that the file system chooses last.)

    Raises:
        NoRoomError: there is too little room for it.
    """

    def __init__(self, directory: Directory, shard: Shard, direct: bool, durable: bool) -> None:
        self._durable = durable
        self.name = f"{directory.path}/{shard.name}"
        self.size = shard.size
        self._fd = directory.open_file(shard.name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        self._direct = direct and self._set_direct()
        try:
            with self._room():
                if self._direct:
                    # Direct writes are of whole pages: the last one is cut off in the end.
                    self._allocate(-(-shard.size // PAGE) * PAGE)
                else:
                    os.ftruncate(self._fd, shard.size)
        except BaseException:
            self.close()
            raise

    def _set_direct(self) -> bool:
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, os.O_DIRECT)
        except OSError:
            return False
        return True

    def _allocate(self, size: int) -> None:
        try:
            os.posix_fallocate(self._fd, 0, size)
        except OSError as error:
            # Where a file system cannot, the C library writes single bytes, which are no pages.
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            os.ftruncate(self._fd, size)

    def write(self, buffer: memoryview, offset: int) -> None:
        """Write whole pages at a multiple of a page."""
        with self._room():
            while len(buffer):
                try:
                    written = os.pwrite(self._fd, buffer, offset)
                except OSError as error:
                    if error.errno != errno.EINVAL or not self._direct:
                        raise
                    # This disk wants more than pages: from now on through the page cache.
                    self._direct = False
                    fcntl.fcntl(self._fd, fcntl.F_SETFL, 0)
                    continue
                if self._durable and not self._direct:
                    # Has the kernel begin to write, instead of leaving it all to the last moment.
                    os.posix_fadvise(self._fd, offset, written, os.POSIX_FADV_DONTNEED)
                buffer, offset = buffer[written:], offset + written

    def read(self, buffer: memoryview, offset: int) -> None:
        """Read back what was written."""
        while len(buffer):
            count = os.preadv(self._fd, [buffer], offset)
            if count == 0:
                raise OSError(errno.EIO, f"{self.name} ends at {offset}")
            buffer, offset = buffer[count:], offset + count

    def finish(self) -> None:
        """Give it its size, and have it on the disk if it is to be durable."""
        with self._room():
            os.ftruncate(self._fd, self.size)
            if self._durable:
                os.fsync(self._fd)

    @contextlib.contextmanager
    def _room(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in FULL:
                raise NoRoomError(
                    f"{self.name}: {error.strerror} for its {self.size:,} bytes"
                ) from None
            raise WeightSyncError(f"{self.name}: {error.strerror}") from error

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class _Blocks:
    """What each block of a version is, and which digests are of it.

    A version is addressed by *positions*: the bytes of its first file, then those of the next one,
    each beginning at a multiple of CHUNK.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        chunks = np.array([-(-shard.size // CHUNK) for shard in shards], dtype=np.int64)
        blocks = -(-chunks * CHUNK // BLOCK)
        self.first_chunk = np.concatenate([[0], np.cumsum(chunks)])
        self.first_block = np.concatenate([[0], np.cumsum(blocks)])
        self.count = int(self.first_block[-1])
        self.chunks = int(self.first_chunk[-1])
        self.shard = np.repeat(np.arange(len(shards)), blocks)
        self.offset = (np.arange(self.count) - self.first_block[self.shard]) * BLOCK
        self.position = self.first_chunk[self.shard] * CHUNK + self.offset
        sizes = np.array([shard.size for shard in shards], dtype=np.int64)
        self.length = np.minimum(BLOCK, sizes[self.shard] - self.offset)

    def at(self, positions: Addresses) -> Addresses:
        """The blocks in which positions lie."""
        found: Addresses = np.searchsorted(self.position, positions, side="right") - 1
        return found


class VersionWriter:
    """Fills the files of a version, in any order, and digests them.

    Args:
        targets: one for each shard.
        deadline: for each of the blocks; None: they may take as long as they take.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        targets: Sequence[Target],
        copier: Copier,
        deadline: Deadline | None = None,
    ) -> None:
        self._deadline = deadline
        layout = checkpoint.layout
        self._targets = targets
        self._headers = checkpoint.headers
        self._copier = copier
        self._blocks = blocks = _Blocks(layout.shards)
        self._starts: list[int] = blocks.position.tolist()
        count = len(layout.manifest.tensors)
        self._positions = np.zeros(count, dtype=np.int64)
        self._sizes = np.array([spec.nbytes for spec in layout.manifest.tensors], dtype=np.int64)
        for which, shard in enumerate(layout.shards):
            offsets = np.array([spec.offset for spec in shard.manifest.tensors], dtype=np.int64)
            start = blocks.first_chunk[which] * CHUNK
            self._positions[np.array(shard.tensors, dtype=np.int64)] = start + offsets
        self._left = blocks.length.copy()
        for which, header in enumerate(self._headers):
            first, last = int(blocks.first_block[which]), int(blocks.first_block[which + 1])
            covered = np.clip(len(header) - blocks.offset[first:last], 0, blocks.length[first:last])
            self._left[first:last] -= covered
        self._payload = self._left.copy()
        self._digests = np.zeros(blocks.chunks, dtype=np.uint64)
        self._written = np.zeros(blocks.count, dtype=bool)
        self._waiting: dict[int, Buffer] = {}
        self._spilled: set[int] = set()
        self._buffers = Buffers(BLOCK)

    @property
    def order(self) -> list[int]:
        """The tensors as they lie in the files: written so, no block waits for long."""
        found: list[int] = np.argsort(self._positions, kind="stable").tolist()
        return found

    def write(self, tensors: Sequence[int], addresses: Sequence[int] | Addresses) -> None:
        """Write whole tensors.

        Args:
            tensors: their indices in the manifest, each once in a version.
            addresses: where their contiguous bytes lie. The caller keeps them alive until this
                returns.
        """
        which = np.array(tensors, dtype=np.int64)
        self._write(self._positions[which], self._sizes[which], np.asarray(addresses, np.int64))

    def write_part(self, tensor: int, offset: int, nbytes: int, address: int) -> None:
        """Write some bytes of a tensor, beginning ``offset`` bytes after its own beginning."""
        position = int(self._positions[tensor]) + offset
        block = bisect_right(self._starts, position) - 1
        at = position - self._starts[block]
        if at + nbytes <= BLOCK and nbytes < self._payload[block]:  # a small one, of many perhaps
            buffer = self._take_in_turn(block)
            ctypes.memmove(buffer.address + at, address, nbytes)
            self._give_back(block, buffer, nbytes)
        else:
            one = (np.array([value], dtype=np.int64) for value in (position, nbytes, address))
            self._write(*one)

    def _write(self, positions: Addresses, sizes: Addresses, addresses: Addresses) -> None:
        order = np.argsort(positions, kind="stable")
        positions, sizes, addresses = positions[order], sizes[order], addresses[order]
        rows = Rows(positions, sizes)
        if len(rows.piece) == 0:
            return
        out_of = addresses[rows.piece] + rows.in_piece
        block_of_row = self._blocks.at(rows.in_slot)
        blocks, first_row = np.unique(block_of_row, return_index=True)
        bounds = [*first_row.tolist(), len(out_of)]
        into = rows.in_slot - self._blocks.position[block_of_row]
        given = np.add.reduceat(rows.length, first_row)
        numbers = blocks.tolist()

        def gather(index: int, buffer: Buffer) -> None:
            begin, end = bounds[index], bounds[index + 1]
            places = into[begin:end] + buffer.address
            move(places, out_of[begin:end], rows.length[begin:end], 0, end - begin, False)

        def work(whole_index: int) -> None:
            index = whole[whole_index]
            buffer = self._take(numbers[index])
            gather(index, buffer)
            self._complete(numbers[index], buffer)

        is_whole = given == self._payload[blocks]
        whole = np.flatnonzero(is_whole).tolist()
        self._copier.each(len(whole), work)
        for index in np.flatnonzero(~is_whole).tolist():
            block = numbers[index]
            buffer = self._take_in_turn(block)
            gather(index, buffer)
            self._give_back(block, buffer, given[index])

    def _take(self, block: int) -> Buffer:
        """A buffer that holds what a block has besides tensors: its part of a header."""
        buffer = self._buffers.take()
        offset = int(self._blocks.offset[block])
        header = self._headers[self._blocks.shard[block]][offset : offset + BLOCK]
        buffer.bytes[: len(header)] = header
        return buffer

    def _take_in_turn(self, block: int) -> Buffer:
        """A buffer for a block that is not whole yet; another one may have to make room for it."""
        waiting = self._waiting.pop(block, None)
        if waiting is not None:
            return waiting
        if len(self._waiting) >= _WAITING:
            longest = next(iter(self._waiting))
            spilled = self._waiting.pop(longest)
            self._put(longest, spilled)
            self._spilled.add(longest)
            self._buffers.give(spilled)
        buffer = self._take(block)
        if block in self._spilled:
            self._spilled.remove(block)
            self._targets[self._blocks.shard[block]].read(
                buffer.bytes[: self._pages(block)], int(self._blocks.offset[block])
            )
        return buffer

    def _give_back(self, block: int, buffer: Buffer, given: int) -> None:
        """Some bytes of a block have come: it is whole, or waits for more."""
        self._left[block] -= given
        if self._left[block] == 0:
            self._complete(block, buffer)
        else:
            self._waiting[block] = buffer

    def _complete(self, block: int, buffer: Buffer) -> None:
        """Digest and write a whole block."""
        length = int(self._blocks.length[block])
        chunk = int(self._blocks.position[block]) // CHUNK
        for begin in range(0, length, CHUNK):
            part = buffer.bytes[begin : min(begin + CHUNK, length)]
            self._digests[chunk + begin // CHUNK] = xxh3_64_intdigest(part)
        self._put(block, buffer)
        self._written[block] = True
        self._buffers.give(buffer)

    def _put(self, block: int, buffer: Buffer) -> None:
        target = self._targets[self._blocks.shard[block]]
        if self._deadline is not None and self._deadline.expired:
            raise DeadlineError(
                f"{target.name} was not written within {self._deadline.seconds:.1f} s"
            )
        target.write(buffer.bytes[: self._pages(block)], int(self._blocks.offset[block]))

    def _pages(self, block: int) -> int:
        return -(-int(self._blocks.length[block]) // PAGE) * PAGE

    def digests(self) -> Digests:
        """The digest of every chunk of every file, once every tensor was written."""
        for block in np.flatnonzero(~self._written).tolist():
            assert self._payload[block] == 0, "a tensor was not written"
            self._complete(block, self._take(block))  # nothing but header
        return self._digests
