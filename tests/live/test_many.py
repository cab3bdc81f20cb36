"""Very many tensors of every size, between processes."""

import torch

import weightsync as ws
from tests.conftest import assert_all_same
from tests.live.processes import (
    WAIT,
    end_receiver,
    end_sender,
    fill,
    publish,
    read_until,
    send_from,
    summary,
)

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float16, torch.bool)


def many(seed, count):
    """Tensors of random bytes: 0-dim, empty, odd sizes, and a few larger than a chunk."""
    sizes = torch.randint(0, 200, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    random = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (8 * sum(sizes) + 8,), generator=random, dtype=torch.uint8)
    weights = {}
    used = 0
    for number, size in enumerate(sizes):
        dtype = DTYPES[number % len(DTYPES)]
        shape = ((), (size,), (size, 1), (0, size), (2, size // 2))[number % 5]
        length = torch.Size(shape).numel() * dtype.itemsize
        part = data[used : used + length].clone()
        used += length
        if dtype is torch.bool:
            part &= 1
        weights[f"blocks.{number}.weight"] = part.view(dtype).view(shape)
    for number in range(3):
        large = torch.randint(0, 256, (1_500_001,), generator=random, dtype=torch.uint8)
        weights[f"large.{number}"] = large
    return weights


def send_many(state, scheme, count):
    state.weights = many(0, count)
    state.sender = scheme.create_sender(state.weights)
    state.sender.connect(WAIT, receivers=1)


def publish_many(state, seed, count):
    for name, tensor in many(seed, count).items():
        state.weights[name].view(-1).view(torch.uint8).copy_(tensor.view(-1).view(torch.uint8))
    return summary(state.sender.update_weights(version=seed, wait="applied"))


def receive_many(state, scheme, count):
    state.weights = {name: torch.zeros_like(tensor) for name, tensor in many(0, count).items()}
    state.receiver = scheme.create_receiver(state.weights, id="reader")
    state.receiver.connect(WAIT)


def compare_many(state, seed, count):
    report = state.receiver.poll_and_apply(WAIT)
    assert report.version.number == seed
    assert report.tensors == count + 3
    assert_all_same(state.weights, many(seed, count))
    return state.receiver.verify_weights().ok


def test_twenty_thousand_tensors(peer, run_dir):
    count = 20_000
    scheme = ws.DoubleBufferScheme(run_dir)
    writer, reader = peer(), peer()
    writer.start(send_many, scheme, count)
    reader.call(receive_many, scheme, count)
    writer.result()
    for seed in 1, 2:
        reader.start(compare_many, seed, count)
        report = writer.call(publish_many, seed, count)
        assert report.receivers == {"reader": ("applied", seed)}
        assert reader.result()
    reader.call(end_receiver)
    writer.call(end_sender)


def test_no_slot_of_many_tensors_is_torn(peer, run_dir):
    """Three readers of whole versions, 2,000 tensors each, the writer at full speed."""
    scheme = ws.DoubleBufferScheme(run_dir, slots=3, verify=False)
    writer, *readers = peer(), peer(), peer(), peer()
    shape = {"nbytes": 1 << 20, "tensors": 2000}
    writer.call(send_from, scheme, **shape)
    writer.call(publish, 1)
    for reader in readers:
        reader.start(read_until, scheme, WAIT, stop_at=150)
    for first in range(2, 152, 10):
        writer.call(publish_some, first, first + 10)
    for reader in readers:
        seen = reader.result()
        assert all(number == value for number, value in seen), seen
        assert len({number for number, _ in seen}) > 5


def publish_some(state, first, last):
    for number in range(first, last):
        fill(state.weights, number)
        state.sender.update_weights(version=number, timeout=WAIT)
