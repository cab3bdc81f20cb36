"""Adapters of PEFT: what is sent is the merged model, and the trainer is never merged."""

import copy
import logging

import peft
import pytest
import torch
from peft import LoraConfig
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import weightsync as ws
from tests.conftest import as_bytes, assert_all_same, assert_same, read
from weightsync.errors import SourceError
from weightsync.source import SourceOptions, as_source
from weightsync.sources.peft import Merged

ATTENTION = ["q_proj", "v_proj"]
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TOKENS = torch.tensor([[1, 5, 3, 2, 6]])


def qwen2(tied=False, dtype=torch.float32):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    return Qwen2ForCausalLM(config).to(dtype)


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=32,
        n_positions=8,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    return GPT2LMHeadModel(config)


def qwen3_moe():
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=16,
        moe_intermediate_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
    )
    return Qwen3MoeForCausalLM(config)


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Conv1d(4, 6, 3)
        self.two = nn.Conv2d(6, 4, (3, 2))
        self.table = nn.Embedding(5, 4)


def trained(model):
    """Fill what is trained with values that no initialisation gives."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def adapted(model, **lora):
    lora.setdefault("r", 4)
    autocast = lora.pop("autocast_adapter_dtype", True)
    return trained(peft.get_peft_model(model, LoraConfig(**lora), autocast_adapter_dtype=autocast))


def sent(model):
    source = as_source(model)
    return source.manifest(), {name: tensor.clone() for name, tensor in source.tensors()}


def look(module):
    """All that a trainer is: each tensor's bytes, version and place, and all Python state."""
    seen = {"random": bytes(torch.random.get_rng_state().numpy())}

    def frozen(value):
        if isinstance(value, torch.Tensor):
            facts = id(value), value._version, value.data_ptr(), value.requires_grad
            return *facts, list(value._backward_hooks or ()), bytes(as_bytes(value).numpy())
        if isinstance(value, dict):
            return {key: frozen(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [frozen(each) for each in value]
        if isinstance(value, (set, str, int, float, bool, type(None))):
            return repr(value)
        return id(value)

    def visit(module, name):
        for attribute, value in vars(module).items():
            seen[f"{name}.{attribute}"] = frozen(value)
        for child, inner in module._modules.items():
            if inner is not None:
                visit(inner, f"{name}.{child}")

    visit(module, "")
    return seen


def assert_sent_merged(model):
    """What is sent is what the merged model would send, and nothing of the trainer has moved."""
    before = look(model)
    manifest, tensors = sent(model)
    assert look(model) == before
    merged = copy.deepcopy(model).merge_and_unload()
    expected, values = sent(merged)
    assert manifest == expected
    assert_all_same(tensors, values)
    return tensors


def changed(tensors, base):
    return {
        name for name, tensor in sent(base)[1].items() if not torch.equal(tensor, tensors[name])
    }


def forward(model):
    model.eval()
    with torch.no_grad():
        return model(TOKENS).logits


def untied_with(tensors, aliases=()):
    """The model that an engine without ties makes of what was sent."""
    plain = qwen2(tied=False)
    plain.load_state_dict(tensors | {alias: tensors[aliases[alias]] for alias in aliases})
    return plain


def test_l1_names_and_values_are_those_of_the_merged_model():
    """L1"""
    tensors = assert_sent_merged(adapted(qwen2(), target_modules=ATTENTION))
    assert not any("lora_" in name or "base_layer" in name for name in tensors)
    assert changed(tensors, qwen2()) == {
        f"model.layers.{layer}.self_attn.{name}.weight" for layer in (0, 1) for name in ATTENTION
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "lora",
    [
        {"target_modules": SEVEN, "lora_alpha": 8},
        {"target_modules": SEVEN, "use_rslora": True},
        {"target_modules": SEVEN, "use_dora": True},
        {"target_modules": ATTENTION, "lora_bias": True},
        {"target_modules": ATTENTION, "bias": "all"},
        {"target_modules": ATTENTION, "lora_dropout": 0.5},
        {"target_modules": "all-linear", "autocast_adapter_dtype": False},
        {"target_modules": ["embed_tokens", "lm_head"]},
        {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True},
        {"target_modules": SEVEN, "init_lora_weights": "pissa"},
        {
            "target_modules": ATTENTION,
            "rank_pattern": {"q_proj": 2},
            "alpha_pattern": {"v_proj": 1},
        },
    ],
    ids=lambda lora: " ".join(key for key in lora),
)
def test_l8_every_projection_has_its_own_adapter_merged(lora, dtype):
    """L8"""
    assert_sent_merged(adapted(qwen2(dtype=dtype), **lora))


def test_conv1d_of_gpt2():
    tensors = assert_sent_merged(
        adapted(gpt2(), target_modules=["c_attn", "c_proj", "wte"], fan_in_fan_out=True)
    )
    assert "transformer.h.0.attn.c_attn.weight" in changed(tensors, gpt2())


@pytest.mark.parametrize("dora", [False, True])
def test_convolutions(dora):
    model = adapted(Convolutions(), target_modules=["one", "two", "table"], use_dora=dora)
    tensors = assert_sent_merged(model)
    assert changed(tensors, Convolutions()) == {"one.weight", "two.weight", "table.weight"}


@pytest.mark.parametrize(
    "parameters",
    [
        ["mlp.experts.gate_up_proj"],
        ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"],
    ],
    ids=["one", "two of one module", "router"],
)
def test_parameters_of_experts(parameters):
    model = adapted(
        qwen3_moe(), target_modules=ATTENTION, target_parameters=parameters, r=2, lora_alpha=8
    )
    tensors = assert_sent_merged(model)
    merged = changed(tensors, qwen3_moe())
    for parameter in parameters:
        last = parameter.split(".")[-1].removesuffix("_proj")
        assert any(part in name for part in last.split("_") for name in merged)


def test_l3_trained_copies_are_sent_under_the_base_name():
    """L3"""
    model = adapted(qwen2(), target_modules=ATTENTION, modules_to_save=["lm_head", "embed_tokens"])
    tensors = assert_sent_merged(model)
    inner = model.get_base_model()
    for name, wrapper in (
        ("lm_head.weight", inner.lm_head),
        ("model.embed_tokens.weight", inner.model.embed_tokens),
    ):
        assert_same(tensors[name], wrapper.modules_to_save["default"].weight)
        assert not torch.equal(tensors[name], wrapper.original_module.weight)
    assert not any("modules_to_save" in name or "original_module" in name for name in tensors)


def test_a_saved_module_that_has_adapters_itself():
    model = adapted(qwen2(), target_modules=ATTENTION, modules_to_save=["layers.0.mlp"])
    assert_sent_merged(model)


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(target_modules=ATTENTION, r=2, trainable_token_indices={"embed_tokens": [1, 3]}),
        peft.TrainableTokensConfig(target_modules=["embed_tokens"], token_indices=[0, 7]),
    ],
    ids=["beside LoRA", "alone"],
)
@pytest.mark.parametrize("tied", [False, True])
def test_trained_tokens(config, tied):
    model = trained(peft.get_peft_model(qwen2(tied), config))
    tensors = assert_sent_merged(model)
    assert "model.embed_tokens.weight" in changed(tensors, qwen2(tied))
    assert as_source(model).manifest().aliases == (
        {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}
    )


# ---- several adapters, in several states ----


def two_adapters():
    model = adapted(qwen2(), target_modules=ATTENTION)
    model.add_adapter("other", LoraConfig(target_modules=["q_proj", "up_proj"], r=2))
    model.add_adapter("saving", LoraConfig(target_modules=["up_proj"], modules_to_save=["lm_head"]))
    for adapter in ("other", "saving", "default"):
        model.set_adapter(adapter)
        trained(model)
    return model


@pytest.mark.parametrize("active", ["default", "other", "saving"])
def test_the_active_adapter_is_sent(active):
    model = two_adapters()
    model.set_adapter(active)
    assert_sent_merged(model)


@pytest.mark.parametrize("dora", [False, True])
def test_all_active_adapters_are_sent(dora):
    model = adapted(qwen2(dtype=torch.bfloat16), target_modules=ATTENTION, use_dora=dora)
    model.add_adapter("other", LoraConfig(target_modules=["q_proj", "up_proj"], use_dora=dora))
    model.base_model.set_adapter(["default", "other"])
    assert_sent_merged(trained(model))


def test_an_adapter_that_was_chosen_after_a_look():
    model = two_adapters()
    source = as_source(model)
    source.manifest()
    model.set_adapter("other")
    expected = sent(copy.deepcopy(model).merge_and_unload())[1]
    assert_all_same(dict(source.tensors()), expected)


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_that_the_user_has_merged_are_in_the_base_already(dora):
    model = adapted(qwen2(dtype=torch.bfloat16), target_modules=SEVEN, use_dora=dora)
    expected = sent(copy.deepcopy(model).merge_and_unload())[1]
    model.merge_adapter()
    assert_all_same(assert_sent_merged(model), expected)
    model.unmerge_adapter()
    assert_sent_merged(model)


def test_an_adapter_that_is_not_merged_beside_one_that_is_makes_no_sense():
    model = two_adapters()
    model.base_model.set_adapter(["default", "other"])
    model.merge_adapter(["default"])
    with pytest.raises(SourceError, match=r"q_proj.*'other'.*unmerge_adapter"):
        as_source(model).manifest()


def test_no_adapter_at_all():
    model = adapted(qwen2(), target_modules=ATTENTION)
    model.delete_adapter("default")
    assert_all_same(sent(model)[1], sent(qwen2())[1])


# ---- other ways to have adapters ----


def test_layers_injected_without_a_peft_model():
    expected = assert_sent_merged(adapted(qwen2(), target_modules=ATTENTION, r=4))
    config = LoraConfig(target_modules=ATTENTION, r=4)
    injected = trained(peft.inject_adapter_in_model(config, qwen2()))
    assert_all_same(sent(injected)[1], expected)


def test_an_adapter_added_by_transformers():
    model = qwen2()
    model.add_adapter(LoraConfig(target_modules=ATTENTION, r=4))
    before = look(trained(model))
    tensors = sent(model)[1]
    assert look(model) == before
    assert_all_same(tensors, sent(adapted(qwen2(), target_modules=ATTENTION))[1])


def test_a_peft_model_of_a_peft_model():
    inner = adapted(qwen2(), target_modules=ATTENTION)
    with pytest.warns(UserWarning, match="second time"):
        outer = adapted(inner, target_modules=["up_proj"])
    tensors = sent(outer)[1]
    assert {"q_proj", "v_proj", "up_proj"} == {n.split(".")[-2] for n in changed(tensors, qwen2())}
    torch.testing.assert_close(forward(untied_with(tensors)), forward(outer))


def test_adapters_of_several_kinds_around_one_layer():
    model = peft.PeftMixedModel(qwen2(), LoraConfig(target_modules=ATTENTION))
    model.add_adapter("loha", peft.LoHaConfig(target_modules=["q_proj", "up_proj"], r=2))
    model.set_adapter(["default", "loha"])
    assert_sent_merged(trained(model))


def test_names_of_the_users_own_modules():
    """Wrappers are known by their class: these are none."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.base_layer = nn.Linear(3, 3)
            self.default = nn.Linear(3, 3)
            self.module = nn.Linear(3, 3)
            self.lora_A = nn.Linear(3, 3)

    model = adapted(Own(), target_modules=["base_layer", "module"])
    manifest, tensors = sent(model)
    assert manifest.names() == list(Own().state_dict())
    assert changed(tensors, Own()) == {"base_layer.weight", "module.weight"}


def layers_checkpointed(model):
    """Activation checkpointing around tuner layers, and inside of them."""
    for layer in model.get_base_model().model.layers:
        layer.self_attn.q_proj = checkpoint_wrapper(layer.self_attn.q_proj)
        v_proj = layer.self_attn.v_proj
        v_proj.base_layer = checkpoint_wrapper(v_proj.base_layer)
        v_proj.lora_A["default"] = checkpoint_wrapper(v_proj.lora_A["default"])
    return model


def lora(model):
    return adapted(model, target_modules=ATTENTION, r=4)


def compiled(model):
    return torch.compile(model, backend="eager")


WRAPPED = {
    "compiled": lambda: compiled(lora(qwen2())),
    "of a compiled model": lambda: lora(compiled(qwen2())),
    "data parallel": lambda: nn.DataParallel(lora(qwen2())),
    "compiled data parallel": lambda: compiled(nn.DataParallel(lora(qwen2()))),
    "checkpointed layers": lambda: layers_checkpointed(lora(qwen2())),
    "checkpointed whole": lambda: checkpoint_wrapper(lora(qwen2())),
}


@pytest.mark.parametrize("wrapped", WRAPPED.values(), ids=WRAPPED)
def test_n4_wrappers_around_adapters_and_adapters_around_wrappers(wrapped):
    """N3, N4"""
    model = wrapped()
    before = look(model)
    manifest, tensors = sent(model)
    assert look(model) == before
    expected, values = sent(lora(qwen2()).merge_and_unload())
    assert manifest == expected
    assert_all_same(tensors, values)


def test_distributed_data_parallel(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        tensors = sent(nn.parallel.DistributedDataParallel(lora(qwen2())))[1]
    finally:
        torch.distributed.destroy_process_group()
    assert_all_same(tensors, sent(lora(qwen2()).merge_and_unload())[1])


def test_attention_of_torch():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.attention = nn.MultiheadAttention(8, 2)

    model = adapted(Model(), target_modules=["attention"])
    tensors = assert_sent_merged(model)
    assert changed(tensors, Model()) == {
        "attention.in_proj_weight",
        "attention.out_proj.weight",
    }
    model.merge_adapter()
    with pytest.raises(SourceError, match="unmerge_adapter"):
        as_source(model).manifest()


# ---- what an update does, and leaves behind ----


def test_l6_each_update_sends_what_training_made_of_the_adapter(ends):
    """L6"""
    model = adapted(qwen2(), target_modules=ATTENTION)
    engine = qwen2()
    sender, receiver = ends.pair(model, engine)
    sender.attach(receiver)
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    seen = []
    for step in (1, 2):
        trained(model)
        sender.update_weights(version=step)
        with torch.no_grad():
            product = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
            effective = layer.base_layer.weight + layer.scaling["default"] * product
        seen.append(engine.model.layers[0].self_attn.q_proj.weight.detach().clone())
        torch.testing.assert_close(seen[-1], effective)
    assert not torch.equal(*seen)


def test_l9_a_merge_that_fails_half_way_leaves_nothing_behind(ends, monkeypatch):
    """L9"""
    model = adapted(qwen2(), target_modules=SEVEN, use_dora=True)
    sender = ends.sender(model)
    before = look(model)
    calls = []
    original = peft.tuners.lora.layer.Linear.get_delta_weight

    def failing(layer, adapter):
        calls.append(adapter)
        if len(calls) == 9:
            raise ZeroDivisionError("no luck")
        return original(layer, adapter)

    monkeypatch.setattr(peft.tuners.lora.layer.Linear, "get_delta_weight", failing)
    name = r"'model\.layers\.1\.self_attn\.k_proj\.weight'"
    with pytest.raises(ws.SourceError, match=f"{name}.*ZeroDivisionError: no luck"):
        sender.update_weights(version=1)
    assert look(model) == before
    sender.update_weights(version=2)
    assert look(model) == before
    assert_all_same(read(ends)[1], sent(copy.deepcopy(model).merge_and_unload())[1])


def test_what_dora_keeps_between_forward_passes_is_left_alone(monkeypatch):
    monkeypatch.setattr(peft.tuners.lora.dora, "ENABLE_DORA_CACHING", True)
    model = adapted(qwen2(), target_modules=SEVEN, use_dora=True)
    forward(model)
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    assert layer.lora_magnitude_vector["default"]._dora_cache
    assert_sent_merged(model)


def test_describing_it_merges_nothing(monkeypatch):
    """Metadata without data."""
    model = adapted(qwen2(), target_modules=SEVEN)
    expected = as_source(copy.deepcopy(model).merge_and_unload()).manifest()
    monkeypatch.setattr(peft.tuners.lora.layer.Linear, "merge", None)
    monkeypatch.setattr(torch.Tensor, "clone", None)
    assert as_source(model).manifest() == expected


def test_a_layer_that_changes_two_tensors_is_merged_once(monkeypatch):
    model = adapted(qwen2(), target_modules=ATTENTION, lora_bias=True)
    merges = []
    original = peft.tuners.lora.layer.Linear.merge
    monkeypatch.setattr(
        peft.tuners.lora.layer.Linear,
        "merge",
        lambda layer, **options: (merges.append(layer), original(layer, **options))[1],
    )
    source = as_source(model)
    inventory = source.inventory()
    assert sum(isinstance(value, Merged) for value in inventory.values) == 8
    for turn in (1, 2):
        for _ in inventory.stream():
            pass
        assert len(merges) == 4 * turn


def test_g6_one_layer_is_held_at_a_time():
    """G6"""
    inventory = as_source(adapted(qwen2(), target_modules=ATTENTION, lora_bias=True)).inventory()
    kept = []
    for _, tensor in inventory.stream():
        kept.append(torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage()))
        del tensor
        alive = sum(not reference.expired() for reference in kept)
        assert alive <= 2
    assert not any(not reference.expired() for reference in kept[:-1])


@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.autocast("cpu")])
def test_the_mode_of_the_caller_does_not_matter(mode):
    model = adapted(qwen2(), target_modules=SEVEN, use_dora=True)
    expected = sent(model)[1]
    with mode():
        assert_all_same(sent(model)[1], expected)


def test_what_is_around_a_layer_is_not_called(monkeypatch):
    """Hooks and patched forwards are the trainer's, and may change it."""

    def by_calls(layer, adapter):
        unit = torch.eye(layer.in_features)
        return layer.lora_B[adapter](layer.lora_A[adapter](unit)).T * layer.scaling[adapter]

    monkeypatch.setattr(peft.tuners.lora.layer.Linear, "get_delta_weight", by_calls)
    model = adapted(qwen2(), target_modules=SEVEN)
    expected = sent(copy.deepcopy(model).merge_and_unload())[1]
    calls = []
    for module in model.modules():
        module.register_forward_hook(lambda *args: calls.append(args))
        module.register_forward_pre_hook(lambda *args: calls.append(args))
        module.forward = calls.append
        module.compile(backend=lambda graph, inputs: calls.append)
    assert_all_same(sent(model)[1], expected)
    assert calls == []


def test_adapters_that_are_not_active_are_not_looked_at():
    model = two_adapters()
    model.set_adapter("default")
    expected = assert_sent_merged(model)
    for name, module in model.named_modules():
        if name.endswith((".other", ".saving")):
            module.to("meta")
    assert_all_same(sent(model)[1], expected)


# ---- ties ----


@pytest.mark.parametrize("targets", [["lm_head"], ["embed_tokens"], ["lm_head", "embed_tokens"]])
def test_t1_a_tie_that_an_adapter_breaks_is_sent_as_two_tensors(targets, caplog):
    """The forward pass decides: an adapter on one of two tied weights makes them differ."""
    model = adapted(qwen2(tied=True), target_modules=[*targets, "q_proj"])
    before = look(model)
    with caplog.at_level(logging.WARNING, "weightsync"):
        manifest, tensors = sent(model)
        sent(model)
    assert look(model) == before
    assert manifest.aliases == {}
    torch.testing.assert_close(forward(untied_with(tensors)), forward(model))
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert "'model.embed_tokens.weight'" in warnings[0]
    assert "'lm_head.weight'" in warnings[0]


def test_t1_a_tie_that_peft_keeps_is_kept(caplog):
    model = adapted(
        qwen2(tied=True), target_modules=["embed_tokens", "q_proj"], ensure_weight_tying=True
    )
    manifest, tensors = sent(model)
    assert manifest.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    merged = untied_with(tensors, manifest.aliases)
    torch.testing.assert_close(forward(merged), forward(model))
    assert not caplog.records


def test_t1_a_tie_apart_from_adapters_is_kept():
    manifest, _ = sent(adapted(qwen2(tied=True), target_modules=ATTENTION))
    assert manifest.aliases == {"lm_head.weight": "model.embed_tokens.weight"}


def test_t1_tied_modules_to_save():
    model = adapted(
        qwen2(tied=True),
        target_modules=ATTENTION,
        modules_to_save=["embed_tokens"],
        ensure_weight_tying=True,
    )
    manifest, tensors = sent(model)
    assert manifest.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    saved = model.get_base_model().model.embed_tokens.modules_to_save["default"].weight
    assert_same(tensors["model.embed_tokens.weight"], saved)


def test_layers_that_share_their_base_but_not_their_adapters():
    model = qwen2()
    first, second = model.model.layers
    second.self_attn.q_proj.weight = first.self_attn.q_proj.weight
    model = adapted(model, target_modules=ATTENTION)
    manifest, tensors = sent(model)
    assert manifest.aliases == {}
    assert not torch.equal(
        *(tensors[f"model.layers.{layer}.self_attn.q_proj.weight"] for layer in (0, 1))
    )


def test_one_module_under_two_names_is_a_tie():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(3, 3)
            self.b = self.a

    model = adapted(Shared(), target_modules=["a"])
    model.get_base_model().b = model.get_base_model().a
    assert as_source(model).manifest().aliases == {"b.weight": "a.weight", "b.bias": "a.bias"}


# ---- refused ----


def test_a_base_that_is_offloaded_is_refused_or_left_out():
    model = adapted(qwen2(), target_modules=ATTENTION)
    model.get_base_model().model.layers[1].self_attn.q_proj.base_layer.to("meta")
    name = "model.layers.1.self_attn.q_proj.weight"
    with pytest.raises(SourceError, match=f"'{name}'.*meta"):
        as_source(model).manifest()
    names = as_source(model, SourceOptions(strict=False)).manifest().names()
    assert set(qwen2().state_dict()) - set(names) == {
        name,
        "model.layers.1.self_attn.q_proj.bias",
    }


def disabled():
    model = adapted(qwen2(), target_modules=ATTENTION)
    model.base_model.disable_adapter_layers()
    return model


def disabled_by_transformers():
    model = qwen2()
    model.add_adapter(LoraConfig(target_modules=ATTENTION))
    model.disable_adapters()
    return model


def disabled_copies():
    model = adapted(qwen2(), target_modules=["up_proj"], modules_to_save=["embed_tokens"])
    model.get_base_model().model.embed_tokens.enable_adapters(False)
    return model


@pytest.mark.parametrize("model", [disabled, disabled_by_transformers, disabled_copies])
def test_l6_disabled_adapters_are_not_silently_left_out(model):
    """L6: the base model would be sent, again and again."""
    with pytest.raises(SourceError, match=r"'model\..*disabled.*enable_adapters"):
        as_source(model()).manifest()


def test_l6_within_disable_adapter():
    """L6"""
    model = adapted(qwen2(), target_modules=ATTENTION)
    source = as_source(model)
    with model.disable_adapter(), pytest.raises(SourceError, match="disabled"):
        source.manifest()
    source.manifest()


@pytest.mark.parametrize(
    "config",
    [
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
        peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
        peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    ],
    ids=lambda config: config.peft_type.value,
)
def test_learned_prompts_are_refused(config):
    model = peft.get_peft_model(qwen2(), config)
    with pytest.raises(SourceError, match=f"'default' .{config.peft_type.value}.*prompt"):
        as_source(model).manifest()


def test_adapters_that_depend_on_the_input_are_refused():
    config = LoraConfig(
        target_modules=ATTENTION, task_type="CAUSAL_LM", alora_invocation_tokens=[1]
    )
    source = as_source(peft.get_peft_model(qwen2(), config))
    with pytest.raises(SourceError, match=r"q_proj.*aLoRA does not support merging"):
        list(source.tensors())


def test_layers_that_cannot_be_merged_are_refused():
    config = peft.PolyConfig(target_modules=ATTENTION, task_type="CAUSAL_LM")
    source = as_source(peft.get_peft_model(qwen2(), config))
    with pytest.raises(SourceError, match=r"q_proj.*cannot merge.*poly"):
        source.manifest()


# ---- left out ----


def test_the_base_alone_is_what_it_was_before_it_had_adapters():
    """merge=False: for an engine that gets the adapters by themselves."""
    base = qwen2()
    before = {name: tensor.clone() for name, tensor in as_source(base).tensors()}
    model = adapted(base, target_modules=[*SEVEN, "embed_tokens"], modules_to_save=["lm_head"])
    source = as_source(model, SourceOptions(merge=False))
    assert_all_same(dict(source.tensors()), before)
    with model.disable_adapter():
        assert_all_same(dict(source.tensors()), before)
    model.merge_adapter()
    with pytest.raises(SourceError, match="unmerge_adapter"):
        source.manifest()
