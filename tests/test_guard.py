"""The engine's object, refusing to generate while it holds no whole version."""

import asyncio
import copy
import inspect

import pytest
import torch
from torch import nn

import weightsync as ws
from tests.fakes import attached, fake, weights
from weightsync.guard import GENERATING
from weightsync.testing import FakeEngine


class Busy(FakeEngine):
    """Can be asked in every way that engines can."""

    temperature = 0.5

    def chat(self, words, *, polite=True):
        return f"{words}, {polite}"

    async def encode(self, words):
        return words

    async def generate_stream(self, words):
        for word in words:
            yield word

    def tokenizer(self):
        return "tokenizer"

    def __call__(self, words):
        return words


def busy():
    return Busy({"w": (2,)})


def sent(value):
    return {"w": torch.full((2,), float(value))}


def test_everything_is_refused_before_the_first_version_and_goes_through_after_it(ends):
    engine = busy()
    sender, receiver = attached(ends, engine)
    guarded = receiver.guard()
    for ask in (
        lambda: guarded.generate([1]),
        lambda: guarded.chat("hello"),
        lambda: guarded.encode("hello"),
        lambda: guarded.generate_stream("hello"),
        lambda: guarded("hello"),
    ):
        with pytest.raises(ws.EngineUnusableError, match="none has arrived"):
            ask()
    assert guarded.tokenizer() == "tokenizer"  # what asks the model nothing always works
    sender.update_weights(sent(1), version=1)
    assert guarded.generate([1]) == engine.generate([1])
    assert guarded.chat("hello", polite=False) == "hello, False"
    assert guarded("hello") == "hello"

    async def use():
        assert await guarded.encode("hello") == "hello"
        assert [word async for word in guarded.generate_stream("abc")] == ["a", "b", "c"]

    asyncio.run(use())


def test_refused_from_a_failure_to_the_next_full_update_with_the_reason(ends):
    engine = busy()
    sender, receiver = attached(ends, engine)
    guarded = receiver.guard()
    sender.update_weights(sent(1), version=1)
    generate = guarded.generate  # also where somebody kept the method
    engine.fail["load"] = [RuntimeError("bad shard")] * 2
    with pytest.raises(ws.ReceiverError):
        sender.update_weights(sent(2), version=2)
    for ask in (generate, guarded.generate):
        with pytest.raises(ws.EngineUnusableError, match="bad shard"):
            ask([1])
    sender.update_weights(sent(3), version=3)
    assert generate([1])


def test_a_version_that_was_rolled_back_to_is_a_whole_one(ends):
    engine = busy()
    sender, receiver = attached(ends, engine)
    sender.update_weights(sent(1), version=1)
    engine.fail["load"] = RuntimeError("bad shard")
    with pytest.raises(ws.ReceiverError):
        sender.update_weights(sent(2), version=2)
    assert receiver.guard().generate([1])


def test_refused_after_sleep(ends):
    """S1: weights that sleep took are not answered from."""
    engine = busy()
    sender, receiver = attached(ends, engine)
    sender.update_weights(sent(1), version=1)
    engine.sleep()
    engine.wake()
    with pytest.raises(ws.EngineUnusableError, match="sleep"):
        receiver.guard().generate([1])
    receiver.poll_and_apply()
    assert receiver.guard().generate([1])


def test_of_several_each_is_guarded_for_itself(ends):
    engines = {"a": fake(), "b": fake()}
    sender, receiver = attached(ends, ws.Replicas(engines))
    with pytest.raises(ws.EngineError, match="one of 'a', 'b'"):
        receiver.guard()
    with pytest.raises(ws.EngineError, match="there is no engine 'c'"):
        receiver.guard("c")
    a, b = receiver.guard("a"), receiver.guard("b")
    engines["a"].fail["load"] = RuntimeError("bad shard")
    with pytest.raises(ws.ReceiverError):
        sender.update_weights(weights(1), version=1)
    with pytest.raises(ws.EngineUnusableError, match="bad shard"):
        a.generate([1])
    assert b.generate([1])
    engines["b"].fail["stage"] = ws.EngineDiedError("killed")
    with pytest.raises(ws.ReceiverError):
        sender.update_weights(weights(2), version=2)
    assert a.generate([1])
    with pytest.raises(ws.EngineUnusableError, match=r"dead.*killed"):
        b.generate([1])


def test_a_module(ends):
    model = nn.Linear(2, 2)
    sender, receiver = attached(ends, model)
    guarded = receiver.guard()
    with pytest.raises(ws.EngineUnusableError):
        guarded(torch.ones(2))
    with pytest.raises(ws.EngineUnusableError):
        guarded.forward(torch.ones(2))
    sender.update_weights({"weight": torch.ones(2, 2), "bias": torch.zeros(2)}, version=1)
    assert guarded(torch.ones(2)).tolist() == [2, 2]
    assert dict(guarded.named_parameters()).keys() == {"weight", "bias"}


def test_attributes_are_read_from_and_written_to_the_object(ends):
    engine = busy()
    _, receiver = attached(ends, engine)
    guarded = receiver.guard()
    guarded.temperature = 0.7
    assert engine.temperature == guarded.temperature == 0.7
    assert "generate_stream" in dir(guarded)
    assert "Busy" in repr(guarded)
    with pytest.raises(AttributeError, match="colour"):
        guarded.colour  # noqa: B018
    assert guarded.chat.__name__ == "chat"


def test_it_follows_a_rebind(ends):
    """C4: the guard asks the object that gets the updates."""
    one, other = nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1))
    sender, receiver = attached(ends, one)
    guarded = receiver.guard()
    sender.update_weights({"weight": torch.ones(1, 1), "bias": torch.zeros(1)}, version=1)
    receiver.rebind(other)
    with pytest.raises(ws.EngineUnusableError):
        guarded(torch.ones(1))
    sender.update_weights({"0.weight": torch.full((1, 1), 3.0), "0.bias": torch.zeros(1)})
    assert guarded(torch.ones(1)).item() == 3


def test_it_cannot_be_copied_into_one_that_guards_nothing(ends):
    _, receiver = attached(ends, nn.Linear(1, 1))
    with pytest.raises((TypeError, AttributeError)):
        copy.deepcopy(receiver.guard())


@pytest.mark.vllm
def test_the_methods_of_vllm_that_ask_a_model_are_among_those_guarded():
    """New releases add some: the list must know those that take prompts or messages."""
    vllm = pytest.importorskip("vllm")
    from vllm.v1.engine.async_llm import AsyncLLM

    from weightsync.guard import _generates

    for kind in (vllm.LLM, AsyncLLM):
        for name, method in inspect.getmembers(kind, callable):
            if name.startswith("_"):
                continue
            try:
                parameters = inspect.signature(method).parameters
            except ValueError:
                continue
            if {"prompts", "prompt", "messages"} & set(parameters):
                assert _generates(name), f"{kind.__name__}.{name}"
    assert len(set(GENERATING)) == len(GENERATING)
