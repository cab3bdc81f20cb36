"""A transformers model as an engine: names of its checkpoint, written into its own tensors."""

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import weightsync as ws
from tests.conftest import assert_all_same, copy_of
from tests.sources.architectures import EXPERTS, TEXT, make


def facts(model):
    """What an update must leave as it is: each parameter, and where it lies."""
    return {
        name: (id(tensor), tensor.data_ptr(), tensor.stride(), tensor.requires_grad)
        for name, tensor in model.named_parameters(remove_duplicate=False)
    }


def updated(ends, weights, engine):
    """Send weights into an engine; its parameters stay where, and what, they are."""
    before = facts(engine)
    sender, receiver = ends.pair(weights, engine)
    sender.update_weights(version=1)
    receiver.poll_and_apply()
    assert facts(engine) == before
    assert receiver.verify_weights().ok


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss", "llava", "gemma3", "qwen2"])
def test_m1_names_of_the_checkpoint(name, ends):
    """M1, promise 8: an expert is written into its part of the packed tensor, in place."""
    trainer, engine = make(name), make(name, seed=1)
    updated(ends, trainer, engine)
    assert_all_same(engine.state_dict(), trainer.state_dict())


def tied(seed):
    config = Qwen3MoeConfig(**TEXT, **EXPERTS, tie_word_embeddings=True)
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(config)


def test_t1_ties_are_kept(ends):
    trainer, engine = tied(seed=0), tied(seed=1)
    updated(ends, trainer, engine)
    assert engine.lm_head.weight is engine.model.embed_tokens.weight
    assert_all_same(engine.state_dict(), trainer.state_dict())


@pytest.mark.parametrize("name", ["qwen3_moe", "llava", "gte"])
def test_names_of_the_model_itself(name, ends):
    """A mapping's names are sent as they are."""
    trainer, engine = make(name), make(name, seed=1)
    updated(ends, trainer.state_dict(), engine)
    assert_all_same(engine.state_dict(), trainer.state_dict())


def test_one_expert_alone(ends):
    """The others stay as they were."""
    trainer, engine = make("qwen3_moe"), make("qwen3_moe", seed=1)
    packed = "model.layers.0.mlp.experts.gate_up_proj"
    expected = {name: copy_of(tensor) for name, tensor in engine.state_dict().items()}
    rows = trainer.state_dict()[packed].shape[1] // 2
    expected[packed][2, :rows] = trainer.state_dict()[packed][2, :rows]
    sender, receiver = ends.pair(
        trainer,
        engine,
        sender={"include": ["model.layers.0.mlp.experts.2.gate_proj.weight"]},
        receiver={"strict": False},
    )
    sender.update_weights(version=1)
    report = receiver.poll_and_apply()
    assert report.tensors == 1
    assert_all_same(engine.state_dict(), expected)


@pytest.mark.parametrize("name", ["gte", "nomic_bert"])
def test_a_checkpoint_that_is_computed_cannot_be_written_in_place(name, ends):
    """Its q, k and v are one tensor there, and three here."""
    trainer, engine = make(name), make(name, seed=1)
    expected = {name: copy_of(tensor) for name, tensor in engine.state_dict().items()}
    words = r"qkv.*computed.*cannot be written in place; send the model's own names.*state_dict"
    sender, receiver = ends.pair(trainer, engine)
    sender.update_weights(version=1)
    with pytest.raises(ws.EngineError, match=f"(?i){words}"):
        receiver.poll_and_apply()
    assert_all_same(engine.state_dict(), expected)
