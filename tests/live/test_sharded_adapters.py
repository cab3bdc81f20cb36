"""Adapters in a trainer of several ranks: each layer is merged from whole tensors."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from tests.conftest import assert_all_same, read
from tests.live import trainers
from tests.live.test_sharded import ends_of
from tests.sources.test_peft import ATTENTION, SEVEN, TOKENS, adapted, qwen2, sent

TRAINERS = {
    "parts": {"target_modules": [*SEVEN, "embed_tokens"], "modules_to_save": ["lm_head"]},
    "DoRA": {"target_modules": SEVEN, "use_dora": True},
    "tied": {"target_modules": ATTENTION, "lora_bias": True, "trainable_token_indices": [1, 3]},
}


def trainer(kind):
    return adapted(qwen2(tied=kind == "tied"), **TRAINERS[kind])


def build(state, kind):
    """FSDP2 around blocks; around tuner layers too, and around what is in them."""
    state.model = trainer(kind)
    for layer in state.model.get_base_model().model.layers:
        if kind == "parts":
            fully_shard(layer.self_attn.q_proj)
            fully_shard(layer.self_attn.v_proj.lora_A["default"])
            fully_shard(layer.mlp.up_proj.base_layer)
        fully_shard(layer)
    fully_shard(state.model)


def forward(state):
    """Leaves the outermost parameters gathered."""
    with torch.no_grad():
        state.model(TOKENS)


@pytest.mark.parametrize("gather", [True, False], ids=["gathered", "direct"])
@pytest.mark.parametrize("kind", TRAINERS)
def test_two_ranks_send_the_merged_model(world, run_dir, kind, gather):
    """L1 and W8: every bit, under the base model's names; the trainer stays as it was."""
    ranks = world(2)
    ranks(build, kind)
    before = ranks(trainers.shards)
    ranks(trainers.connect, run_dir, gather=gather)
    expected, values = sent(trainer(kind).merge_and_unload())
    for version in (1, 2):
        ranks(trainers.update, version)
        manifest, tensors = read(ends_of(run_dir))
        assert manifest.aliases == expected.aliases
        assert_all_same(tensors, values)
        ranks(forward)
    for was, now in zip(before, ranks(trainers.shards), strict=True):
        assert_all_same(was, now)
