"""A version on disk as its readers see it: leased, and read through the page cache.

What is copied or verified is read with calls, not through a mapping: a file that somebody cut off
is then an error, not a bus error. Only views of single tensors are mapped.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from xxhash import xxh3_64_intdigest

from weightsync.chunks import CHUNK, Addresses, Copier, Digests, move
from weightsync.errors import CorruptError, WeightSyncError
from weightsync.files import Directory, Lock
from weightsync.intake import copy_tensor
from weightsync.schemes.disk import names
from weightsync.schemes.disk.buffer import Buffers
from weightsync.schemes.disk.commit import Commit, digest_of
from weightsync.schemes.disk.layout import Layout, Shard
from weightsync.transport import Snapshot, Targets

_AT_ONCE = 4
"""Chunks that are read with one call: from then on a disk is as fast as it can be."""


class DiskSnapshot(Snapshot):
    """A shared kernel lock on a version, and its files.

    Args:
        verified: compare with digests.
        lease: held; this object releases it when it is closed.

    Raises:
        CorruptError, ProtocolError: the files are not what was written.
    """

    def __init__(
        self,
        directory: Directory,
        commit: Commit,
        layout: Layout,
        lease: Lock,
        copier: Copier,
        verified: bool,
    ) -> None:
        self.version = commit.version
        self.manifest = layout.manifest
        self._layout = layout
        self._copier = copier
        self._lease = lease
        self._where = f"version {commit.version} in {directory.path}"
        for shard in layout.shards:  # before anything is made that is as large as they say
            _require_size(directory, shard)
        digests = self._digests(directory, commit)
        self._files: list[_File] = []
        begin = 0
        try:
            for shard in layout.shards:
                its = digests[begin : begin + shard.geometry.chunks]
                begin += shard.geometry.chunks
                self._files.append(_File(directory, shard, its if verified else None))
        except BaseException:
            self._close_files()
            raise

    def _digests(self, directory: Directory, commit: Commit) -> Digests:
        count = sum(-(-shard.size // CHUNK) for shard in self._layout.shards)
        data = directory.read(names.DIGESTS, count * 8)
        if len(data) == count * 8:
            digests: Digests = np.frombuffer(data, dtype="<u8").astype(np.uint64)
            if digest_of(self._layout.json, digests) == commit.digest:
                return digests
        raise CorruptError(f"{self._where}: its digests do not match its record")

    def tensor(self, name: str) -> torch.Tensor:
        self._require_open()
        tensor = self._layout.index[self.manifest.spec(name).name]
        which, index = self._layout.place[tensor]
        return self._files[which].view(index)

    def verify(self, names: Sequence[str] | None = None) -> None:
        self._require_open()
        wanted = None
        if names is not None:
            wanted = [
                self._layout.place[self._layout.index[self.manifest.spec(n).name]] for n in names
            ]
        wrong = []
        for which, file in enumerate(self._files):
            tensors = None if wanted is None else [i for w, i in wanted if w == which]
            wrong += file.verify(self._copier, tensors)
        self._refuse(wrong)

    def copy_into(self, targets: Targets) -> None:
        self._require_open()
        wrong = []
        for file in self._files:
            addresses = targets.addresses[np.array(file.shard.tensors, dtype=np.int64)]
            wrong += file.read(self._copier, addresses)
        self._refuse(wrong)
        for name, target in targets.others.items():
            # .data: also for modules built under inference_mode, which refuse copy_ outside it.
            copy_tensor(target.data, self.tensor(name), name)

    def _refuse(self, wrong: Sequence[str]) -> None:
        if wrong:
            raise CorruptError(
                f"{self._where}: bytes do not match their digests, or are missing, in "
                f"{len(wrong)} files: {'; '.join(wrong[:5])}"
            )

    def _require_open(self) -> None:
        if self._lease.released:
            raise WeightSyncError(f"{self._where}: the snapshot is closed")

    def close(self) -> None:
        self._close_files()
        self._lease.release()

    def _close_files(self) -> None:
        for file in self._files:
            file.close()


def _require_size(directory: Directory, shard: Shard) -> None:
    status = directory.status(shard.name)
    if status is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), shard.name)
    if stat.S_ISREG(status.st_mode) and status.st_size != shard.size:  # the rest is found later
        name = f"{directory.path}/{shard.name}"
        raise CorruptError(f"{name} has {status.st_size} bytes instead of {shard.size}")


class _File:
    """One shard, open for reading.

    Raises:
        CorruptError: it is not as long as it was.
    """

    def __init__(self, directory: Directory, shard: Shard, digests: Digests | None) -> None:
        self.shard = shard
        self._name = f"{directory.path}/{shard.name}"
        self._digests = None if digests is None else digests.tolist()
        self._mapped: torch.Tensor | None = None
        self._fd = directory.open_file(shard.name, os.O_RDONLY)
        found = os.fstat(self._fd).st_size
        if found != shard.size:
            self.close()
            raise CorruptError(f"{self._name} has {found} bytes instead of {shard.size}")

    def view(self, index: int) -> torch.Tensor:
        if self._mapped is None:
            mapping = mmap.mmap(self._fd, self.shard.size, mmap.MAP_SHARED, mmap.PROT_READ)
            with warnings.catch_warnings():
                # Readers' mappings are read-only on purpose; torch has no read-only tensors.
                warnings.filterwarnings("ignore", message="The given buffer is not writable")
                self._mapped = torch.frombuffer(mapping, dtype=torch.uint8)
        spec = self.shard.manifest.tensors[index]
        flat = self._mapped[spec.offset : spec.offset + spec.nbytes]
        return flat.view(spec.dtype).view(spec.shape)

    def verify(self, copier: Copier, tensors: Sequence[int] | None) -> list[str]:
        """What is wrong with the chunks in which some tensors lie (None: all); empty if nothing."""
        if self._digests is None:
            return []
        geometry = self.shard.geometry
        chunks = np.ones(geometry.chunks, dtype=bool)
        if tensors is not None:
            chunks[:] = False
            chunks[[chunk for tensor in tensors for chunk in geometry.chunks_of(tensor)]] = True
        return self._each_chunk(copier, chunks, lambda chunk, address: None)

    def read(self, copier: Copier, targets: Addresses) -> list[str]:
        """Copy tensors to addresses (0: leave it out), each chunk after its digest was found right.

        Returns:
            What is wrong; empty if nothing is.
        """
        geometry = self.shard.geometry
        rows = geometry.rows
        wanted = targets[rows.piece]
        into = wanted + rows.in_piece
        in_chunk = rows.in_slot % CHUNK
        row_of_chunk = geometry.row_of_chunk.tolist()
        chunks = np.zeros(geometry.chunks, dtype=bool)
        chunks[rows.in_slot[wanted != 0] // CHUNK] = True

        def copy(chunk: int, address: int) -> None:
            begin, end = row_of_chunk[chunk], row_of_chunk[chunk + 1]
            out_of = np.where(wanted[begin:end] != 0, in_chunk[begin:end] + address, 0)
            move(into[begin:end], out_of, rows.length[begin:end], 0, end - begin, True)

        return self._each_chunk(copier, chunks, copy)

    def _each_chunk(
        self, copier: Copier, chosen: npt.NDArray[np.bool_], use: Callable[[int, int], None]
    ) -> list[str]:
        """Read chunks, several neighbours with one call, and use those that are right.

        Args:
            use: called with a chunk, and the address it was read to.

        Returns:
            What is wrong; empty if nothing is.
        """
        digests, bounds = self._digests, self.shard.geometry.bounds
        blocks = np.unique(np.flatnonzero(chosen) // _AT_ONCE).tolist()
        buffers = Buffers(_AT_ONCE * CHUNK)
        wrong: list[int] = []

        def work(index: int) -> None:
            first = blocks[index] * _AT_ONCE
            chunks = [c for c in range(first, first + _AT_ONCE) if c < len(chosen) and chosen[c]]
            start = bounds(chunks[0])[0]
            buffer = buffers.take()
            there = start + self._read(buffer.bytes[: bounds(chunks[-1])[1] - start], start)
            for chunk in chunks:
                begin, end = bounds(chunk)
                part = buffer.bytes[begin - start : end - start]
                if end > there or (digests and xxh3_64_intdigest(part) != digests[chunk]):
                    wrong.append(chunk)
                else:
                    use(chunk, buffer.address + begin - start)
            buffers.give(buffer)

        copier.each(len(blocks), work)
        return self._words(sorted(wrong))

    def _read(self, into: memoryview, offset: int) -> int:
        """How many bytes there were: fewer if the file was cut off since it was opened."""
        count = 0
        while count < len(into) and (more := os.preadv(self._fd, [into[count:]], offset + count)):
            count += more
        return count

    def _words(self, wrong: Sequence[int]) -> list[str]:
        if not wrong:
            return []
        tensors = self.shard.geometry.tensors_in(wrong)
        named = ", ".join(repr(self.shard.manifest.tensors[n].name) for n in tensors[:5])
        return [
            f"{self.shard.name}: {len(wrong)} chunks, in which {len(tensors)} tensors lie: {named}"
        ]

    def close(self) -> None:
        self._mapped = None  # views keep their memory
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
