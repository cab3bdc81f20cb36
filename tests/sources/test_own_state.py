"""Modules that say in a way of their own what belongs to them: TorchScript, and overrides."""

import copy

import pytest
import torch
from torch import nn

from tests.conftest import assert_all_same
from weightsync.source import as_source


def sent(model):
    source = as_source(model)
    tensors = {name: tensor.clone() for name, tensor in source.tensors()}
    assert source.manifest().names() == list(tensors)
    return tensors


def scripted():
    return torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))


def traced():
    return torch.jit.trace(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), torch.ones(1, 2))


@pytest.mark.parametrize("make", [scripted, traced])
def test_torchscript_modules_are_sent(make):
    model = make()
    assert_all_same(sent(model), model.state_dict())


@pytest.mark.parametrize("make", [scripted, traced])
def test_torchscript_modules_within_a_module_are_sent(make):
    model = nn.ModuleDict({"plain": nn.Linear(2, 2), "script": make()})
    assert_all_same(sent(model), model.state_dict())


@pytest.mark.parametrize("make", [scripted, traced])
def test_torchscript_modules_receive(make, ends):
    """In place: what was compiled holds the addresses."""
    model = make()
    places = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    weights = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    sender, receiver = ends.pair(weights, model)
    sender.update_weights(version=1)
    receiver.poll_and_apply()
    assert_all_same(model.state_dict(), weights)
    assert {name: t.data_ptr() for name, t in model.state_dict().items()} == places


class Named(nn.Linear):
    """Adds to its state, and calls the arguments of that what it likes."""

    def _save_to_state_dict(self, saved, before, keep):
        super()._save_to_state_dict(saved, before, keep)
        saved[before + "extra"] = torch.ones(2)


def test_arguments_of_any_name():
    model = nn.Sequential(Named(2, 2))
    tensors = sent(model)
    assert list(tensors) == ["0.weight", "0.bias", "0.extra"]
    assert_all_same(tensors, copy.deepcopy(model).state_dict())
