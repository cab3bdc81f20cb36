"""Tensors of a device on their way into a slot: every byte and every digest, whatever lies where.

The device is the processor here; its tensors are taken for a GPU's.
"""

import random

import numpy as np
import pytest
import torch

from weightsync import download
from weightsync.chunks import CHUNK, Copier, Geometry, SlotWriter
from weightsync.device import device_of
from weightsync.download import Download, Packer
from weightsync.source import SourceOptions, as_source

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn]


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(download, "WINDOW", 2 * CHUNK)


def some_weights(seed, count=40):
    random.seed(seed)
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for number in range(count):
        rows = random.choice([0, 1, 3, 17, 1000, 3000])
        tensor = torch.randn(rows, random.randint(1, 600), generator=generator)
        tensor = tensor.to(random.choice(DTYPES))
        made[f"t{number}"] = tensor.t() if random.random() < 0.2 and rows else tensor
    made["scalar"] = torch.tensor(1.5)
    return made


def expected(inventory):
    """The slot and its digests, written by the processor."""
    manifest, geometry = inventory.manifest, Geometry(inventory.manifest)
    slot = torch.zeros(manifest.nbytes, dtype=torch.uint8)
    for spec, value in zip(manifest.tensors, inventory.values, strict=True):
        place = slot[spec.offset : spec.offset + spec.nbytes].view(spec.dtype).view(spec.shape)
        place.copy_(value)
    writer = SlotWriter(geometry, memoryview(slot.numpy()), Copier())
    return slot, writer.digests()


def target(manifest):
    slot = torch.zeros(manifest.nbytes, dtype=torch.uint8)
    geometry = Geometry(manifest)
    return slot, geometry, SlotWriter(geometry, memoryview(slot.numpy()), Copier())


def of(inventory):
    return Download(device_of(torch.device("cpu")), inventory.manifest.nbytes)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("seed", range(4))
def test_resident_tensors_arrive_with_their_digests(seed, dtype):
    source = as_source(some_weights(seed), SourceOptions(dtype))
    inventory = source.inventory()
    wanted, digests = expected(inventory)
    slot, geometry, writer = target(inventory.manifest)
    sent, seen = of(inventory), []
    for _ in range(2):  # the second time by what was found out the first
        slot.fill_(77)
        with sent.flow(geometry, slot.data_ptr(), writer, seen.append) as flow:
            sent.write(inventory, geometry, flow, range(len(inventory.values)))
        assert slot.equal(wanted)
        assert (writer.digests() == digests).all()
        assert sorted(seen) == seen
        assert seen[-1] == inventory.manifest.nbytes
        seen.clear()
        inventory = source.inventory()


def test_a_tensor_that_has_moved_is_found_at_its_new_place():
    weights = some_weights(9)
    source = as_source(weights)
    sent = of(source.inventory())
    for number in range(3):
        inventory = source.inventory()
        wanted, _ = expected(inventory)
        slot, geometry, writer = target(inventory.manifest)
        with sent.flow(geometry, slot.data_ptr(), writer, lambda upto: None) as flow:
            sent.write(inventory, geometry, flow, range(len(inventory.values)))
        assert slot.equal(wanted)
        name = "t3"
        weights[name] = torch.full_like(weights[name], number)


@pytest.mark.parametrize("seed", range(3))
def test_tensors_of_others_in_between_are_left_alone(seed):
    inventory = as_source(some_weights(seed)).inventory()
    wanted, digests = expected(inventory)
    slot, geometry, writer = target(inventory.manifest)
    random.seed(seed)
    numbers = range(len(inventory.values))
    mine = sorted(random.sample(numbers, len(numbers) // 2))
    others = [number for number in numbers if number not in mine]
    keep = [inventory.values[number].contiguous() for number in others]
    writer.write(others, [tensor.data_ptr() if tensor.numel() else 0 for tensor in keep])
    sent = of(inventory)
    with sent.flow(geometry, slot.data_ptr(), writer, lambda upto: None) as flow:
        sent.write(inventory, geometry, flow, mine)
    assert slot.equal(wanted)
    assert (writer.digests() == digests).all()


@pytest.mark.parametrize("order", ["as sent", "any"])
@pytest.mark.parametrize("seed", range(3))
def test_a_stream_arrives_although_its_memory_is_used_again(seed, order):
    inventory = as_source(some_weights(seed)).inventory()
    wanted, digests = expected(inventory)
    slot, geometry, writer = target(inventory.manifest)
    specs = inventory.manifest.tensors
    numbers = list(range(len(specs)))
    if order == "any":
        random.Random(seed).shuffle(numbers)
    sent = of(inventory)
    with sent.flow(geometry, slot.data_ptr(), writer, lambda upto: None) as flow:
        packer = Packer(flow, geometry)
        for number in numbers:
            tensor = inventory.values[number].clone()
            if specs[number].nbytes:
                packer.put(number, specs[number], tensor)
            tensor.zero_()
        packer.flush()
    assert slot.equal(wanted)
    assert (writer.digests() == digests).all()


def test_a_tensor_that_cannot_be_converted_stops_it_and_leaves_nothing_under_way():
    inventory = as_source({"a": torch.randn(3000, 300), "b": torch.randn(40)}).inventory()
    slot, geometry, writer = target(inventory.manifest)
    sent = of(inventory)
    broken = list(inventory.values)
    broken[1] = torch.zeros(40, dtype=torch.complex64)[::1].conj()[:39]
    object.__setattr__(inventory, "values", broken)
    with (
        pytest.raises(RuntimeError),
        sent.flow(geometry, slot.data_ptr(), writer, lambda upto: None) as flow,
    ):
        sent.write(inventory, geometry, flow, [0, 1])
    assert np.count_nonzero(slot.numpy())
