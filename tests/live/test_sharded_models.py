"""Sharded trainers of real models: transformers' packed experts, PEFT's adapters, 4 bits."""

import pytest
import torch

from tests.conftest import Ends, assert_all_same, read
from tests.live import trainers
from weightsync.source import as_source


def moe(seed=0):
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=65,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=5,
        num_experts_per_tok=2,
    )
    return AutoModelForCausalLM.from_config(config)


def lora(seed=0):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(
        r=4,
        target_modules=["q_proj", "v_proj", "down_proj"],
        modules_to_save=["lm_head"],
        init_lora_weights=False,
    )
    return get_peft_model(moe(seed), config)


def dora(seed=0):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(r=4, use_dora=True, target_modules=["o_proj"], init_lora_weights=False)
    return get_peft_model(moe(seed), config)


MODELS = {"moe": moe, "lora": lora, "dora": dora}


def build(state, name, kind="fsdp2"):
    model = MODELS[name]()
    state.model = WRAPS[kind](model)


def fsdp2(model):
    layers = [n for n, m in model.named_modules() if type(m).__name__ == "ModuleList"]
    return trainers.fsdp2(model, layers=next(n for n in layers if n.endswith("layers")))


def fsdp2_experts_by_columns(model):
    from torch.distributed.tensor import Shard

    return trainers.fsdp2(
        model,
        layers="model.layers",
        shard_placement_fn=lambda p: Shard(1) if p.dim() == 3 else Shard(0),
    )


def fsdp1(model):
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer

    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Qwen3MoeDecoderLayer}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


WRAPS = {"fsdp2": fsdp2, "fsdp2, columns": fsdp2_experts_by_columns, "fsdp1": fsdp1}


@pytest.mark.parametrize("gather", [True, False], ids=["gathered", "direct"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", WRAPS)
def test_two_ranks_send_what_one_would(world, run_dir, name, kind, gather):
    """M1, L1, D1: checkpoint names and merged values, bit for bit, from shards as from a whole."""
    if kind == "fsdp2, columns" and name != "moe":
        pytest.skip("two columns of experts are what this is about")
    ranks = world(2)
    ranks(build, name, kind)
    before = ranks(trainers.shards)
    ranks(trainers.connect, run_dir, gather=gather)
    ranks(trainers.update, 1)
    manifest, sent = read(Ends(run_dir))
    source = as_source(MODELS[name]())
    assert_all_same(sent, dict(source.tensors()))
    assert manifest.aliases == source.manifest().aliases
    assert "model.layers.1.mlp.experts.4.up_proj.weight" in sent
    for was, now in zip(before, ranks(trainers.shards), strict=True):
        assert_all_same(was, now)
