"""Several engines behind one receiver: what may be passed, and what they are called."""

import pytest
import torch
from torch import nn

import weightsync as ws
from tests.fakes import assert_holds, attached, fake, weights
from weightsync.replicas import engines_of
from weightsync.testing import FakeEngine


def test_a_list_is_named_by_kind_and_number(ends):
    receiver = ends.receiver([fake(), fake()], connect=False)
    assert list(receiver.engines) == ["FakeEngine 0", "FakeEngine 1"]
    mixed = ws.Replicas([nn.Linear(1, 1), {"w": torch.zeros(1)}, nn.Linear(1, 1)])
    assert list(mixed.engines) == ["Linear 0", "dict", "Linear 2"]
    assert len(mixed) == 3


def test_a_mapping_gives_the_names(ends):
    engines = {"left": fake(), "right": fake()}
    sender, receiver = attached(ends, ws.Replicas(engines))
    assert receiver.engines == engines
    report = sender.update_weights(weights(1), version=1)
    assert [(e.engine, e.state) for e in report.receivers[0].engines] == [
        ("left", "applied"),
        ("right", "applied"),
    ]
    for engine in engines.values():
        assert_holds(engine, weights(1))


def test_one_engine_is_called_by_its_kind():
    assert list(engines_of(nn.Linear(1, 1))) == ["Linear"]


@pytest.mark.parametrize("engines", [[], {}, ()])
def test_none_at_all(engines):
    with pytest.raises(ws.EngineError, match="no engine"):
        ws.Replicas(engines)


@pytest.mark.parametrize("thing", [None, 5, "http://host:8000", nn.Linear(1, 1)])
def test_what_is_no_list_is_refused_in_words(thing):
    with pytest.raises(ws.EngineError, match="a list of engines, or a mapping"):
        ws.Replicas(thing)


def test_one_object_twice():
    model = nn.Linear(1, 1)
    with pytest.raises(ws.EngineError, match="twice"):
        ws.Replicas([model, model])
    with pytest.raises(ws.EngineError, match="twice"):
        ws.Replicas({"a": model, "b": model})


def test_one_name_twice():
    with pytest.raises(ws.EngineError, match="one name"):
        ws.Replicas({1: fake(), "1": fake()})

    class Named(FakeEngine):
        name = "Linear 0"

    with pytest.raises(ws.EngineError, match="one name"):
        ws.Replicas([nn.Linear(1, 1), Named({"w": (1,)}), nn.Linear(1, 1)])


def test_a_name_without_end():
    with pytest.raises(ws.EngineError, match="100 characters"):
        ws.Replicas({"x" * 101: fake()})


def test_options_are_of_all_of_them(ends):
    modules = [nn.Linear(2, 2), nn.Linear(2, 2)]
    sender = ends.sender()
    receiver = ends.receiver(ws.Replicas(modules, strict=False))
    sender.attach(receiver)
    report = sender.update_weights({"weight": torch.ones(2, 2)}, version=1)
    assert report.receivers[0].state == "applied"
    assert all(module.weight.eq(1).all() for module in modules)
    with pytest.raises(ws.EngineError, match=r"give strict to Replicas"):
        ends.receiver(ws.Replicas(modules), strict=False, connect=False)
    with pytest.raises(ws.EngineError, match="colour"):
        ws.Replicas(modules, colour="red")


def test_what_does_not_fit_one_of_them_is_reported_for_it(ends):
    """The names of both sides are in the report, once, and the one that fits has the version."""
    fits, does_not = nn.Linear(2, 2), nn.Linear(3, 2)
    sender, receiver = attached(ends, ws.Replicas({"fits": fits, "other": does_not}))
    with pytest.raises(ws.ReceiverError, match=r"engine 'other': MismatchError.*'weight'"):
        sender.update_weights({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, version=1)
    assert fits.weight.eq(1).all()
    assert receiver.status().engines[0].version.number == 1


def test_what_is_missing_in_any_is_in_the_report(ends):
    one, other = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    sender = ends.sender({"weight": torch.ones(2, 2), "bias": torch.ones(2)})
    receiver = ends.receiver(ws.Replicas([one, other], strict=False))
    sender.update_weights(version=1)
    assert receiver.poll_and_apply().unexpected == ("bias",)
