"""Tiny models of many architectures, built from configs: nothing is downloaded."""

import torch
import transformers as t

VOCABULARY = 100

TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BERT = {key: value for key, value in TEXT.items() if key not in ("num_key_value_heads", "head_dim")}
EXPERTS = {
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
LATENT = {  # multi-head latent attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 16,
}
QWEN_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "out_hidden_size": 32,
    "patch_size": 8,
}
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}


def _causal(config, **sizes):
    return lambda: t.AutoModelForCausalLM.from_config(config(**{**TEXT, **sizes}))


def _vision(model, config, text, vision, **sizes):
    def make():
        return model(config(text_config=text(), vision_config=vision(), **sizes))

    return make


def _text(config, **sizes):
    return lambda: config(**{**TEXT, **sizes})


def _gpt2():
    config = t.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    return t.GPT2LMHeadModel(config)


def _t5():
    return t.T5ForConditionalGeneration(
        t.T5Config(
            vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
            decoder_start_token_id=0,
        )
    )  # fmt: skip


def _bart():
    return t.BartForConditionalGeneration(
        t.BartConfig(
            vocab_size=VOCABULARY, d_model=32, encoder_layers=1, decoder_layers=1,
            encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
            decoder_ffn_dim=48, max_position_embeddings=64,
        )
    )  # fmt: skip


MODELS = {
    # dense
    "llama": _causal(t.LlamaConfig),
    "qwen3": _causal(t.Qwen3Config),
    "gpt2": _gpt2,
    # tied
    "qwen2": _causal(t.Qwen2Config, tie_word_embeddings=True),
    "gemma2": _causal(t.Gemma2Config),
    "gemma3_text": _causal(t.Gemma3TextConfig),
    # experts, packed at run time
    "qwen3_moe": _causal(t.Qwen3MoeConfig, **EXPERTS),
    "mixtral": _causal(t.MixtralConfig, num_local_experts=4),
    "gpt_oss": _causal(t.GptOssConfig, num_local_experts=4, num_experts_per_tok=2),
    "llama4_text": _causal(
        t.Llama4TextConfig, num_local_experts=4, intermediate_size_mlp=48,
        interleave_moe_layer_step=2,
    ),
    "deepseek_v3": _causal(t.DeepseekV3Config, **LATENT, num_key_value_heads=4, head_dim=8),
    "glm4_moe": _causal(
        t.Glm4MoeConfig,
        moe_intermediate_size=24,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    "granite_moe": _causal(t.GraniteMoeConfig, num_local_experts=4),
    # state space, and hybrids
    "mamba": lambda: t.MambaForCausalLM(
        t.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=8)
    ),
    "mamba2": lambda: t.Mamba2ForCausalLM(
        t.Mamba2Config(
            vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=8, head_dim=8,
            num_heads=8, n_groups=1,
        )
    ),
    "jamba": _causal(
        t.JambaConfig, num_experts=4, num_experts_per_tok=2, attn_layer_period=2,
        attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, mamba_d_state=8,
        mamba_dt_rank=4, use_mamba_kernels=False,
    ),
    "qwen3_next": _causal(
        t.Qwen3NextConfig, **EXPERTS, shared_expert_intermediate_size=24, linear_num_value_heads=4,
        linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
    ),
    "falcon_h1": _causal(
        t.FalconH1Config, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8,
        mamba_n_groups=1,
    ),
    # vision and text
    "llava": _vision(
        t.LlavaForConditionalGeneration, t.LlavaConfig, _text(t.LlamaConfig),
        lambda: t.CLIPVisionConfig(**VISION, projection_dim=32),
    ),
    "qwen2_5_vl": _vision(
        t.Qwen2_5_VLForConditionalGeneration, t.Qwen2_5_VLConfig,
        lambda: {**TEXT, "rope_parameters": ROPE}, lambda: QWEN_VISION,
    ),
    "qwen3_vl": _vision(
        t.Qwen3VLForConditionalGeneration, t.Qwen3VLConfig,
        lambda: {**TEXT, "rope_parameters": ROPE},
        lambda: {**QWEN_VISION, "deepstack_visual_indexes": [0, 1]},
    ),
    "gemma3": _vision(
        t.Gemma3ForConditionalGeneration, t.Gemma3Config, _text(t.Gemma3TextConfig),
        lambda: t.SiglipVisionConfig(**VISION),
    ),
    "mistral3": _vision(
        t.Mistral3ForConditionalGeneration, t.Mistral3Config, _text(t.MistralConfig),
        lambda: t.PixtralVisionConfig(**VISION),
    ),
    # the checkpoint fuses what the model holds apart
    "hrm_text": _causal(t.HrmTextConfig, num_layers_per_stack=1, num_key_value_heads=4),
    "gte": lambda: t.GteForMaskedLM(t.GteConfig(**BERT)),
    "nomic_bert": lambda: t.NomicBertForMaskedLM(t.NomicBertConfig(**BERT, head_dim=8)),
    "ernie4_5_vl_moe": _vision(
        t.Ernie4_5_VLMoeForConditionalGeneration, t.Ernie4_5_VLMoeConfig,
        lambda: {
            **TEXT, "moe_intermediate_size": [24, 16], "moe_k": 2, "moe_num_experts": 4,
            "mlp_layer_types": ["dense", "sparse"], "rope_parameters": ROPE,
        },
        lambda: {
            key: value for key, value in QWEN_VISION.items() if key != "out_hidden_size"
        },
    ),
    # encoder and decoder
    "t5": _t5,
    "bart": _bart,
    "bert": lambda: t.BertForMaskedLM(t.BertConfig(**BERT)),
}  # fmt: skip


def make(name, seed=0, dtype=torch.float32):
    """A tiny model with random values in all of its parameters and persistent buffers."""
    torch.manual_seed(seed)
    model = MODELS[name]().to(dtype)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.normal_(0, 0.5)
    return model
