"""Packed parameters: what the layers compute with is sent, or refused by name; never the bytes."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.conftest import assert_all_same, assert_same, send
from weightsync.errors import SourceError
from weightsync.source import SourceOptions, as_source, as_value
from weightsync.sources.quantised import as_stored, dense_weight

bitsandbytes = pytest.importorskip("bitsandbytes")
functional = bitsandbytes.functional

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def four_bit(rows=64, columns=128, dtype=torch.bfloat16, quant_storage=torch.uint8, **options):
    """A layer that is quantised as it is in use: by moving it to where it will run."""
    torch.manual_seed(0)
    layer = bitsandbytes.nn.Linear4bit(
        columns, rows, quant_storage=quant_storage, compute_dtype=torch.bfloat16, **options
    )
    return layer.to(dtype).to("cpu")


def eight_bit(rows=48, columns=64, dtype=torch.bfloat16, has_fp16_weights=False):
    torch.manual_seed(0)
    layer = bitsandbytes.nn.Linear8bitLt(columns, rows, has_fp16_weights=has_fp16_weights)
    return layer.to(dtype).to("cpu")


def dense(layer):
    """The values of a layer's weight, by bitsandbytes' own functions."""
    weight = layer.weight
    if isinstance(weight, bitsandbytes.nn.Params4bit):
        return functional.dequantize_4bit(weight.data, weight.quant_state)
    scales = layer.state.SCB if weight.SCB is None else weight.SCB
    return functional.int8_vectorwise_dequant(weight.data, scales)


def tensors(model, **options):
    return dict(as_source(model, SourceOptions(**options)).tensors())


@pytest.mark.parametrize("storage", [torch.uint8, torch.int8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("twice", [True, False], ids=["double", "single"])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_4_bit_layers_are_sent_as_bitsandbytes_unpacks_them(kind, twice, storage):
    layer = four_bit(quant_type=kind, compress_statistics=twice, quant_storage=storage)
    assert layer.weight.dtype == storage
    sent = tensors(nn.Sequential(layer))
    assert_all_same(sent, {"0.weight": dense(layer), "0.bias": layer.bias})
    assert sent["0.weight"].shape == (64, 128)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_4_bit_layers_are_sent_in_the_dtype_that_they_had(dtype):
    layer = four_bit(dtype=dtype)
    assert_same(tensors(layer)["weight"], dense(layer))
    assert dense_weight(layer).dtype == dtype


def test_8_bit_layers_are_sent_as_bitsandbytes_unpacks_them():
    layer = eight_bit()
    assert layer.weight.dtype == torch.int8
    sent = tensors(nn.Sequential(layer))
    assert_all_same(sent, {"0.weight": dense(layer), "0.bias": layer.bias})
    assert sent["0.weight"].dtype == torch.float32
    assert tensors(layer)["weight"].std() > 0.01


def test_8_bit_scales_are_found_in_the_layer_after_a_forward_pass():
    layer = eight_bit()
    before = tensors(layer)["weight"]
    with torch.no_grad():
        layer(torch.randn(2, 64).bfloat16())
    assert layer.weight.SCB is None
    assert_same(tensors(layer)["weight"], before)


def test_8_bit_layers_that_keep_their_floats_send_them():
    layer = eight_bit(has_fp16_weights=True)
    with torch.no_grad():
        layer(torch.randn(2, 64).bfloat16())
    assert layer.state.SCB is not None  # of what the forward pass packed for itself
    assert_all_same(tensors(layer), {"weight": layer.weight, "bias": layer.bias})


@pytest.mark.parametrize(
    "layer",
    [
        bitsandbytes.nn.Linear4bit(64, 32),
        bitsandbytes.nn.Linear8bitLt(64, 32, has_fp16_weights=False),
        bitsandbytes.nn.Embedding4bit(32, 64),
        bitsandbytes.nn.Embedding8bit(32, 64),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_that_are_not_quantised_yet_send_their_floats(layer):
    layer = copy.deepcopy(layer)
    assert_same(tensors(layer)["weight"], layer.weight.data)
    assert dense_weight(layer) is layer.weight
    source = as_source(layer)
    source.manifest()
    layer.to("cpu")  # quantised: the same source sees it
    assert layer.weight.dtype in (torch.uint8, torch.int8)
    assert_same(dict(source.tensors())["weight"], dense_of_any(layer))


def dense_of_any(layer):
    layer.state = getattr(layer, "state", None)
    return dense(layer)


@pytest.mark.parametrize("kind", ["Embedding4bit", "EmbeddingNF4", "Embedding8bit"])
def test_embeddings(kind):
    layer = getattr(bitsandbytes.nn, kind)(48, 64).to("cpu")
    sent = tensors(layer)
    assert_all_same(sent, {"weight": dense_of_any(layer)})
    assert sent["weight"].shape == (48, 64)
    rows = layer(torch.arange(48))
    assert torch.allclose(sent["weight"].to(rows.dtype), rows, atol=1e-6)


def test_what_is_packed_into_a_single_row_is_not_transposed():
    """bitsandbytes takes it for the transposed form of its old days."""
    layer = four_bit(rows=4, columns=2, dtype=torch.float32, quant_storage=torch.float32)
    assert layer.weight.shape == (1, 1)
    assert_same(tensors(layer)["weight"], dense(layer).t())
    assert tensors(layer)["weight"].shape == (4, 2)


def test_dtype_and_shape_are_known_without_dequantising(monkeypatch):
    """Metadata without data."""
    model = nn.Sequential(four_bit(), eight_bit())

    def never(*args, **kwargs):
        raise AssertionError

    monkeypatch.setattr(functional, "dequantize_4bit", never)
    monkeypatch.setattr(functional, "int8_vectorwise_dequant", never)
    inventory = as_source(model).inventory()
    described = {spec.name: str(spec) for spec in inventory.manifest.tensors}
    assert described["0.weight"] == "bfloat16[64, 128]"
    assert described["1.weight"] == "float32[48, 64]"
    with pytest.raises(AssertionError):
        list(inventory.stream())


def test_only_names_of_the_checkpoint_are_sent(ends):
    """What bitsandbytes adds to a state_dict means nothing without the packed bytes."""
    model = nn.Sequential(four_bit(), eight_bit())
    assert len(model.state_dict()) > 4
    manifest, sent = send(ends, model)
    assert manifest.names() == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert_same(sent["0.weight"], dense(model[0]))
    assert_same(sent["1.weight"], dense(model[1]))


def test_a_cast_is_of_the_dequantised_values(ends):
    model = nn.Sequential(eight_bit())
    _, sent = send(ends, model, dtype=torch.bfloat16)
    assert_same(sent["0.weight"], dense(model[0]).bfloat16())


def test_the_trainer_is_not_changed():
    """Promise 3. A state_dict would pack a layer anew that has run on the CPU."""
    model = nn.Sequential(four_bit(), eight_bit(rows=16, columns=64)).eval()
    with torch.no_grad():
        model(torch.randn(2, 128).bfloat16())
    weights = [layer.weight for layer in model]
    state = model[0].weight.quant_state
    before = [weight.data.clone() for weight in weights], vars(state).copy()
    tensors(model)
    assert [layer.weight for layer in model] == weights
    for weight, data in zip(weights, before[0], strict=True):
        assert_same(weight.data, data)
    assert all(vars(state)[name] is value for name, value in before[1].items())
    assert model[1].weight.SCB is None
    assert model[1].state.SCB is not None


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("twice", [True, False], ids=["double", "single"])
def test_layers_that_a_forward_pass_packed_anew_for_the_cpu(twice, storage, dtype):
    layer = four_bit(dtype=dtype, compress_statistics=twice, quant_storage=storage)
    state = layer.weight.quant_state
    scales = state.absmax
    if twice:
        scales = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    rounded = functional.QuantState(
        absmax=scales.bfloat16().float(),
        shape=state.shape,
        blocksize=state.blocksize,
        quant_type=state.quant_type,
        dtype=dtype,
        code=state.code,
    )
    expected = functional.dequantize_4bit(layer.weight.data, rounded)
    # What a forward pass in eval mode does, where the CPU has the instructions for it.
    layer.weight.data, layer.weight.quant_state = functional._convert_weight_packed_for_cpu(
        layer.weight.data, state
    )
    assert dense_weight(layer).dtype == dtype  # and not that of its rounded scales
    assert_same(tensors(layer)["weight"], expected)


def test_t1_ties_are_kept():
    model = nn.Sequential(four_bit(), four_bit(), eight_bit(), eight_bit())
    model[1].weight = model[0].weight
    model[3].weight = model[2].weight
    manifest = as_source(model).manifest()
    assert manifest.aliases == {"1.weight": "0.weight", "3.weight": "2.weight"}


def test_every_update_sees_what_the_parameter_is_then():
    layer = four_bit()
    source = as_source(layer)
    first = dict(source.tensors())["weight"]
    layer.weight = bitsandbytes.nn.Params4bit(-dense(layer), requires_grad=False).to("cpu")
    assert_same(dict(source.tensors())["weight"], dense(layer))
    assert not torch.equal(dense(layer), first)


def test_a_parameter_alone_is_sent_where_it_knows_its_scales():
    four, eight = four_bit(), eight_bit()
    weights = {"a": four.weight, "b": eight.weight}
    expected = {"a": dense(four), "b": dense(eight)}
    assert_all_same(tensors(weights), expected)
    assert_all_same(tensors(list(weights.items())), expected)


def lost_in_sharding():
    """FSDP leaves a plain parameter of packed bytes; the layer knows the state."""
    layer = four_bit()
    layer.weight = nn.Parameter(layer.weight.data.clone(), requires_grad=False)
    return layer


def test_the_scales_of_a_parameter_that_was_sharded_are_found_in_the_layer():
    layer = lost_in_sharding()
    assert_same(tensors(layer)["weight"], dense(four_bit()))


def test_a_layer_that_was_dequantised_by_hand_is_plain():
    layer = four_bit()
    layer.weight = nn.Parameter(dense(layer))
    assert tensors(layer)["weight"] is layer.weight


def without_scales_4():
    layer = lost_in_sharding()
    layer.quant_state = None
    return layer


def without_scales_4_in_floats():
    layer = four_bit(quant_storage=torch.bfloat16)
    layer.weight = nn.Parameter(layer.weight.data.clone(), requires_grad=False)
    layer.quant_state = None
    return layer


def without_state_4():
    layer = four_bit(quant_storage=torch.bfloat16)
    layer.weight.quant_state = layer.quant_state = None
    return layer


def without_scales_8():
    layer = eight_bit()
    layer.weight.SCB = None
    return layer


def on_meta():
    with torch.device("meta"):
        return bitsandbytes.nn.Linear4bit(64, 32)


@pytest.mark.parametrize(
    "make",
    [without_scales_4, without_scales_4_in_floats, without_state_4, without_scales_8, on_meta],
)
def test_what_cannot_be_unpacked_is_refused_by_name(make):
    """Promise 9."""
    model = nn.Sequential(make(), nn.Linear(2, 2))
    with pytest.raises(SourceError, match=r"'0\.weight' cannot be sent: it is"):
        as_source(model).manifest()
    with pytest.raises(SourceError, match="it is"):
        dense_weight(model[0])
    options = SourceOptions(strict=False)
    assert "1.weight" in as_source(model, options).manifest().names()
    assert "0.weight" not in as_source(model, options).manifest().names()
    as_source(model, SourceOptions(exclude=["0.*"])).manifest()


def test_the_parameter_alone_of_an_8_bit_layer_that_has_run_is_refused():
    layer = eight_bit()
    with torch.no_grad():
        layer(torch.randn(2, 64).bfloat16())
    with pytest.raises(SourceError, match=r"'w'.*int8.*pass the module"):
        as_value("w", layer.weight)


def test_the_parameter_alone_is_refused_where_only_the_layer_knows_its_scales():
    weight = without_state_4().weight
    assert weight.dtype == torch.bfloat16  # it could be taken for values
    with pytest.raises(SourceError, match=r"'w'.*bfloat16.*pass the module"):
        as_value("w", weight)


def test_dense_weight_is_the_parameter_itself_of_a_plain_layer():
    layer = nn.Linear(3, 2)
    assert dense_weight(layer) is layer.weight
    assert as_stored(layer, layer.weight) is layer.weight
    odd = nn.Bilinear(2, 3, 4)
    assert dense_weight(odd) is odd.weight
    with pytest.raises(SourceError, match="ReLU"):
        dense_weight(nn.ReLU())
    layer.weight.data = layer.weight.data.to(torch.float8_e4m3fn)
    with pytest.raises(SourceError, match="float8"):
        dense_weight(layer)


def test_experts_that_bitsandbytes_packed_in_place():
    parametrize = pytest.importorskip("bitsandbytes.nn.parametrize")
    layer = nn.Module()
    layer.gate = nn.Linear(4, 4)
    layer.up = nn.Parameter(torch.randn(2, 64, 32))
    parametrize.replace_parameter_4bit(layer, "up")
    sent = tensors(nn.ModuleDict({"experts": layer}))
    assert set(sent) == {"experts.up", "experts.gate.weight", "experts.gate.bias"}
    assert_same(sent["experts.up"], layer.up)


# ---------------------------------------------------------------- transformers


def checkpoint(kind, path):
    """A tiny random model, saved; the model."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = {
        "llama": lambda: transformers.LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=96,
        ),
        "gpt2": lambda: transformers.GPT2Config(
            n_embd=64, n_layer=1, n_head=4, vocab_size=96, n_positions=16, eos_token_id=0
        ),
    }[kind]()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(path)
    return model


def load(path, **options):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, **options)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_quantised_transformers_model_is_sent_as_its_checkpoint(kind, bits, tmp_path):
    """The names and shapes of the model that was not quantised (GPT-2's are transposed)."""
    plain = checkpoint(kind, tmp_path)
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=bits == 4,
        load_in_8bit=bits == 8,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = load(tmp_path, quantization_config=config)
    wanted, manifest = as_source(plain).manifest(), as_source(model).manifest()
    assert set(manifest.names()) == set(wanted.names())
    assert {n: manifest.spec(n).shape for n in wanted.names()} == {
        n: wanted.spec(n).shape for n in wanted.names()
    }
    sent = tensors(model)
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, (bitsandbytes.nn.Linear4bit, bitsandbytes.nn.Linear8bitLt))
    }
    assert layers
    for name, layer in layers.items():
        values = dense(layer)
        assert_same(sent.pop(f"{name}.weight"), values.t() if kind == "gpt2" else values)
    for name, tensor in sent.items():
        assert_same(tensor, plain.get_parameter(name))


def test_a_model_that_was_dequantised_is_plain(tmp_path):
    checkpoint("llama", tmp_path)
    from transformers import BitsAndBytesConfig

    model = load(tmp_path, quantization_config=BitsAndBytesConfig(load_in_4bit=True))
    before = tensors(model)
    model = model.dequantize()
    assert_all_same(tensors(model), before)


# ---------------------------------------------------------------- packed by others


class PackedLinear(nn.Module):
    """Holds what GPTQ and AWQ layers hold."""

    def __init__(self):
        super().__init__()
        for name in ("qweight", "qzeros", "g_idx"):
            self.register_buffer(name, torch.zeros(8, 4, dtype=torch.int32))
        self.register_buffer("scales", torch.ones(8, 4, dtype=torch.float16))
        self.bias = nn.Parameter(torch.zeros(4))


class ScaledLinear(nn.Linear):
    """As fp8 checkpoints have it: floats of a byte, and their scales."""

    def __init__(self):
        super().__init__(8, 8, bias=False)
        self.weight = nn.Parameter(self.weight.data.to(torch.float8_e4m3fn), requires_grad=False)
        self.weight_scale_inv = nn.Parameter(torch.ones(1, 1))


def quantised_by(method, layer, tmp_path):
    model = checkpoint("llama", tmp_path)
    model.model.layers[0].mlp.up_proj = layer
    model.hf_quantizer = SimpleNamespace(quantization_config=SimpleNamespace(quant_method=method))
    return model


@pytest.mark.parametrize(
    ("method", "layer", "names"),
    [
        ("gptq", PackedLinear, ["qweight", "qzeros", "g_idx", "scales", "bias"]),
        ("awq", PackedLinear, ["qweight", "scales"]),
        ("fp8", ScaledLinear, ["weight", "weight_scale_inv"]),
    ],
)
def test_what_another_quantizer_packed_is_refused_by_name(method, layer, names, tmp_path):
    model = quantised_by(method, layer(), tmp_path)
    for name in names:
        only = SourceOptions(include=[f"*up_proj.{name}"])
        with pytest.raises(SourceError, match=rf"up_proj\.{name}'.*{method} packed.*dequantise"):
            as_source(model, only).manifest()
    rest = as_source(model, SourceOptions(exclude=["*up_proj*"])).manifest().names()
    assert "model.layers.0.mlp.down_proj.weight" in rest
    model.hf_quantizer = None  # what is packed is not known by its name or its dtype
    assert f"model.layers.0.mlp.up_proj.{names[0]}" in as_source(model).manifest().names()


def test_a_model_that_another_quantizer_unpacked_while_it_was_loaded_is_sent(tmp_path):
    model = quantised_by("fp8", nn.Linear(64, 128, bias=False), tmp_path)
    assert tensors(model)["model.layers.0.mlp.up_proj.weight"] is not None


@pytest.mark.parametrize("library", ["gptqmodel", "auto_gptq", "awq", "hqq"])
def test_layers_of_libraries_that_pack_are_refused_by_name(library):
    base = type("Base", (PackedLinear,), {"__module__": f"{library}.nn_modules.qlinear"})
    layer = type("QuantLinear", (base,), {})()
    model = nn.Sequential(nn.Linear(2, 2), layer)
    for name in ("qweight", "qzeros", "scales", "g_idx", "bias"):
        with pytest.raises(SourceError, match=rf"'1\.{name}'.*QuantLinear packed"):
            as_source(model, SourceOptions(include=[f"*.{name}", "0.*"])).manifest()
    names = as_source(model, SourceOptions(strict=False)).manifest().names()
    assert names == ["0.weight", "0.bias"]
    with pytest.raises(SourceError, match="no weight"):
        dense_weight(layer)


def test_torchao_is_refused_by_name():
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(64, 64))
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    with pytest.raises(SourceError, match=r"'0\.weight'.*subclass"):
        as_source(model).manifest()
