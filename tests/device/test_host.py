"""The processor as a device: what a GPU must do too, and what tests run on without one."""

import numpy as np
import pytest
import torch
from xxhash import xxh3_64_intdigest

from weightsync.chunks import CHUNK
from weightsync.device import device_of
from weightsync.device.device import split


@pytest.fixture
def device():
    return device_of(torch.device("cpu"))


def test_there_is_one_object_for_a_device(device):
    assert device_of(torch.zeros(1)) is device


def test_digests_are_those_of_whole_chunks(device):
    data = torch.randint(0, 256, (3 * CHUNK,), dtype=torch.uint8)
    found = torch.zeros(3, dtype=torch.int64)
    device.digests(device.lane(), data.data_ptr(), 3, found)
    wanted = [xxh3_64_intdigest(data[n * CHUNK : (n + 1) * CHUNK].numpy()) for n in range(3)]
    assert found.numpy().view(np.uint64).tolist() == wanted


def test_many_copies_are_done_as_one(device):
    generator = np.random.default_rng(1)
    length = generator.integers(0, 5000, 400)
    length[7], length[8] = 3 << 20, 0
    order = generator.permutation(len(length))
    out_of = np.cumsum(length) - length
    into = np.empty_like(out_of)
    into[order] = np.cumsum(length[order]) - length[order]
    source = torch.randint(0, 256, (int(length.sum()),), dtype=torch.uint8)
    target = device.empty(len(source))
    moves = device.moves(into + target.data_ptr(), out_of, length)
    moves.run(device.current(), source.data_ptr())
    for to, at, size in zip(into, out_of, length, strict=True):
        assert target[to : to + size].equal(source[at : at + size])


def test_copies_are_split_into_parts_of_a_length():
    parts = split(np.array([100, 200, 300]), np.array([0, 50, 70]), np.array([5, 0, 12]), 5)
    assert [part.tolist() for part in parts] == [
        [100, 300, 305, 310],
        [0, 70, 75, 80],
        [5, 5, 5, 2],
    ]


def test_rows_are_copied_at_their_pitches(device):
    source = torch.arange(60, dtype=torch.uint8).reshape(6, 10)
    target = torch.zeros(6, 4, dtype=torch.uint8)
    lane = device.lane()
    lane.copy_rows(target.data_ptr(), 4, source.data_ptr() + 3, 10, 4, 6)
    lane.wait()
    assert target.equal(source[:, 3:7])
