"""Copy plans on a GPU: what they leave is what vLLM's layerwise reload leaves, bit for bit.

As in ``tests/vllm/test_copy_plan.py``, with vLLM's layers as they are on a GPU.
"""

import importlib.util

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(60),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm"),
]

if torch.cuda.is_available() and importlib.util.find_spec("vllm"):
    from tests.vllm.conftest import llama_config, mixtral_config
    from tests.vllm.test_architectures import CONFIGS, DEEPSEEK, TEXT, config_of, seeing
    from tests.vllm.test_copy_plan import follows, parallel  # noqa: F401

BFLOAT16 = {"sent": torch.bfloat16, "dtype": "bfloat16"}


def test_a_dense_model_is_planned_whole(tmp_path):
    plan, _ = follows(llama_config(attention_bias=True), tmp_path, **BFLOAT16)
    assert plan.fallback == {}
    assert plan.conversions == ()


def test_a_tied_model_is_planned_whole(tmp_path):
    from transformers import Qwen2Config

    plan, _ = follows(Qwen2Config(**TEXT, tie_word_embeddings=True), tmp_path, **BFLOAT16)
    assert plan.fallback == {}


def test_weights_that_are_cast_are_converted(tmp_path):
    plan, _ = follows(llama_config(), tmp_path, dtype="bfloat16")
    assert plan.fallback == {}
    assert len(plan.length) == 0


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe", "glm4_moe", "phi3", "gpt2"])
def test_what_a_plan_leaves_is_what_a_reload_leaves(name, tmp_path):
    """Experts may be repacked, which depends on the GPU and vLLM's release; never wrong."""
    plan, _ = follows(config_of(CONFIGS[name]), tmp_path, **BFLOAT16)
    print(f"{name}: {plan.share:.2f}, {plan.fallback}")
    assert plan.share > 0.1, plan.fallback


def test_mixtral(tmp_path):
    plan, _ = follows(mixtral_config(), tmp_path, **BFLOAT16)
    print(f"mixtral: {plan.share:.2f}, {plan.fallback}")
    assert plan.share > 0.1, plan.fallback


def test_latent_attention(tmp_path):
    plan, _ = follows(config_of(DEEPSEEK), tmp_path, **BFLOAT16)
    print(f"deepseek: {plan.share:.2f}, {plan.fallback}")
    assert plan.share > 0.1, plan.fallback


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "gemma3_vl"])
def test_a_model_that_sees(name, tmp_path):
    pytest.importorskip("torchvision", reason="vLLM needs it", exc_type=Exception)
    kinds = ("image", "video") if name == "qwen2_5_vl" else ("image",)
    limits = {"limit_mm_per_prompt": dict.fromkeys(kinds, 0)}
    plan, _ = follows(seeing(name), tmp_path, **BFLOAT16, **limits)
    print(f"{name}: {plan.share:.2f}, {plan.fallback}")
    assert plan.share > 0.5, plan.fallback


def test_what_is_quantised_while_it_is_loaded_falls_back(tmp_path):
    """Q5: online fp8; norms and embeddings are planned, and scales follow the weights."""
    config = llama_config(hidden_size=512, num_attention_heads=8, num_key_value_heads=4)
    plan, _ = follows(config, tmp_path, **BFLOAT16, quantization="fp8")
    for layer in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.down_proj"):
        assert f"model.layers.0.{layer}" in plan.fallback, plan.fallback
    assert "model.norm" not in plan.fallback
    assert "model.embed_tokens" not in plan.fallback
