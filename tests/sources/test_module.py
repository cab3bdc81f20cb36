import torch
from torch import nn

from weightsync.source import SourceOptions, as_source


class Stateful(nn.Module):
    """Everything that a ``state_dict`` can hold."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("kept", torch.zeros(3))
        self.register_buffer("dropped", torch.zeros(3), persistent=False)
        self.register_buffer("nothing", None)
        self.register_parameter("absent", None)

    def get_extra_state(self):
        return {"not": "a tensor"}

    def set_extra_state(self, state):
        pass


def test_parameters_and_persistent_buffers():
    """B1: nothing else, and no extra state."""
    model = nn.Sequential(Stateful(), Stateful())
    assert as_source(model).manifest().names() == ["0.weight", "0.kept", "1.weight", "1.kept"]


def test_a_name_that_only_ends_like_extra_state():
    model = nn.Module()
    model.my_extra_state = nn.Parameter(torch.ones(2))
    assert as_source(model).manifest().names() == ["my_extra_state"]


def test_the_tensors_are_the_models_own():
    """Promise 3, and G6: nothing is copied on the way."""
    model = nn.Linear(3, 2)
    sent = dict(as_source(model).tensors())
    assert sent["weight"].data_ptr() == model.weight.data_ptr()
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_what_was_replaced_is_sent():
    model = nn.Linear(3, 2)
    source = as_source(model)
    source.manifest()
    model.weight = nn.Parameter(torch.full((2, 3), 7.0))
    assert dict(source.tensors())["weight"].eq(7).all()
    model.extra = nn.Parameter(torch.ones(1))
    assert source.manifest().names() == ["weight", "bias", "extra"]
    model.half()
    assert source.manifest().spec("weight").dtype == torch.float16
    model.bias = None
    assert source.manifest().names() == ["weight", "extra"]


def test_ties():
    """T1: a tie is a tie by storage; its bytes are sent once."""
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    source = as_source(model)
    assert source.manifest().aliases == {}
    model["head"].weight = model["embed"].weight
    assert [spec.name for spec in source.manifest().tensors] == ["embed.weight"]
    assert source.manifest().aliases == {"head.weight": "embed.weight"}
    assert [name for name, _ in source.tensors()] == ["embed.weight"]


def test_rename():
    calls = []

    def rename(name):
        calls.append(name)
        return f"model.{name}"

    source = as_source(nn.Linear(3, 2), SourceOptions(rename=rename))
    assert source.manifest().names() == ["model.weight", "model.bias"]
    assert [name for name, _ in source.tensors()] == ["model.weight", "model.bias"]
    assert calls == ["weight", "bias"]


def test_an_empty_module():
    assert as_source(nn.ReLU()).manifest().names() == []
