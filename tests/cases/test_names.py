"""Names and structure: cases N."""

import pytest
import torch
from torch import nn

import weightsync as ws
from tests.conftest import assert_all_same, copy_of


def model(*names):
    module = nn.Module()
    for number, name in enumerate(names):
        module.register_parameter(name, nn.Parameter(torch.full((2,), float(number))))
    return module


def test_n7_strict(ends):
    """N7: one error that lists both sets by name; the receiver is bitwise unchanged."""
    target = model("a", "b", "only_here")
    before = {name: copy_of(tensor) for name, tensor in target.state_dict().items()}
    sender, receiver = ends.pair(model("b", "a", "only_there"), target)
    sender.update_weights(version=1)
    with pytest.raises(ws.MismatchError, match=r"only_here.*only_there") as caught:
        receiver.poll_and_apply()
    assert caught.value.missing == ("only_here",)
    assert caught.value.unexpected == ("only_there",)
    assert_all_same(target.state_dict(), before)
    assert not receiver.ready


def test_n7_not_strict(ends):
    """N7: the report carries both lists, and what both have is updated."""
    target = model("a", "b", "only_here")
    kept = copy_of(target.only_here)
    source = model("b", "a", "only_there")
    sender, receiver = ends.pair(source, target, receiver={"strict": False})
    sender.update_weights(version=1)
    report = receiver.poll_and_apply()
    assert report.missing == ("only_here",)
    assert report.unexpected == ("only_there",)
    assert torch.equal(target.a, source.a)
    assert torch.equal(target.b, source.b)
    assert torch.equal(target.only_here, kept)


def test_n7_later(ends):
    """A tensor that is sent no more is missed, too: also in a later update."""
    target = {"a": torch.zeros(1), "b": torch.zeros(1)}
    sender, receiver = ends.pair({}, target)
    sender.update_weights({"a": torch.ones(1), "b": torch.ones(1)}, version=1)
    receiver.poll_and_apply()
    sender.update_weights({"a": torch.zeros(1)}, version=2)
    with pytest.raises(ws.MismatchError, match="'b'"):
        receiver.poll_and_apply()
    assert receiver.version.number == 1
    assert target["a"].item() == 1


def test_n7_nothing_is_sent(ends):
    sender, receiver = ends.pair({}, {"a": torch.zeros(1)})
    sender.update_weights(version=1)
    with pytest.raises(ws.MismatchError, match="'a'"):
        receiver.poll_and_apply()


def test_names_are_bound_to_values_not_to_places(ends):
    """Equal shapes in another order: matched by name."""
    names = [f"layer.{number}" for number in range(20)]
    sent = {name: torch.rand(7) for name in reversed(names)}
    target = {name: torch.zeros(7) for name in names}
    sender, receiver = ends.pair(sent, target)
    sender.update_weights(version=1)
    receiver.poll_and_apply()
    assert_all_same(target, sent)
