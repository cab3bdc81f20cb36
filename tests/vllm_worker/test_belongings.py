"""What hangs on a layer beside its parameters and buffers is found, and put back."""

import functools

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from weightsync.vllm_worker.belongings import Memory, tensors

pytestmark = pytest.mark.vllm


class Kernel:
    """Stands in for an object of vLLM's."""

    __module__ = "vllm.kernels"

    def __init__(self, value):
        self.packed = torch.full((2,), value)


class Config(Kernel):
    __module__ = "vllm.config.model"


def make_layer():
    layer = nn.Linear(2, 2)
    closed = torch.full((3,), 1.0)
    layer.apply_packed = lambda x: x + closed
    layer.apply_bound = functools.partial(torch.add, torch.full((4,), 2.0))
    layer.kernel = Kernel(3.0)
    layer.config = Config(4.0)
    layer.stacked = {"lora": (torch.full((5,), 5.0),)}
    layer.kv_cache = [torch.zeros(9)]
    layer.child = nn.Linear(1, 1)
    layer.child.extra = torch.zeros(1)
    return layer


def test_tensors_are_found_where_kernels_keep_them():
    layer = make_layer()
    assert {
        path: tensor[0].item() for path, tensor in tensors(layer, set(layer.modules())).items()
    } == {
        "apply_packed.closed": 1.0,
        "apply_bound.0": 2.0,
        "kernel.packed": 3.0,
        "stacked.lora.0": 5.0,
    }


def test_what_is_not_a_layers_own_is_not_walked():
    """Another layer of the model, the configuration of the process, the cache of requests."""
    layer, other = make_layer(), make_layer()
    layer.neighbour = other
    found = tensors(layer, {*layer.modules(), *other.modules()})
    assert not any(path.startswith(("neighbour", "config", "kv_cache", "child")) for path in found)


def test_a_layer_is_put_back_as_it_was():
    layer = make_layer()
    weight, kernel, packed = layer.weight, layer.kernel, layer.kernel.packed
    memory = Memory(layer, set(layer.modules()))
    memory.keep_values()
    layer.weight = nn.Parameter(torch.zeros(7))
    layer.register_buffer("new", torch.zeros(1), persistent=False)
    layer.kernel.packed = torch.zeros(2)
    packed.zero_()
    layer.kernel.more = 1
    layer.kernel = None
    del layer.bias
    memory.restore()
    assert layer.weight is weight
    assert layer.kernel is kernel
    assert layer.kernel.packed is packed
    assert packed.tolist() == [3.0, 3.0]
    assert vars(kernel).keys() == {"packed"}
    assert dict(layer.named_buffers()) == {}
    assert not layer._non_persistent_buffers_set
    assert layer.bias is not None
