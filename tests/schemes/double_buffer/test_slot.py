"""One slot: allocation, mapping, views, and the copy with the one documented cast."""

import os

import pytest
import torch

from tests.conftest import assert_same
from weightsync.errors import NoRoomError, ProtocolError, SourceError
from weightsync.files import Directory
from weightsync.intake import copy_tensor
from weightsync.manifest import DTYPES, Manifest
from weightsync.schemes.double_buffer.slot import (
    PAGE,
    Slot,
    require_room,
    slot_size,
)


@pytest.fixture
def generation(run_dir):
    return Directory.open(run_dir, create=True)


def test_sizes_are_whole_pages():
    def size(nbytes):
        return slot_size(Manifest.build([("a", torch.uint8, (nbytes,))]))

    assert [size(n) for n in (0, 1, PAGE - 1, PAGE, PAGE + 1)] == [PAGE] * 4 + [2 * PAGE]
    assert slot_size(Manifest.build([])) == PAGE


def test_written_here_read_there(generation, run_dir):
    writer = Slot.create(generation, 0, 3 * PAGE)
    reader = Slot.open(generation, 0, 3 * PAGE)
    writer.bytes[5:8] = b"abc"
    assert bytes(reader.bytes[5:8]) == b"abc"
    assert reader.bytes.readonly
    with pytest.raises(TypeError):
        reader.bytes[0] = 1
    status = os.stat(f"{run_dir}/slot0.bin")
    assert status.st_size == 3 * PAGE
    assert status.st_blocks * 512 >= 3 * PAGE  # allocated, not sparse


@pytest.mark.parametrize("before", [0, 100, 3 * PAGE, 5 * PAGE])
def test_a_file_of_another_size_is_made_fit(generation, run_dir, before):
    generation.replace("slot0.bin", b"x" * before)
    Slot.create(generation, 0, 3 * PAGE)
    assert os.stat(f"{run_dir}/slot0.bin").st_size == 3 * PAGE


@pytest.mark.parametrize("size", [0, PAGE, 2 * PAGE - 1])
def test_a_short_file_is_an_error_and_no_bus_error(generation, size):
    generation.replace("slot0.bin", b"x" * size)
    with pytest.raises(ProtocolError, match=f"{size} bytes instead of {2 * PAGE}"):
        Slot.open(generation, 0, 2 * PAGE)


def test_a_missing_file(generation):
    with pytest.raises(FileNotFoundError):
        Slot.open(generation, 0, PAGE)


def test_no_room_for_the_buffer(generation):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(NoRoomError, match="bytes"):
        Slot.create(generation, 0, 1 << 45)
    assert len(os.listdir("/proc/self/fd")) == before


def test_room(generation):
    free = generation.free_bytes()
    require_room(generation, 1)
    with pytest.raises(NoRoomError, match="are free"):
        require_room(generation, 4 * free)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_views(generation, name):
    """Of every dtype, at any place, 0-dim and empty ones too: the very bytes of the slot."""
    entries = [
        ("before", torch.uint8, (3,)),
        ("matrix", DTYPES[name], (2, 3)),
        ("scalar", DTYPES[name], ()),
        ("empty", DTYPES[name], (0, 2)),
    ]
    manifest = Manifest.build(entries)
    writer = Slot.create(generation, 0, slot_size(manifest))
    for spec in manifest.tensors:
        view = writer.view(spec)
        assert (view.dtype, tuple(view.shape)) == (spec.dtype, spec.shape)
    spec = manifest.spec("matrix")
    writer.bytes[spec.offset : spec.offset + spec.nbytes] = b"\1" * spec.nbytes
    reader = Slot.open(generation, 0, slot_size(manifest))
    assert_same(reader.view(spec), writer.view(spec))


def test_the_mapping_outlives_the_file_and_the_slot(generation):
    manifest = Manifest.build([("a", torch.uint8, (9,))])
    slot = Slot.create(generation, 0, PAGE)
    slot.bytes[:3] = b"abc"
    view = slot.view(manifest.spec("a"))
    generation.remove("slot0.bin")
    del slot
    assert view[:3].tolist() == list(b"abc")


@pytest.mark.parametrize("name", ["int3", "uint7", "bits8", "float4_e2m1fn_x2", "bits16", "uint64"])
def test_strided_copies_of_odd_dtypes(name):
    dtype = DTYPES[name]
    raw = torch.arange(16 * dtype.itemsize, dtype=torch.uint8)
    into = torch.zeros(8 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    copy_tensor(into, raw.view(dtype)[::2], "w")
    expected = raw.view(16, dtype.itemsize)[::2].reshape(-1)
    assert into.view(torch.uint8).tolist() == expected.tolist()


def test_the_documented_cast():
    into = torch.zeros(3, dtype=torch.bfloat16)
    values = torch.tensor([1.0 + 2**-9, -0.0, 3e38], requires_grad=True)
    copy_tensor(into, values, "w")
    assert_same(into, values.detach().bfloat16())
    assert not into.requires_grad


def test_a_cast_that_does_not_exist():
    packed = torch.zeros(3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    with pytest.raises(SourceError, match=r"'w'.*float4_e2m1fn_x2.*bfloat16"):
        copy_tensor(torch.zeros(3, dtype=torch.bfloat16), packed, "w")
