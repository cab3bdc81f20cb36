"""vLLM that quantises while it loads (online fp8), on a GPU: scales follow the weights.

What the engine says after each update is what an engine says that has loaded that very version
from a checkpoint.
"""

import os

import pytest
import torch

import weightsync as ws
from tests.gpu.engines import MARKS, dense, greedy, make_llm, stop
from tests.vllm.conftest import make_model

pytestmark = MARKS


def experts():
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=100,
        hidden_size=512,
        intermediate_size=512,
        moe_intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        architectures=["Qwen3MoeForCausalLM"],
        torch_dtype="bfloat16",
    )


def saved(config, seed, folder):
    """A model of a seed; of greater seeds with greater weights, so that old scales do not do."""
    model = make_model(config, seed).bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.5 * 2**seed)
    model.save_pretrained(folder)
    return model


@pytest.fixture(
    scope="module",
    params=[(dense, True), (dense, False), (experts, False)],
    ids=["dense, eager", "dense, graphs", "experts, graphs"],
)
def engine(request, tmp_path_factory):
    """An engine, weights for it, and what one says that was started from the last of these."""
    config, eager = request.param
    folder = tmp_path_factory.mktemp("quantised")
    models = {seed: saved(config(), seed, folder / str(seed)) for seed in (1, 2, 3)}
    fresh = make_llm(folder / "3", "safetensors", quantization="fp8", enforce_eager=eager)
    try:
        wanted = greedy(fresh)
    finally:
        stop(fresh)
    llm = make_llm(folder / "1", "safetensors", quantization="fp8", enforce_eager=eager)
    yield llm, models, wanted
    stop(llm)


def test_successive_updates_are_those_of_a_freshly_loaded_engine(engine, tmp_path):
    llm, models, wanted = engine
    scheme = ws.DoubleBufferScheme(f"/dev/shm/weightsync-test-{os.getpid()}-{tmp_path.name}")
    with scheme.create_sender() as sender, scheme.create_receiver(llm) as receiver:
        sender.connect()
        sender.attach(receiver)
        said = []
        for number, seed in enumerate((2, 3, 2), 1):
            sender.update_weights(models[seed], version=number)
            said.append(greedy(llm))
            found = receiver.verify_weights()
            assert found.ok, f"update {number}: {found}"
        assert said[1] == wanted
        assert said[0] == said[2] != wanted
        lacking = dict(models[3].state_dict())
        del lacking["model.norm.weight"]
        with pytest.raises(ws.ReceiverError, match=r"model\.norm lacks weight"):
            sender.update_weights(lacking, version=4)
        assert greedy(llm) == said[2]
        assert receiver.verify_weights().ok
