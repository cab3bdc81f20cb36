"""Buffers: cases B."""

import copy

import pytest
import torch
from torch import nn

from tests.conftest import assert_all_same, read


def zeroed(model):
    twin = copy.deepcopy(model)
    for tensor in [*twin.parameters(), *twin.buffers()]:
        tensor.data.zero_()
    return twin


def test_b1_batch_norm(ends):
    """B1: running statistics arrive bitwise, the 0-dim int64 counter too."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    for _ in range(3):
        model(torch.randn(8, 3) * 5 + 2)
    target = zeroed(model)
    sender, receiver = ends.pair(model, target)
    sender.update_weights(version=1)
    receiver.poll_and_apply()
    assert_all_same(target.state_dict(), model.state_dict())
    counter = target[1].num_batches_tracked
    assert (counter.item(), counter.shape, counter.dtype) == (3, (), torch.int64)
    model(torch.randn(8, 3))
    assert sender.update_weights(version=2).changed
    receiver.poll_and_apply()
    assert target[1].num_batches_tracked.item() == 4


@pytest.fixture(scope="module")
def deepseek():
    transformers = pytest.importorskip("transformers")
    config = transformers.DeepseekV3Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=4,
        max_position_embeddings=64,
    )
    model = transformers.DeepseekV3ForCausalLM(config)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data.normal_()
    return model


def test_b1_router_bias(ends, deepseek):
    """B1, M5: the router's bias is a persistent buffer, and no parameter."""
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert name not in dict(deepseek.named_parameters())
    assert deepseek.state_dict()[name].count_nonzero()
    target = zeroed(deepseek)
    sender, receiver = ends.pair(deepseek, target)
    report = sender.update_weights(version=1)
    _, sent = read(ends, report.version)
    assert torch.equal(sent[name], deepseek.state_dict()[name])
    receiver.poll_and_apply()
    assert_all_same(target.state_dict(), deepseek.state_dict())
    assert receiver.verify_weights().ok


def test_buffers_that_no_checkpoint_holds_stay(ends, deepseek):
    """Not sent, so not touched (promise 8): rotary tables, masks."""
    target = copy.deepcopy(deepseek)
    hidden = {
        name: buffer for name, buffer in target.named_buffers() if name not in target.state_dict()
    }
    assert hidden
    before = {name: buffer.clone() for name, buffer in hidden.items()}
    sender, receiver = ends.pair(deepseek, target)
    sender.update_weights(version=1)
    receiver.poll_and_apply()
    assert_all_same(dict(hidden), before)
