"""vLLM that quantises while it loads (online fp8), on a GPU: scales follow the weights.

What the engine says after each update is what an engine says that has loaded that very version
from a checkpoint.
"""

import importlib.util
import os

import pytest
import torch

import weightsync as ws

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm"),
]

PROMPTS = [[1, 2, 3, 4], [9, 8, 7], [42], [5] * 20]


def dense():
    from tests.vllm.conftest import llama_config

    return llama_config(
        hidden_size=512, num_attention_heads=8, num_key_value_heads=4, torch_dtype="bfloat16"
    )


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
    from tests.vllm.conftest import make_model

    model = make_model(config, seed).bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.5 * 2**seed)
    model.save_pretrained(folder)
    return model


def make_llm(folder, load_format, eager):
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    return LLM(
        str(folder),
        load_format=load_format,
        quantization="fp8",
        skip_tokenizer_init=True,
        enforce_eager=eager,
        max_model_len=128,
        gpu_memory_utilization=0.2,
        weight_transfer_config=WeightTransferConfig(backend="weightsync"),
    )


def stop(llm):
    llm.llm_engine.engine_core.shutdown()


def greedy(llm):
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=12, detokenize=False, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("config", [dense, experts], ids=["dense", "experts"])
def test_successive_updates_are_those_of_freshly_loaded_engines(config, eager, tmp_path):
    models = {seed: saved(config(), seed, tmp_path / str(seed)) for seed in (1, 2, 3)}
    wanted = {}
    for seed in (2, 3):
        fresh = make_llm(tmp_path / str(seed), "safetensors", eager)
        try:
            wanted[seed] = greedy(fresh)
        finally:
            stop(fresh)
    assert wanted[2] != wanted[3]
    llm = make_llm(tmp_path / "1", "safetensors", eager)
    try:
        scheme = ws.DoubleBufferScheme(f"/dev/shm/weightsync-test-{os.getpid()}-{tmp_path.name}")
        with scheme.create_sender() as sender, scheme.create_receiver(llm) as receiver:
            sender.connect()
            sender.attach(receiver)
            for number, seed in enumerate((2, 3, 2), 1):
                sender.update_weights(models[seed], version=number)
                assert greedy(llm) == wanted[seed], f"update {number}"
                found = receiver.verify_weights()
                assert found.ok, found
            lacking = dict(models[3].state_dict())
            del lacking["model.norm.weight"]
            with pytest.raises(ws.ReceiverError, match=r"model\.norm lacks weight"):
                sender.update_weights(lacking, version=4)
            assert greedy(llm) == wanted[2]
            assert receiver.verify_weights().ok
    finally:
        stop(llm)
