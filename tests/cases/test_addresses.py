"""Engine side: addresses, number of operations, shapes. Cases E."""

import os

import pytest
import torch
from torch import nn

import weightsync as ws
from tests.conftest import assert_all_same, assert_same, copy_of
from weightsync.files import Directory


class Loader:
    """What an engine hangs on its parameters."""


def engine_module():
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    module[0].weight.weight_loader = Loader()
    module[0].weight.output_dim = 0
    module[2].weight.requires_grad_(False)
    module[2].weight = nn.Parameter(torch.zeros(6, 2).t(), requires_grad=False)
    return module


def look(module):
    """Everything of the parameters and buffers but their values."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {
        name: (
            id(tensor),
            tensor.data_ptr(),
            tensor.untyped_storage().data_ptr(),
            tensor.stride(),
            tensor.requires_grad,
            type(tensor),
            dict(vars(tensor)),
        )
        for name, tensor in tensors
    }


@pytest.mark.parametrize("cast", [False, True])
def test_e1_written_in_place(ends, cast):
    """E1: three updates; id, address, strides and attributes stay, the values are new."""
    target = engine_module()
    before = look(target)
    source = engine_module()
    if cast:
        source = source.double()
    sender, receiver = ends.pair(source, target, receiver={"cast": cast})
    for number in (1, 2, 3):
        for tensor in source.state_dict().values():
            tensor.copy_(torch.rand(tensor.shape) * 10)
        sender.update_weights(version=number)
        receiver.poll_and_apply()
        assert look(target) == before
        expected = {
            name: tensor.to(target.state_dict()[name].dtype)
            for name, tensor in source.state_dict().items()
        }
        assert_all_same(target.state_dict(), expected)


def test_e1_a_failed_update_moves_nothing_either(ends):
    target = engine_module()
    before = look(target)
    values = {name: copy_of(tensor) for name, tensor in target.state_dict().items()}
    sender, receiver = ends.pair({"0.weight": torch.ones(6, 4)}, target)
    sender.update_weights(version=1)
    with pytest.raises(ws.MismatchError):
        receiver.poll_and_apply()
    assert look(target) == before
    assert_all_same(target.state_dict(), values)


def test_e1_the_trainer_is_not_touched(ends):
    """Promise 3: not a bit, not a flag, not an address."""
    source = engine_module()
    before = look(source)
    values = {name: copy_of(tensor) for name, tensor in source.state_dict().items()}
    versions = [parameter._version for parameter in source.parameters()]
    sender, receiver = ends.pair(source, engine_module(), sender={"dtype": torch.float16},
                                 receiver={"cast": True})  # fmt: skip
    sender.update_weights(version=1)
    receiver.poll_and_apply()
    assert look(source) == before
    assert_all_same(source.state_dict(), values)
    assert [parameter._version for parameter in source.parameters()] == versions


@pytest.fixture
def count(monkeypatch):
    """Counts the operations on shared directories, and files opened by anybody."""
    calls = []
    for name in ("open_file", "read", "replace", "remove", "status", "names", "subdirectory"):
        original = getattr(Directory, name)

        def counted(self, *args, _name=name, _original=original, **kwargs):
            calls.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(Directory, name, counted)
    original_open = os.open

    def opened(*args, **kwargs):
        calls.append("os.open")
        return original_open(*args, **kwargs)

    monkeypatch.setattr(os, "open", opened)
    return calls


@pytest.mark.parametrize("streamed", [False, True])
def test_e4_operations_do_not_grow_with_tensors(ends, count, streamed):
    """E4: 2,000 tensors of 1 kB take as many control operations, and files, as two."""
    spent, files = [], []
    for tensors in (2, 2000):
        sent = {f"t{number}": torch.full((256,), float(number)) for number in range(tensors)}
        target = {name: torch.zeros(256) for name in sent}
        sender, receiver = ends.pair(list(sent.items()) if streamed else sent, target)
        for number in (1, 2):
            count.clear()
            sender.update_weights(version=number)
            receiver.poll_and_apply()
        spent.append(len(count))
        files.append(sum(len(names) for _, _, names in os.walk(ends.path)))
        assert_all_same(target, sent)
        ends.shutdown()
    assert spent[0] == spent[1] > 0
    assert files[0] == files[1] > 0


def test_e6_rows(ends):
    """E6: a resized vocabulary: both shapes and the name, nothing is changed, either way."""
    for there, here in ((128, 70), (70, 128)):
        target = {"embed": torch.full((here, 4), 7.0), "w": torch.zeros(2)}
        sender, receiver = ends.pair({"embed": torch.rand(there, 4), "w": torch.ones(2)}, target)
        sender.update_weights(version=1)
        words = rf"'embed'.*\[{there}, 4\].*\[{here}, 4\]"
        with pytest.raises(ws.MismatchError, match=words) as caught:
            receiver.poll_and_apply()
        assert set(caught.value.different) == {"embed"}
        assert target["embed"].eq(7).all()
        assert target["w"].eq(0).all()
        ends.shutdown()


def test_e6_pad(ends):
    """E6: with the option on, rows 0..69; the others are the receiver's own."""
    for there, here in ((128, 70), (70, 128)):
        sent = torch.rand(there, 4)
        target = {"embed": torch.full((here, 4), 7.0)}
        before = target["embed"].data_ptr()
        sender, receiver = ends.pair({"embed": sent}, target, receiver={"pad": True})
        sender.update_weights(version=1)
        receiver.poll_and_apply()
        assert_same(target["embed"][:70], sent[:70])
        assert target["embed"][70:].eq(7).all()
        assert target["embed"].data_ptr() == before
        ends.shutdown()


def test_e6_the_vocabulary_grows_while_it_runs(ends):
    target = {"embed": torch.zeros(70, 4)}
    sender, receiver = ends.pair({"embed": torch.ones(70, 4)}, target)
    sender.update_weights(version=1)
    receiver.poll_and_apply()
    sender.update_weights({"embed": torch.rand(128, 4)}, version=2)
    with pytest.raises(ws.MismatchError, match="'embed'"):
        receiver.poll_and_apply()
    assert target["embed"].eq(1).all()
    assert receiver.version.number == 1
    receiver.rebind(grown := {"embed": torch.zeros(128, 4)})
    receiver.apply_weights()
    assert grown["embed"].count_nonzero() > 0
