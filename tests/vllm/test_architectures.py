"""Architectures of many kinds: one sync gives a real vLLM what loading the checkpoint gives it.

Every engine starts with other weights than those it is sent. What vLLM generates from a saved
checkpoint of one of these models is what transformers generates with the model itself, so that
one engine is enough for each: it says first that this is so.
"""

import copy
import hashlib
from contextlib import contextmanager

import pytest
import torch

import weightsync as ws
from tests.vllm.conftest import expected, greedy, make_llm, stop
from weightsync.source import as_source

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TEXT = {
    "vocab_size": 100,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}
HEADS = {"head_dim": 32}
EXPERTS = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT = {
    **ROUTED,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 512,  # the one size that vLLM's CPU build has a kernel for
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "n_shared_experts": 1,
}
MAMBA = {"num_heads": 8, "head_dim": 32, "state_size": 16, "n_groups": 1}
VISION = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 16,
}
ROPE = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
GPT2 = {"vocab_size": 100, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 256}
GEMMA = {**HEADS, "query_pre_attn_scalar": 32, "sliding_window": 64}

CONFIGS = {
    # name -> class of its config, and what is not as in TEXT
    "gpt2": ("GPT2Config", GPT2),
    "gemma3": ("Gemma3TextConfig", GEMMA),
    "qwen3_moe": ("Qwen3MoeConfig", {**HEADS, **EXPERTS}),
    "glm4_moe": ("Glm4MoeConfig", {**HEADS, **ROUTED}),
    "falcon_h1": (
        "FalconH1Config",
        {
            **HEADS,
            "mamba_d_ssm": 128,
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
        },
    ),
    "qwen3": ("Qwen3Config", HEADS),
    "phi3": ("Phi3Config", {}),
    "glm4": ("Glm4Config", HEADS),
    "olmo2": ("Olmo2Config", {}),
    "qwen2_moe": ("Qwen2MoeConfig", {**EXPERTS, "shared_expert_intermediate_size": 64}),
    "olmoe": (
        "OlmoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    ),
    "granite_moe": ("GraniteMoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": (
        "GptOssConfig",
        {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64},
    ),
    "llama4": (
        "Llama4TextConfig",
        {
            **HEADS,
            "num_local_experts": 4,
            "intermediate_size_mlp": 256,
            "interleave_moe_layer_step": 1,
            "attention_chunk_size": 128,
        },
    ),
    "mamba2": ("Mamba2Config", MAMBA),
}
DEEPSEEK = "DeepseekV3Config", {**LATENT, "topk_method": "noaux_tc"}

DEFAULT = ()


def config_of(description):
    import transformers

    kind, changes = description
    return getattr(transformers, kind)(**{**TEXT, **changes})


def make(config, seed):
    """A model that says different things with different weights."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    wrapper = hasattr(config, "vision_config")
    auto = AutoModelForImageTextToText if wrapper else AutoModelForCausalLM
    torch.manual_seed(seed)
    model = auto.from_config(config).float().eval()
    with torch.no_grad():
        tensors = dict(model.named_parameters())  # tied ones once
        tensors |= {name: b for name, b in model.named_buffers() if name in model.state_dict()}
        for name, tensor in tensors.items():
            if "embed" in name:  # or models that are tied to it repeat the last token for ever
                tensor.normal_(0, 0.02)
            elif tensor.dim() > 1:
                tensor.normal_(0, 0.2)
            else:
                tensor.uniform_(0.5, 1.5)
    return model


@contextmanager
def engine(model, folder, path, **options):
    """An engine that starts with a model's saved checkpoint, and an attached sender."""
    model.save_pretrained(folder)
    llm = make_llm(folder, "safetensors", **options)
    try:
        scheme = ws.DoubleBufferScheme(path)
        with scheme.create_sender() as sender, scheme.create_receiver(llm) as receiver:
            sender.connect()
            sender.attach(receiver)
            yield llm, sender
    finally:
        stop(llm)


def follows(config, folder, path, **options):
    """Whether an engine's tokens are those of each model it is sent."""
    first, second = make(config, 1), make(config, 2)
    tokens = {model: expected(model) for model in (first, second)}
    assert tokens[first] != tokens[second]
    with engine(first, folder, path, **options) as (llm, sender):
        assert greedy(llm) == tokens[first]
        for number, model in enumerate([second, first, second]):
            sender.update_weights(model, version=number)
            assert greedy(llm) == tokens[model], f"update {number}"


def marks(name):
    return [] if name in DEFAULT else [pytest.mark.slow]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks(name)) for name in CONFIGS if name != "glm4_moe"]
)
def test_the_tokens_are_those_of_the_model_that_was_sent(name, tmp_path, path):
    follows(config_of(CONFIGS[name]), tmp_path, path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_the_models_of_transformers_inside_vllm(name, tmp_path, path):
    """What vLLM runs for an architecture that it has no model of its own for."""
    follows(config_of(CONFIGS[name]), tmp_path, path, model_impl="transformers")


@pytest.mark.slow
def test_a_router_with_a_bias(tmp_path, path):
    """B1: the bias is a buffer, which vLLM loads in a way of its own.

    It is the new one after an update, and the old one after an update that was refused.
    """
    config = config_of(CONFIGS["glm4_moe"])
    first, second = make(config, 1), make(config, 2)
    with engine(first, tmp_path, path) as (llm, sender):
        assert greedy(llm) == expected(first)
        sender.update_weights(second, version=1)
        tokens = expected(second)
        assert greedy(llm) == tokens
        third = copy.deepcopy(second)
        for name, bias in third.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias.copy_(5 - 4 * bias)
        assert expected(third) != tokens
        lacking = dict(as_source(third).tensors())
        del lacking["model.norm.weight"]
        with pytest.raises(ws.ReceiverError, match=r"model\.norm lacks weight"):
            sender.update_weights(lacking, version=2)
        assert greedy(llm) == tokens
        lacking = dict(as_source(third).tensors())
        name = next(name for name in lacking if name.endswith("e_score_correction_bias"))
        del lacking[name]
        with pytest.raises(ws.ReceiverError, match=r"gate lacks e_score_correction_bias"):
            sender.update_weights(lacking, version=3)
        assert greedy(llm) == tokens
        sender.update_weights(third, version=4)
        assert greedy(llm) == expected(third)


def digests(model):
    """Of every tensor that a vLLM model holds, parameter or not."""
    found = {}
    for prefix, module in model.named_modules():
        tensors = {**module._parameters, **module._buffers, **vars(module)}
        for name, tensor in tensors.items():
            if isinstance(tensor, torch.Tensor) and tensor.numel() and "cache" not in name:
                flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
                found[f"{prefix}.{name}"] = hashlib.sha256(flat.numpy()).hexdigest()
    return found


@pytest.mark.slow
def test_latent_attention(tmp_path, path, monkeypatch):
    """DeepSeek-V3: what the engine derives from the weights is derived anew.

    By its tensors, since vLLM's CPU build answers one prompt with other tokens each time.
    """
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # sends a function to the worker
    config = config_of(DEEPSEEK)
    first, second = make(config, 1), make(config, 2)
    with engine(second, tmp_path / "2", path) as (llm, _):
        (expected_digests,) = llm.apply_model(digests)
    with engine(first, tmp_path / "1", path) as (llm, sender):
        (before,) = llm.apply_model(digests)
        assert before.keys() == expected_digests.keys()
        assert any("W_UV" in name for name in before)
        assert sum(before[name] != expected_digests[name] for name in before) > 15
        for number, model in enumerate([second, first, second]):
            sender.update_weights(model, version=number)
            wanted = before if model is first else expected_digests
            assert llm.apply_model(digests) == [wanted]


def seeing(name):
    """The configuration of a model that sees."""
    import transformers as t

    special = {"image_token_id": 99, "vision_start_token_id": 97, "vision_end_token_id": 96}
    configs = {
        "llava": lambda: t.LlavaConfig(
            text_config=t.LlamaConfig(**TEXT, **HEADS),
            vision_config=t.CLIPVisionConfig(**VISION, projection_dim=32),
            image_token_index=99,
            dtype="float32",
        ),
        "qwen2_5_vl": lambda: t.Qwen2_5_VLConfig(
            text_config={**TEXT, "rope_parameters": ROPE},
            vision_config={
                "depth": 1,
                "hidden_size": 128,
                "intermediate_size": 256,
                "num_heads": 4,
                "out_hidden_size": 128,
            },
            **special,
            video_token_id=98,
            dtype="float32",
        ),
        "gemma3_vl": lambda: t.Gemma3Config(
            text_config={**TEXT, **GEMMA},
            vision_config=VISION,
            mm_tokens_per_image=4,
            image_token_index=99,
            boi_token_index=98,
            eoi_token_index=97,
            dtype="float32",
        ),
    }
    return configs[name]()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "gemma3_vl"])
def test_n1_a_wrapper_model(name, tmp_path, path):
    """N1: vLLM knows the names that are sent, and not those that the model has at run time."""
    pytest.importorskip(
        "torchvision", reason="vLLM needs it for models that see", exc_type=Exception
    )
    kinds = ("image", "video") if name == "qwen2_5_vl" else ("image",)
    follows(seeing(name), tmp_path, path, limit_mm_per_prompt=dict.fromkeys(kinds, 0))
