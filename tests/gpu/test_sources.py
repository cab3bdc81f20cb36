"""Trainers on a GPU: what is gathered, merged or unpacked there arrives bit for bit."""

import copy

import pytest
import torch

from tests.conftest import assert_all_same, read, send
from tests.live import trainers
from tests.live.world import World

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def ranks(tmp_path):
    """Two ranks that share one GPU."""
    made = World(2, tmp_path / "store", on_gpu=True)
    yield made
    made.dispose()


@pytest.mark.parametrize("gather", [True, False], ids=["gathered", "direct"])
@pytest.mark.parametrize("kind", ["fsdp2", "fsdp2, offloaded", "fsdp1", "tensor parallel"])
def test_ranks_send_the_whole_model(ranks, run_dir, kind, gather):
    from tests.conftest import Ends

    ranks(trainers.build, kind, width=304, device="cuda")
    ranks(trainers.connect, run_dir, gather=gather)
    for version in (1, 2):
        ranks(trainers.update, version)
        sent = read(Ends(run_dir))[1]
        assert_all_same(sent, dict(trainers.plain(width=304).state_dict()))
    ranks(trainers.end_senders)


SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lora_is_merged_on_the_gpu(ends, dtype):
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(**SMALL, head_dim=16)
    base = transformers.AutoModelForCausalLM.from_config(config).to("cuda", dtype)
    lora = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(base, lora)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    _, sent = send(ends, model)
    merged = copy.deepcopy(model).merge_and_unload().state_dict()
    assert_all_same({n: t.cpu() for n, t in merged.items()}, sent)
    assert_all_same(dict(model.state_dict()), before)


def test_packed_experts_on_the_gpu(ends):
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        **SMALL, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2
    )
    model = transformers.AutoModelForCausalLM.from_config(config).cuda()
    _, sent = send(ends, model)
    packed = model.model.layers[1].mlp.experts.gate_up_proj
    gate = sent["model.layers.1.mlp.experts.2.gate_proj.weight"]
    up = sent["model.layers.1.mlp.experts.2.up_proj.weight"]
    assert torch.equal(torch.cat([gate, up]), packed[2].detach().cpu())


def test_four_bits_on_the_gpu(ends):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    layer = bitsandbytes.nn.Linear4bit(64, 32, compute_dtype=torch.bfloat16, quant_type="nf4")
    layer = layer.to(torch.bfloat16).cuda()
    _, sent = send(ends, torch.nn.Sequential(layer))
    weight = layer.weight
    expected = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
    assert set(sent) == {"0.weight", "0.bias"}
    assert torch.equal(sent["0.weight"], expected.cpu())
