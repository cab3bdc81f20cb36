"""A trainer that moves its weights elsewhere between updates gets the memory back (G6)."""

import gc

import pytest
import torch

from tests.conftest import assert_all_same, read
from tests.sources.architectures import make
from tests.sources.test_transformers import sent


def move(model):
    """Move a model elsewhere, as offloading does; the names whose former memory is still held."""
    former = [(name, p.untyped_storage()._weak_ref()) for name, p in model.named_parameters()]
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    gc.collect()
    return [name for name, memory in former if not torch.UntypedStorage._expired(memory)]


@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16}], ids=["as it is", "cast"])
@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe"])
def test_a_sender_keeps_nothing_of_the_trainer(name, options, ends):
    """Parts of packed experts are views, which would keep the whole."""
    model = make(name)
    sender = ends.sender(model, **options)
    for number in (1, 2):
        sender.update_weights(version=number)
        assert move(model) == []
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
    sender.update_weights(version=3)
    assert_all_same(
        read(ends)[1], {n: t.to(options.get("dtype", t.dtype)) for n, t in sent(model).items()}
    )


def test_an_attached_sender_keeps_nothing(ends):
    model, engine = make("qwen3_moe"), make("qwen3_moe", seed=1)
    sender = ends.sender(model)
    sender.attach(ends.receiver(engine))
    sender.update_weights(version=1)
    assert move(model) == []
    sender.update_weights(version=2)
    assert_all_same(sent(engine), sent(model))
