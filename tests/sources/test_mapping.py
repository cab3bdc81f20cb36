import collections
import types

import pytest
import torch
from tensordict import TensorDict

from weightsync.errors import SourceError
from weightsync.source import SourceOptions, as_source


def test_names_are_the_users_own():
    names = ["module.x", "_orig_mod.y", "base_model.model.z", "a/b", "ä"]
    weights = {name: torch.ones(1) for name in names}
    assert as_source(weights).manifest().names() == names
    for wrap in (types.MappingProxyType, collections.OrderedDict, collections.ChainMap):
        assert set(as_source(wrap(weights)).manifest().names()) == set(names)


@pytest.mark.parametrize("key", [5, None, ("a", "b"), b"a"])
def test_names_are_texts(key):
    with pytest.raises(SourceError, match="text"):
        as_source({"a": torch.ones(1), key: torch.ones(1)}).manifest()


def test_an_empty_name():
    with pytest.raises(SourceError, match="name"):
        as_source({"": torch.ones(1)}).manifest()


@pytest.mark.parametrize("rename", [lambda name: "same", lambda name: name[0]])
def test_two_tensors_never_collapse_into_one_name(rename):
    """Promise 2."""
    weights = {"a1": torch.ones(1), "a2": torch.zeros(1)}
    with pytest.raises(SourceError, match="two tensors"):
        as_source(weights, SourceOptions(rename=rename)).manifest()


def test_three_ties_never_collapse_into_one_name():
    one = torch.ones(1)
    weights = {"a": one, "b1": one, "b2": one}
    with pytest.raises(SourceError, match="two tensors"):
        as_source(weights, SourceOptions(rename=lambda name: name[0])).manifest()


@pytest.mark.parametrize("final", [None, 5, ""])
def test_rename_gives_texts(final):
    with pytest.raises(SourceError, match="name"):
        as_source({"a": torch.ones(1)}, SourceOptions(rename=lambda name: final)).manifest()


def test_a_rename_error_comes_through():
    with pytest.raises(KeyError):
        as_source({"a": torch.ones(1)}, SourceOptions(rename={}.__getitem__)).manifest()


def test_what_is_tied_and_what_is_not():
    """T1: the same elements in the same order, and nothing less."""
    base = torch.arange(12.0)
    weights = {
        "base": base,
        "same": base[:],
        "matrix": base.view(3, 4),
        "front": base[:6],
        "back": base[6:],
        "square": base[:9].view(3, 3),
        "square.t": base[:9].view(3, 3).t(),
        "bits": base.view(torch.int32),
        "equal": base.clone(),
        "empty": torch.empty(0),
        "empty too": torch.empty(0),
        "empty view": base[:0],
    }
    manifest = as_source(weights).manifest()
    assert manifest.aliases == {"same": "base"}
    assert set(manifest.names()) == set(weights)


def test_a_changed_tie_is_seen():
    one = torch.ones(2)
    weights = {"a": one, "b": one}
    source = as_source(weights)
    assert source.manifest().aliases == {"b": "a"}
    weights["b"] = torch.zeros(2)
    assert source.manifest().aliases == {}
    assert dict(source.tensors())["b"].eq(0).all()


def test_changed_keys_are_seen():
    weights = {"a": torch.ones(2)}
    source = as_source(weights)
    assert source.manifest().names() == ["a"]
    weights["b"] = torch.zeros(2)
    assert source.manifest().names() == ["a", "b"]
    weights["b"].resize_(3)
    assert source.manifest().spec("b").shape == (3,)
    weights["c"] = weights.pop("a")
    assert source.manifest().names() == ["b", "c"]


def test_tensordict():
    weights = TensorDict({"a": {"b": torch.ones(2), "c": torch.zeros(())}, "d": torch.ones(3)})
    source = as_source(weights)
    assert set(source.manifest().names()) == {"a.b", "a.c", "d"}
    assert dict(source.tensors())["a.b"].eq(1).all()
    # TensorDictModule and its like keep their parameters in one.
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    flat = as_source(TensorDict.from_module(module)).manifest()
    assert set(flat.names()) == set(module.state_dict())


def test_tensordict_names_never_collapse():
    weights = TensorDict({"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}})
    with pytest.raises(SourceError, match=r"a\.b"):
        as_source(weights).manifest()


def test_tensordict_with_batch_size():
    weights = TensorDict({"a": torch.ones(4, 2), "b": torch.ones(4)}, batch_size=[4])
    assert as_source(weights).manifest().spec("a").shape == (4, 2)


def test_tensordict_holds_other_things_too():
    """Like a module's extra state: no weight."""
    weights = TensorDict({"a": torch.ones(2), "note": "text", "b": {"note": "text"}})
    assert as_source(weights).manifest().names() == ["a"]


def test_patterns_that_leave_nothing(ends):
    with pytest.raises(SourceError, match="nothing to send"):
        as_source({"a": torch.ones(1)}, SourceOptions(exclude=["*"])).manifest()


def test_names_of_adapters_in_a_mapping_are_pointed_out(caplog):
    as_source({"q_proj.base_layer.weight": torch.ones(1)})
    assert "pass the model itself" in caplog.text
