"""Blocks: any order, any pieces, direct or not, with little memory."""

import os
import random
from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.chunks import CHUNK, Copier
from weightsync.errors import NoRoomError
from weightsync.files import Directory
from weightsync.manifest import Manifest
from weightsync.schemes.disk import buffer
from weightsync.schemes.disk.layout import Checkpoint
from weightsync.schemes.disk.writer import BLOCK, Target, VersionWriter

COPIER = Copier(3)


class Written:
    """A version that is being written into a directory."""

    def __init__(self, path, sizes: Iterable[int], *, direct=False, shard_bytes=1 << 40):
        os.makedirs(path, exist_ok=True)
        manifest = Manifest.build((f"w{n}", torch.uint8, [s]) for n, s in enumerate(sizes))
        self.path = path
        self.tensors = [torch.randint(256, s.shape, dtype=s.dtype) for s in manifest.tensors]
        self.checkpoint = Checkpoint.plan(manifest, shard_bytes)
        self.directory = Directory.open(str(path))
        self.targets = [
            Target(self.directory, shard, direct, True) for shard in self.checkpoint.layout.shards
        ]
        self.writer = VersionWriter(self.checkpoint, self.targets, COPIER)

    def write(self, *tensors):
        self.writer.write(tensors, [self.tensors[n].data_ptr() for n in tensors])

    def check(self):
        """Finish, and compare the files with what they are to be."""
        digests = self.writer.digests()
        expected = []
        for which, shard in enumerate(self.checkpoint.layout.shards):
            self.targets[which].finish()
            self.targets[which].close()
            data = (self.path / shard.name).read_bytes()
            assert data == self.checkpoint.headers[which] + b"".join(
                self.tensors[n].numpy().tobytes() for n in shard.tensors
            )
            expected += [
                xxhash.xxh3_64_intdigest(data[begin : begin + CHUNK])
                for begin in range(0, len(data), CHUNK)
            ]
        assert digests.tolist() == expected


SIZES = [5, 0, CHUNK, 3 * CHUNK + 7, 1, BLOCK - 4096, 2 * BLOCK, 100, BLOCK + 1]


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("shard_bytes", [1 << 40, BLOCK, 1])
def test_all_at_once(tmp_path, direct, shard_bytes):
    made = Written(tmp_path, SIZES, direct=direct, shard_bytes=shard_bytes)
    made.write(*range(len(SIZES)))
    made.check()


@pytest.mark.parametrize("direct", [False, True])
def test_one_by_one_backwards(tmp_path, direct):
    made = Written(tmp_path, SIZES, direct=direct)
    for number in reversed(range(len(SIZES))):
        made.write(number)
    made.check()


def test_nothing_at_all(tmp_path):
    made = Written(tmp_path, [])
    made.check()


def test_empty_tensors_only(tmp_path):
    made = Written(tmp_path, [0, 0])
    made.write(1, 0)
    made.check()


@pytest.mark.parametrize("direct", [False, True])
def test_g6_blocks_that_wait_are_few_whatever_the_order(tmp_path, direct, monkeypatch):
    """Those that are pushed out come back when more of them is there."""
    made_buffers, real = [], buffer.Buffer
    monkeypatch.setattr(buffer, "Buffer", lambda size: made_buffers.append(size) or real(size))
    count = 60
    made = Written(tmp_path, [BLOCK // 2 + 1001] * count, direct=direct)
    order = list(range(0, count, 3)) + list(range(1, count, 3)) + list(range(2, count, 3))
    for number in order:
        made.write(number)
    made.check()
    assert 0 < sum(made_buffers) <= 64 << 20


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 3 * CHUNK), min_size=1, max_size=12),
    seed=st.integers(0, 1 << 30),
    direct=st.booleans(),
)
def test_any_pieces_in_any_order(tmp_path_factory, sizes, seed, direct):
    path = tmp_path_factory.mktemp("version")
    chance = random.Random(seed)
    made = Written(path, sizes, direct=direct, shard_bytes=chance.choice([1, CHUNK, 1 << 40]))
    pieces = []
    for number, size in enumerate(sizes):
        cuts = sorted({0, size, *(chance.randint(0, size) for _ in range(chance.randint(0, 3)))})
        pieces += [(number, begin, end - begin) for begin, end in pairwise(cuts)]
    chance.shuffle(pieces)
    for number, begin, nbytes in pieces:
        address = made.tensors[number].data_ptr() + begin
        made.writer.write_part(number, begin, nbytes, address)
    made.check()


def test_a_disk_that_wants_more_than_pages_is_written_through_the_cache(tmp_path, monkeypatch):
    made = Written(tmp_path, [3 * CHUNK] * 4, direct=True)
    real, refused = os.pwrite, []

    def pwrite(fd, data, offset):
        import fcntl

        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(offset)
            raise OSError(22, "Invalid argument")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    made.write(*range(4))
    made.check()
    assert refused


def test_short_writes_go_on_where_they_stopped(tmp_path, monkeypatch):
    made = Written(tmp_path, [3 * CHUNK] * 4)
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[: 4096 * 7], at))
    made.write(*range(4))
    made.check()


def test_a_disk_that_is_full(tmp_path, monkeypatch):
    made = Written(tmp_path, [3 * CHUNK] * 4)

    def full(fd, data, offset):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(NoRoomError, match=r"model\.safetensors.*No space left"):
        made.write(*range(4))


def test_tensors_that_come_from_the_middle_of_others(tmp_path):
    made = Written(tmp_path, [3 * CHUNK + 1] * 3)
    whole = torch.randint(256, (3, 3 * CHUNK + 1), dtype=torch.uint8)
    made.tensors = list(whole)
    made.write(2, 0, 1)
    made.check()
    assert np.array_equal(whole[1].numpy(), made.tensors[1].numpy())
