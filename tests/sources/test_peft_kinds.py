"""Every kind of adapter that PEFT can merge: one mechanism, which knows none of them."""

import copy

import peft
import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from tests.conftest import assert_all_same
from tests.sources.test_peft import assert_sent_merged, changed, look, sent, trained
from weightsync.errors import SourceError
from weightsync.source import as_source
from weightsync.sources.quantised import dense_weight
from weightsync.weight import read

QV = ["q", "v"]
KINDS = {
    # configuration class -> what it needs; the weights of q and v change, if nothing else is said
    "AdaLoraConfig": {"target_modules": QV, "init_r": 2, "target_r": 1, "total_step": 10},
    "BOFTConfig": {"target_modules": QV, "boft_block_size": 4},
    "C3AConfig": {"target_modules": QV, "block_size": 4},
    "DeftConfig": {"target_modules": QV},
    "DeloraConfig": {"target_modules": QV, "r": 2},
    "FourierFTConfig": {"target_modules": QV, "n_frequency": 8},
    "FrodConfig": {"target_modules": QV},
    "GloraConfig": {"target_modules": QV},
    "GraloraConfig": {"target_modules": QV, "r": 2, "gralora_k": 2},
    "HiraConfig": {"target_modules": QV, "r": 2},
    "HRAConfig": {"target_modules": QV, "r": 2},
    "IA3Config": {"target_modules": [*QV, "up", "convolution"], "feedforward_modules": ["up"]},
    "LNTuningConfig": {"target_modules": ["norm"]},
    "LoHaConfig": {"target_modules": [*QV, "convolution"], "r": 2},
    "LoKrConfig": {"target_modules": [*QV, "convolution"], "r": 2},
    "LoraConfig": {"target_modules": QV, "r": 2},
    "MissConfig": {"target_modules": QV, "r": 2},
    "OFTConfig": {"target_modules": QV, "oft_block_size": 4, "r": 0},
    "OSFConfig": {"target_modules": QV, "effective_rank": 4},
    "PeanutConfig": {"target_modules": QV},
    "PsoftConfig": {"target_modules": QV, "r": 2},
    "PveraConfig": {"target_modules": QV, "r": 2},
    "RandLoraConfig": {"target_modules": QV, "r": 2},
    "RoadConfig": {"target_modules": QV, "group_size": 4},
    "ShiraConfig": {"target_modules": QV, "r": 2},
    "TinyLoraConfig": {"target_modules": QV},
    "TrainableTokensConfig": {"target_modules": ["table"], "token_indices": [1, 3]},
    "UniLoraConfig": {"target_modules": QV},
    "VBLoRAConfig": {
        "target_modules": QV,
        "r": 2,
        "num_vectors": 4,
        "vector_length": 4,
        "topk": 2,
    },
    "VeraConfig": {"target_modules": QV, "r": 2},
    "WaveFTConfig": {"target_modules": QV, "n_frequency": 8},
}


class Model(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(16, 8, dtype=dtype)
        self.convolution = nn.Conv2d(4, 8, 3, dtype=dtype)
        self.q = nn.Linear(8, 8, dtype=dtype)
        self.v = nn.Linear(8, 8, bias=False, dtype=dtype)
        self.up = nn.Linear(8, 16, dtype=dtype)
        self.norm = nn.LayerNorm(8, dtype=dtype)
        self.config = {"model_type": "none", "tie_word_embeddings": False}

    def forward(self, tokens, image):
        hidden = self.norm(self.v(self.q(self.table(tokens))))
        return torch.cat([self.up(hidden).flatten(), self.convolution(image).flatten()])


def configuration(kind):
    if not hasattr(peft, kind):
        pytest.skip(f"this PEFT has no {kind}")
    return getattr(peft, kind)(**KINDS[kind])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_what_peft_can_merge_is_sent_as_peft_merges_it(kind, dtype):
    config = configuration(kind)
    model = trained(peft.get_peft_model(Model(dtype), config))
    tensors = assert_sent_merged(model)
    expected = {name.split(".")[-1] for name in config.target_modules}
    assert {name.split(".")[0] for name in changed(tensors, Model(dtype))} == expected
    engine = Model(dtype)
    engine.load_state_dict(tensors)
    inputs = torch.arange(16), torch.rand(1, 4, 5, 5).to(dtype)
    exact = {} if dtype is torch.float32 else {"atol": 0.1, "rtol": 0.1}
    torch.testing.assert_close(engine(*inputs), model.eval()(*inputs), **exact)


@pytest.mark.parametrize("kind", ["BeftConfig", "LilyConfig"])
def test_what_peft_cannot_merge_is_refused_in_its_words(kind):
    if not hasattr(peft, kind):
        pytest.skip(f"this PEFT has no {kind}")
    model = peft.get_peft_model(Model(torch.float32), getattr(peft, kind)(target_modules=QV))
    source = as_source(model)
    with pytest.raises(SourceError, match=r"'[qv]\.weight'.*PEFT cannot merge it: \w+Error: \w+"):
        list(source.tensors())


# ---- adapters on packed weights ----


PACKED = {
    "LoRA": ("LoraConfig", {"r": 2}),
    "DoRA": ("LoraConfig", {"r": 2, "use_dora": True}),
    "bias": ("LoraConfig", {"r": 2, "lora_bias": True}),
    "AdaLora": ("AdaLoraConfig", {"init_r": 2, "target_r": 1, "total_step": 10}),
    "HiRA": ("HiraConfig", {"r": 2}),
    "IA3": ("IA3Config", {"feedforward_modules": []}),
    "MiSS": ("MissConfig", {"r": 2}),
    "OFT": ("OFTConfig", {"oft_block_size": 4, "r": 0}),
    "PVeRA": ("PveraConfig", {"r": 2}),
    "RandLora": ("RandLoraConfig", {"r": 2}),
    "VeRA": ("VeraConfig", {"r": 2}),
}


class Quantisable(nn.Module):
    def __init__(self, linear=nn.Linear):
        super().__init__()
        torch.manual_seed(0)
        self.q = linear(64, 64)
        self.norm = nn.LayerNorm(64)
        self.config = {"model_type": "none", "tie_word_embeddings": False}


def quantised(bits):
    bnb = pytest.importorskip("bitsandbytes").nn
    model = Quantisable(bnb.Linear4bit if bits == 4 else bnb.Linear8bitLt)
    if bits == 8:
        model.q = bnb.Linear8bitLt(64, 64, has_fp16_weights=False)
    setattr(model, f"is_loaded_in_{bits}bit", True)
    model.q.to(torch.bfloat16).to("cpu")
    return model


def dequantised(model):
    """The same model, with dense layers that compute with the values that the packed ones have."""
    dense = Quantisable()
    dense.load_state_dict(model.norm.state_dict(prefix="norm."), strict=False)
    dense.q.weight = nn.Parameter(read(dense_weight(model.q)).clone())
    dense.q.bias = nn.Parameter(model.q.bias.detach().clone())
    return dense


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", PACKED)
def test_adapters_on_packed_weights_are_merged_into_what_the_layer_computes_with(kind, bits):
    """PEFT would pack the merged weight anew, and lose much of what was learnt."""
    name, options = PACKED[kind]
    if not hasattr(peft, name):
        pytest.skip(f"this PEFT has no {name}")
    config = getattr(peft, name)(target_modules=["q"], **options)
    model, base = quantised(bits), dequantised(quantised(bits))
    reference = peft.get_peft_model(copy.deepcopy(base), copy.deepcopy(config))
    model = trained(peft.get_peft_model(model, config))
    adapters = {n: t for n, t in model.state_dict().items() if "base_layer" not in n}
    assert not reference.load_state_dict(adapters, strict=False).unexpected_keys
    before = look(model)
    tensors = sent(model)[1]
    assert look(model) == before
    assert_all_same(tensors, sent(reference.merge_and_unload())[1])
    assert "q.weight" in changed(tensors, base)


def test_packed_weights_that_the_checkpoint_has_the_other_way_round():
    """GPT-2: transformers puts bitsandbytes layers in the place of its own ``Conv1D``."""
    model = quantised(4)
    model.q.source_cls = Conv1D
    model = trained(peft.get_peft_model(model, peft.LoraConfig(target_modules=["q"], r=2)))
    usual = quantised(4)
    usual = trained(peft.get_peft_model(usual, peft.LoraConfig(target_modules=["q"], r=2)))
    expected = sent(usual)[1]
    assert_all_same(sent(model)[1], expected | {"q.weight": expected["q.weight"].t()})
