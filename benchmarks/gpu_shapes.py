"""The models of the GPU benchmark: a configuration, and the checkpoint that it stands for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Specs = Iterator[tuple[str, tuple[int, ...]]]


def config_of(shape: str) -> Any:
    """A transformers configuration: ``tiny``, ``1b``, ``7b`` (Llama) or ``moe`` (Qwen3-MoE)."""
    import transformers

    common = {"max_position_embeddings": 4096, "torch_dtype": "bfloat16", "vocab_size": 32000}
    if shape == "moe":
        return transformers.Qwen3MoeConfig(
            hidden_size=2048,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_hidden_layers=8,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            num_experts=64,
            num_experts_per_tok=8,
            tie_word_embeddings=False,
            architectures=["Qwen3MoeForCausalLM"],
            **common,
        )
    hidden, intermediate, layers, heads, kv = {
        "tiny": (256, 512, 2, 4, 2),
        "1b": (2048, 8192, 16, 32, 8),
        "7b": (4096, 11008, 32, 32, 32),
    }[shape]
    return transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        architectures=["LlamaForCausalLM"],
        **common,
    )


def specs(config: Any) -> Specs:
    """Names and shapes of the checkpoint."""
    h, vocab = config.hidden_size, config.vocab_size
    head = getattr(config, "head_dim", None) or h // config.num_attention_heads
    q, kv = head * config.num_attention_heads, head * config.num_key_value_heads
    experts = getattr(config, "num_experts", 0)
    yield "model.embed_tokens.weight", (vocab, h)
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}."
        for name, size in (("q", (q, h)), ("k", (kv, h)), ("v", (kv, h)), ("o", (h, q))):
            yield f"{at}self_attn.{name}_proj.weight", size
        if experts:
            yield f"{at}self_attn.q_norm.weight", (head,)
            yield f"{at}self_attn.k_norm.weight", (head,)
            yield f"{at}mlp.gate.weight", (experts, h)
            for expert in range(experts):
                yield from _mlp(f"{at}mlp.experts.{expert}.", h, config.moe_intermediate_size)
        else:
            yield from _mlp(f"{at}mlp.", h, config.intermediate_size)
        yield f"{at}input_layernorm.weight", (h,)
        yield f"{at}post_attention_layernorm.weight", (h,)
    yield "model.norm.weight", (h,)
    yield "lm_head.weight", (vocab, h)


def _mlp(at: str, hidden: int, intermediate: int) -> Specs:
    yield f"{at}gate_proj.weight", (intermediate, hidden)
    yield f"{at}up_proj.weight", (intermediate, hidden)
    yield f"{at}down_proj.weight", (hidden, intermediate)
