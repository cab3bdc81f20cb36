"""Tests of the GPU's kernels, for a process in which Triton interprets: see test_kernels.py."""

import numpy as np
import pytest
import torch
from xxhash import xxh3_64_intdigest

from weightsync.chunks import CHUNK
from weightsync.errors import NoRoomError


@pytest.fixture
def kernels(monkeypatch):
    from weightsync.device import kernels

    monkeypatch.setattr(kernels, "_full", set())
    return kernels


def digests_are_right(kernels, count):
    """Also that nothing beside them is written."""
    data = torch.randint(0, 256, (count * CHUNK + 256,), dtype=torch.uint8)
    begin = -data.data_ptr() % 256 + 16
    found = torch.full((count + 2,), 7, dtype=torch.int64)
    kernels.digest_chunks(data.data_ptr() + begin, count, found[1 : count + 1])
    chunks = data[begin : begin + count * CHUNK].numpy().reshape(count, CHUNK)
    wanted = [7, *(xxh3_64_intdigest(chunk) for chunk in chunks), 7]
    return found.numpy().view(np.uint64).tolist() == wanted


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5])
def test_digests_around_what_is_made_at_a_time(kernels, monkeypatch, count):
    monkeypatch.setattr(kernels, "_SLICE", 2)
    assert digests_are_right(kernels, count)


def test_digests_by_fewer_programs_than_there_are_tiles(kernels, monkeypatch):
    monkeypatch.setattr(kernels, "_FEW", 3)
    assert digests_are_right(kernels, 2)


def full_from(monkeypatch, kernels, chunks):
    """As many chunks' sums have no room; returns how many were asked for, each time."""
    asked, sums = [], kernels._sums

    def none_left(wanted, device):
        asked.append(wanted)
        if wanted >= chunks:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return sums(wanted, device)

    monkeypatch.setattr(kernels, "_sums", none_left)
    return asked


def test_a_gpu_that_is_full_makes_them_in_less_memory(kernels, monkeypatch):
    monkeypatch.setattr(kernels, "_SHORT", 2)
    asked = full_from(monkeypatch, kernels, 3)
    assert digests_are_right(kernels, 5)
    assert digests_are_right(kernels, 3)
    assert asked == [5, 2, 2]


def test_one_without_any_room_says_so(kernels, monkeypatch):
    full_from(monkeypatch, kernels, 1)
    with pytest.raises(NoRoomError, match="no room"):
        digests_are_right(kernels, 3)


@pytest.mark.parametrize("unit", [1, 16])
@pytest.mark.parametrize("gentle", [False, True])
@pytest.mark.parametrize("relative", [False, True])
def test_many_copies_are_done_as_one(kernels, monkeypatch, unit, gentle, relative):
    monkeypatch.setattr(kernels, "_FEW", 3)
    generator = np.random.default_rng(unit)
    length = generator.integers(0, 5000 // unit, 20) * unit
    length[7], length[8] = kernels._LONGEST * 2 + 5 * unit, 0
    order = generator.permutation(len(length))
    out_of = np.cumsum(length) - length
    into = np.empty_like(out_of)
    into[order] = np.cumsum(length[order]) - length[order]
    source = torch.randint(0, 256, (int(length.sum()),), dtype=torch.uint8)
    target = torch.zeros_like(source)
    base = source.data_ptr() if relative else 0
    table = into + target.data_ptr(), out_of + source.data_ptr() - base, length
    kernels.GPUMoves(source.device, *table, gentle).run_on_current(base)
    wanted = torch.zeros_like(source)
    for to, at, size in zip(into, out_of, length, strict=True):
        wanted[to : to + size] = source[at : at + size]
    assert target.equal(wanted)


@pytest.mark.parametrize("gentle", [False, True])
def test_gentle_copies_are_a_few_programs(kernels, monkeypatch, gentle):
    grids = []

    class Recording:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *arguments, **constants: None

    monkeypatch.setattr(kernels, "_move", Recording())
    rows = np.arange(1, 101) * 64
    kernels.GPUMoves(torch.device("cpu"), rows, rows, rows * 0 + 16, gentle).run_on_current(0)
    assert grids == [(kernels._FEW if gentle else 100,)]


def test_all_forms_of_the_copies_are_compiled_at_the_start(kernels, monkeypatch):
    """Whether words or bytes; whether the base is an address, or none and so a smaller type."""
    forms = set()

    class Recording:
        def __getitem__(self, grid):
            return lambda table, rows, base, BYTES, **_: forms.add((BYTES, base >= 1 << 31))

    monkeypatch.setattr(kernels, "_move", Recording())
    kernels.compile_moves(torch.device("cpu"))
    assert forms == {(16, False), (16, True), (1, False), (1, True)}
