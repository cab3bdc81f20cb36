"""Memory: cases G that need one process only."""

import gc
import os
import weakref

import pytest
import torch

import weightsync as ws
from tests.conftest import read

MIB = 1 << 20


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("two_passes", [False, True])
def test_g6_streamed_in_bounded_buckets(ends, dtype, two_passes):
    """G6: 200 tensors of 4 MiB, buckets of 16 MiB: never more than two buckets alive.

    All of it in a sixty-fourth of the size, for small machines.
    """
    size, bucket, count = 4 * MIB // 64, 16 * MIB // 64, 200
    alive = weakref.WeakSet()
    most = 0

    def stream():
        nonlocal most
        for number in range(count):
            tensor = torch.full((size // 4,), float(number))
            alive.add(tensor)
            most = max(most, sum(other.nbytes for other in alive))
            yield f"t{number}", tensor
            del tensor

    scheme = ends.scheme()
    entries = [(f"t{number}", dtype or torch.float32, (size // 4,)) for number in range(count)]
    manifest = None if two_passes else ws.Manifest.build(entries)
    sender = ends.sender(scheme=scheme, manifest=manifest, dtype=dtype if two_passes else None)
    sender.update_weights(stream if two_passes else stream(), version=1)
    assert 0 < most <= 2 * bucket
    assert not alive
    _, received = read(ends)
    for number in (0, 1, 57, count - 1):
        assert received[f"t{number}"].eq(number).all()


def test_g6_a_stream_of_larger_tensors(ends):
    """G6 at its own sizes, with fewer tensors."""
    alive = weakref.WeakSet()
    most = 0

    def stream():
        nonlocal most
        for number in range(16):
            tensor = torch.full((MIB,), float(number))
            alive.add(tensor)
            most = max(most, len(alive))
            yield f"t{number}", tensor
            del tensor

    sender = ends.sender(stream, scheme=ends.scheme())
    sender.update_weights(version=1)
    assert 1 <= most <= 2
    assert not alive


def test_weights_for_one_update_are_let_go(ends):
    """The sender keeps neither the mapping nor its tensors."""
    sender = ends.sender({"w": torch.zeros(5)})
    tensor = torch.ones(5)
    gone = weakref.ref(tensor)
    sender.update_weights({"w": tensor}, version=1)
    del tensor
    gc.collect()
    assert gone() is None


def test_a_replaced_parameter_is_let_go(ends):
    model, target = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    sender, receiver = ends.pair(model, target)
    sender.update_weights(version=1)
    receiver.poll_and_apply()
    gone = [weakref.ref(model.weight), weakref.ref(target.weight)]
    model.weight = torch.nn.Parameter(torch.ones(3, 3))
    target.weight = torch.nn.Parameter(torch.zeros(3, 3))
    sender.update_weights(version=2)
    receiver.poll_and_apply()
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def footprint(path):
    gc.collect()
    size = sum(
        os.stat(os.path.join(root, name)).st_blocks
        for root, _, names in os.walk(path)
        for name in names
    )
    with open("/proc/self/maps") as maps:
        mapped = sum(path in line for line in maps)
    return len(os.listdir("/proc/self/fd")), size, mapped


def test_g3_nothing_grows(ends):
    """G3 in small: descriptors, mappings and shared memory are flat over updates."""
    target = {"w": torch.zeros(1000)}
    sender, receiver = ends.pair({"w": torch.zeros(1000)}, target)
    seen = []
    for number in range(40):
        sender.update_weights({"w": torch.full((1000,), float(number))}, version=number)
        receiver.poll_and_apply()
        if number % 10 == 9:
            receiver.shutdown()
            receiver.connect()
            receiver.apply_weights()
            seen.append(footprint(ends.path))
    assert seen[1:] == [seen[1]] * 3


def test_g3_nothing_grows_when_the_model_changes(ends):
    """One generation for each manifest: those nobody reads are removed."""
    target = {"w": torch.zeros(10)}
    sender = ends.sender({})
    receiver = ends.receiver(target, strict=True, pad=True)
    seen = []
    for number in range(8):
        sender.update_weights({"w": torch.zeros(10 + number % 2)}, version=number)
        receiver.poll_and_apply()
        seen.append(footprint(ends.path))
    assert seen[4:6] == seen[6:8]
    assert len([name for name in os.listdir(ends.path) if name.startswith("generation-")]) <= 2


def test_g3_nothing_grows_when_updates_fail(ends):
    sender, receiver = ends.pair({"w": torch.zeros(10)}, {"other": torch.zeros(10)})
    seen = []
    for number in range(12):
        sender.update_weights(version=number)
        with pytest.raises(ws.MismatchError):
            receiver.poll_and_apply()
        with pytest.raises(ws.SourceError):
            sender.update_weights({"w": torch.zeros(3, device="meta")}, version=number + 1)
        seen.append(footprint(ends.path))
    assert seen[3:] == [seen[3]] * 9


def test_the_end_gives_everything_back(ends):
    gc.collect()
    before = footprint(ends.path)
    sender, receiver = ends.pair({"w": torch.ones(10)}, {"w": torch.zeros(10)})
    sender.update_weights(version=1)
    receiver.poll_and_apply()
    assert footprint(ends.path) > before
    ends.shutdown()
    del sender, receiver
    assert footprint(ends.path) == before
    assert not os.path.exists(ends.path)
