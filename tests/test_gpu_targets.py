"""Tensors on a GPU as targets: all that can be goes through windows, the rest is copied.

The processor is taken for a GPU here; on a real one see tests/gpu.
"""

import pytest
import torch

import weightsync as ws
from tests.conftest import WAIT, as_bytes, assert_all_same, assert_same, newest_slot
from weightsync import gpu_targets, transport, upload
from weightsync.chunks import CHUNK
from weightsync.deadline import Deadline
from weightsync.device.host import HostDevice
from weightsync.engines.module import ModuleEngine
from weightsync.errors import NoRoomError
from weightsync.testing.faults import corrupt
from weightsync.transport import Targets


class Machine:
    """Its tensors are on a GPU; notes which windows went there."""

    def __init__(self, monkeypatch):
        self.device, self.windows = HostDevice(), []
        monkeypatch.setattr(gpu_targets, "_gpu", lambda place: self.device)
        monkeypatch.setattr(transport, "plain_address", lambda tensor, dtype: 0)
        monkeypatch.setattr(upload, "WINDOW", CHUNK)
        plain = upload._Way.copy

        def copy(way, lane, memory, window, base):
            self.windows.append(window)
            plain(way, lane, memory, window, base)

        monkeypatch.setattr(upload._Way, "copy", copy)


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def weights(seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        "large": torch.randn(900, 1000, generator=generator),
        "bytes": torch.randint(0, 256, (1_000_001,), generator=generator).to(torch.uint8),
        "half": torch.randn(333, generator=generator).to(torch.bfloat16),
        "scalar": torch.tensor(float(seed)),
        "empty": torch.empty(0, 3),
        "strided": torch.randn(30, 70, generator=generator),
    }


def engine_of(made):
    target = {name: torch.zeros_like(tensor) for name, tensor in made.items()}
    target["strided"] = torch.zeros(70, 30).t()
    return target


def test_versions_come_to_their_tensors(ends, machine):
    target = engine_of(weights(0))
    places = {name: tensor.data_ptr() for name, tensor in target.items()}
    sender, receiver = ends.pair(None, target)
    sender.attach(receiver)
    for number in range(1, 4):
        sent = weights(number)
        sender.update_weights(sent, version=number)
        assert_all_same(target, sent)
    assert places == {name: tensor.data_ptr() for name, tensor in target.items()}
    assert machine.windows == [0, 1, 2, 3, 4] * 3


def test_what_is_cast_is_copied_beside(ends, machine):
    target = {"large": torch.zeros(900, 1000, dtype=torch.bfloat16), "half": torch.zeros(333)}
    target["bytes"] = torch.zeros(1_000_001, dtype=torch.uint8)
    sender, receiver = ends.pair(None, ModuleEngine(target, strict=False, cast=True))
    sender.attach(receiver)
    sent = weights(1)
    sender.update_weights(sent, version=1)
    assert_same(target["large"], sent["large"].bfloat16())
    assert_same(target["half"], sent["half"].float())
    assert_same(target["bytes"], sent["bytes"])
    assert machine.windows == [0]  # of no tensor but the one


def test_a_tied_tensor_that_is_two_here_is_written_to_both(ends, machine):
    sent = weights(1)
    sent["tied"] = sent["large"]
    target = {name: torch.zeros_like(tensor) for name, tensor in sent.items()}
    with read(ends, sent) as snapshot:
        targets = Targets(snapshot.manifest, target)
        snapshot.copy_into(targets)
        assert targets.on_gpus.names == sent.keys() - {"empty"}
    assert_all_same(target, sent)


def read(ends, sent):
    version = ends.sender(sent).update_weights(version=1).version
    return ends.scheme().create_subscriber().snapshot(version, Deadline(WAIT))


def test_a_version_that_is_corrupt_is_found_out_and_taken_back(ends, machine):
    """The tensors are half written when it turns out; the receiver brings the former one back."""
    target = engine_of(weights(0))
    sender, receiver = ends.pair(None, target)
    good = weights(1)
    sender.update_weights(good, version=1)
    receiver.poll_and_apply(timeout=WAIT)
    sender.update_weights(weights(2), version=2)
    corrupt(newest_slot(ends.scheme()), CHUNK + 5)
    machine.windows.clear()
    with pytest.raises(ws.CorruptError, match="after they came to cpu"):
        receiver.poll_and_apply(timeout=WAIT)
    assert len(machine.windows) == 10  # all of the corrupt one, and all of the good one
    assert receiver.status().state == "rolled back"
    assert_all_same(target, good)
    after = weights(3)
    sender.update_weights(after, version=3)
    assert receiver.poll_and_apply(timeout=WAIT).version.number == 3
    assert_all_same(target, after)


def test_the_first_version_is_corrupt(ends, machine):
    """There is nothing to go back to, which is said; the next version makes up for it."""
    target = engine_of(weights(0))
    sender, receiver = ends.pair(None, target)
    sender.update_weights(weights(1), version=1)
    corrupt(newest_slot(ends.scheme()), 0)
    with pytest.raises(ws.CorruptError):
        receiver.poll_and_apply(timeout=WAIT)
    assert receiver.status().state == "unusable"
    sent = weights(2)
    sender.update_weights(sent, version=2)
    receiver.poll_and_apply(timeout=WAIT)
    assert_all_same(target, sent)


def test_what_lies_beside_the_gpu_is_verified_before_anything_is_written(ends, machine):
    sent = weights(1)
    target = {"strided": torch.full((70, 30), 7.0).t(), "half": torch.full((333,), 7.0).bfloat16()}
    with read(ends, sent) as snapshot:
        corrupt(newest_slot(ends.scheme()), snapshot.manifest.spec("strided").offset)
        with pytest.raises(ws.CorruptError, match="'strided'"):
            snapshot.copy_into(Targets(snapshot.manifest, target))
    assert all(tensor.eq(7).all() for tensor in target.values())


def test_a_gpu_without_room_takes_tensors_one_by_one(ends, machine, monkeypatch, caplog):
    def none(nbytes):
        raise NoRoomError("no room")

    monkeypatch.setattr(machine.device, "empty", none)
    target = engine_of(weights(0))
    sender, receiver = ends.pair(None, target)
    sender.attach(receiver)
    sent = weights(1)
    sender.update_weights(sent, version=1)
    assert_all_same(target, sent)
    assert not machine.windows
    assert "one by one" in caplog.text


def test_tensors_that_move_are_found_again(ends, machine):
    module = torch.nn.Linear(300, 500)
    sender, receiver = ends.pair(None, module)
    sender.attach(receiver)
    for number in (1, 2):
        sent = {"weight": torch.full((500, 300), float(number)), "bias": torch.ones(500) * number}
        sender.update_weights(sent, version=number)
        assert module.weight.eq(number).all()
        assert module.bias.eq(number).all()
        former = module.weight.data
        module.weight.data = torch.zeros(500, 300)
        assert as_bytes(former).any()


def test_nothing_is_made_for_the_processor():
    manifest = ws.Manifest.build([("a", torch.uint8, (5,))])
    targets = Targets(manifest, {"a": torch.zeros(10, dtype=torch.uint8)[::2]})
    assert not targets.on_gpus.names
    assert targets.rest.keys() == {"a"}
