import copy
import json
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from peft import LoHaConfig, LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn

import weightsync as ws
from tests.conftest import assert_all_same, copy_of, send

CONFIG = "adapter_config.json"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(8, 8)
        self.v_proj = nn.Linear(8, 4, bias=False)
        self.norm = nn.LayerNorm(8)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layers = nn.ModuleList([Block(), Block()])
        self.score = nn.Linear(8, 2)


def make(model=None, **options):
    """A PEFT model whose adapter is not zero."""
    options.setdefault("target_modules", ["q_proj", "v_proj"])
    peft = get_peft_model(model or Model(), LoraConfig(**{"r": 2, **options}))
    return randomise(peft)


def randomise(peft):
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.normal_()
    return peft


def sent_by(source):
    sent = dict(source.tensors())
    return json.loads(bytes(sent.pop(CONFIG).tolist())), sent


def saved_by(peft, folder, adapter="default"):
    peft.save_pretrained(folder, selected_adapters=[adapter], save_embedding_layers=False)
    folder = folder if adapter == "default" else folder / adapter
    return json.loads((folder / CONFIG).read_text()), load_file(
        folder / "adapter_model.safetensors"
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True, "rank_pattern": {"v_proj": 1}, "alpha_pattern": {"q_proj": 3}},
        {"target_modules": "all-linear"},
        {"target_modules": ["embed", "q_proj"]},
        {"modules_to_save": ["score"]},
        {"target_modules": r".*layers\.1\.q_proj"},
        {"target_modules": [], "target_parameters": ["layers.0.q_proj.weight"]},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
def test_what_is_sent_is_what_peft_saves(options, tmp_path):
    """L1: names and bytes of ``adapter_model.safetensors``, and the configuration beside it."""
    peft = make(**options)
    config, tensors = sent_by(ws.AdapterSource(peft))
    saved_config, saved = saved_by(peft, tmp_path)
    assert_all_same(tensors, saved)
    assert saved
    for read in (config, saved_config):
        if isinstance(read["target_modules"], list):
            read["target_modules"].sort()  # PEFT writes a set
    del config["auto_mapping"], saved_config["auto_mapping"]
    assert config == saved_config


def test_nothing_is_copied_and_nothing_is_changed():
    peft = make(modules_to_save=["score"])
    before = {name: (p, p.data_ptr(), p.requires_grad) for name, p in peft.named_parameters()}
    values = {name: copy_of(p) for name, p in peft.named_parameters()}
    options = copy.deepcopy(peft.peft_config["default"].to_dict())
    source = ws.AdapterSource(peft)
    _, sent = sent_by(source)
    own = {data_ptr for _, data_ptr, _ in before.values()}
    assert {tensor.data_ptr() for tensor in sent.values()} <= own
    assert all(source.inventory().addresses)
    after = {name: (p, p.data_ptr(), p.requires_grad) for name, p in peft.named_parameters()}
    assert all(a[0] is b[0] for a, b in zip(before.values(), after.values(), strict=True))
    assert [a[1:] for a in before.values()] == [a[1:] for a in after.values()]
    assert_all_same(values, dict(peft.named_parameters()))
    assert peft.peft_config["default"].to_dict() == options


def test_any_scheme_carries_it(ends, tmp_path):
    peft = make()
    _, tensors = send(ends, ws.AdapterSource(peft, dtype=torch.bfloat16))
    config, saved = saved_by(peft, tmp_path)
    sent_config = json.loads(bytes(tensors.pop(CONFIG).tolist()))
    assert sent_config["r"] == config["r"]
    assert_all_same(tensors, {name: tensor.bfloat16() for name, tensor in saved.items()})


def test_the_configuration_is_the_same_in_every_process():
    """Its bytes are part of the version: a set has another order in each process."""
    words = ["v_proj", "q_proj", "layers.0.q_proj", "layers.1.v_proj", "embed"]
    config, _ = sent_by(ws.AdapterSource(make(target_modules=words)))
    assert config["target_modules"] == sorted(words)


def test_every_update_sends_what_is_there_then():
    peft = make()
    source = ws.AdapterSource(peft)
    first = {name: copy_of(tensor) for name, tensor in sent_by(source)[1].items()}
    config = dict(source.tensors())[CONFIG]
    randomise(peft)
    second = sent_by(source)[1]
    assert all(not torch.equal(first[name], second[name]) for name in first)
    assert dict(source.tensors())[CONFIG] is config  # so that nothing is looked at anew
    peft.peft_config["default"].lora_dropout = 0.5
    assert sent_by(source)[0]["lora_dropout"] == 0.5


def test_one_of_several_adapters(tmp_path):
    peft = make()
    peft.add_adapter("other", LoraConfig(r=3, target_modules=["q_proj"]))
    randomise(peft)
    for adapter, count in [("default", 8), ("other", 4)]:
        config, tensors = sent_by(ws.AdapterSource(peft, adapter))
        saved_config, saved = saved_by(peft, tmp_path, adapter)
        assert len(tensors) == count
        assert config["r"] == saved_config["r"]
        assert_all_same(tensors, saved)
    peft.set_adapter("other")
    source = ws.AdapterSource(peft)
    assert source.adapter == "other"
    peft.set_adapter("default")  # as a trainer does that compares with a reference
    assert len(sent_by(source)[1]) == 4
    with pytest.raises(ws.SourceError, match=r"no adapter 'third'; there is 'default', 'other'"):
        ws.AdapterSource(peft, "third")
    peft.base_model.set_adapter(["default", "other"])
    with pytest.raises(ws.SourceError, match="default, other is active: pass adapter="):
        ws.AdapterSource(peft)


class Holder(nn.Module):
    def __init__(self, peft):
        super().__init__()
        self.base_model = peft
        self.value = nn.Linear(2, 2)


def checkpointed(peft):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
    )

    apply_activation_checkpointing(peft, check_fn=lambda module: isinstance(module, Block))
    return peft


@pytest.mark.parametrize(
    "wrap", [torch.compile, nn.DataParallel, Holder, checkpointed], ids=lambda wrap: wrap.__name__
)
def test_wrappers_leave_no_trace_in_names(wrap):
    """L1: whatever holds the PEFT model, its adapter has one set of names."""
    peft = make()
    _, expected = sent_by(ws.AdapterSource(peft))
    _, tensors = sent_by(ws.AdapterSource(wrap(peft)))
    assert_all_same(tensors, expected)


def fsdp2(peft):
    from torch.distributed.fsdp import fully_shard

    for block in peft.base_model.model.layers:
        fully_shard(block.q_proj.lora_A["default"])
        fully_shard(block)
    return fully_shard(peft)


def fsdp1(peft, policy):
    from torch.distributed.fsdp import FullyShardedDataParallel

    device = torch.device("cpu")
    return FullyShardedDataParallel(
        peft, auto_wrap_policy=policy, use_orig_params=True, device_id=device
    )


def fsdp1_by_block(peft):
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return fsdp1(peft, ModuleWrapPolicy({Block}))


def fsdp1_by_trained_leaf(peft):
    """As PEFT's own policy does: a unit for each matrix of the adapter."""
    from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

    def trained(module):
        weight = getattr(module, "weight", None)
        return not module._modules and weight is not None and weight.requires_grad

    return fsdp1(peft, partial(lambda_auto_wrap_policy, lambda_fn=trained))


def a_rank(rank, rendezvous):
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
    for shard in (fsdp2, fsdp1_by_block, fsdp1_by_trained_leaf):
        torch.manual_seed(0)
        peft = make(target_modules=["q_proj", "v_proj", "embed"])
        _, expected = sent_by(ws.AdapterSource(copy.deepcopy(peft)))
        source = ws.AdapterSource(shard(peft))
        assert {spec.name for spec in source.manifest().tensors} == {*expected, CONFIG}
        assert_all_same(sent_by(source)[1], expected)
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_sharded_adapter_is_gathered_as_it_is_read(tmp_path):
    torch.multiprocessing.spawn(a_rank, (f"file://{tmp_path}/rendezvous",), nprocs=2)


def test_the_adapter_of_a_packed_base():
    """The base of QLoRA cannot be sent as it is, but it need not be."""
    bitsandbytes = pytest.importorskip("bitsandbytes")

    model = Model()
    for block in model.layers:
        block.q_proj = bitsandbytes.nn.Linear4bit(8, 8, bias=False)
    peft = make(model)
    _, tensors = sent_by(ws.AdapterSource(peft))
    assert len(tensors) == 8
    assert all("lora_" in name for name in tensors)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"use_dora": True}, r"DoRA \(use_dora=True"),
        ({"bias": "all"}, r"trained biases \(bias='all'"),
        ({"bias": "lora_only"}, r"trained biases"),
        ({"lora_bias": True}, r"biases of the adapter \(lora_bias"),
        ({"trainable_token_indices": {"embed": [1]}}, "trainable tokens"),
        ({"alora_invocation_tokens": [1, 2]}, "activated LoRA"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_what_no_vllm_loads_is_refused_by_name(options, words):
    with pytest.raises(ws.SourceError, match=words) as caught:
        ws.AdapterSource(make(**options))
    assert "'default'" in str(caught.value)


def test_other_kinds_of_adapters_are_refused():
    peft = get_peft_model(Model(), LoHaConfig(target_modules=["q_proj"]))
    with pytest.raises(ws.SourceError, match="'default' is of type LOHA: vLLM loads LoRA"):
        ws.AdapterSource(peft)


def test_a_variant_that_the_configuration_does_not_tell():
    peft = make()
    layer = peft.base_model.model.layers[1].q_proj
    layer.lora_variant["default"] = type("KasaLinearVariant", (), {})
    with pytest.raises(ws.SourceError, match=r"layers.1.q_proj' is no plain .*KasaLinearVariant"):
        ws.AdapterSource(peft)


def test_a_scale_that_the_configuration_does_not_tell():
    """An engine computes it from r and lora_alpha, and would be off by the factor."""
    peft = make()
    source = ws.AdapterSource(peft)
    layer = peft.base_model.model.layers[1].q_proj
    layer.scale_layer(0.5)
    with pytest.raises(ws.SourceError, match=r"layers.1.q_proj' scales its adapter by 2, .* by 4"):
        source.manifest()
    layer.unscale_layer()
    source.manifest()


def test_a_model_without_adapter():
    with pytest.raises(ws.SourceError, match="no PeftModel in this Model"):
        ws.AdapterSource(Model())


@pytest.mark.parametrize("kind", ["pissa", "olora"])
def test_an_adapter_that_began_with_another_base_needs_that_base(ends, kind):
    """Its base is not the one that an engine loaded: that would compute another model, silently."""
    base = Model()
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=kind))
    with pytest.raises(ws.SourceError, match=r"changed base.*merge=False.*base_sent"):
        ws.AdapterSource(model)
    config, _ = sent_by(ws.AdapterSource(model, base_sent=True))
    assert config["init_lora_weights"] is True


def test_an_alpha_that_only_the_configuration_has(ends):
    model = make(lora_alpha=8)
    model.peft_config["default"].lora_alpha = 16
    with pytest.raises(ws.SourceError, match="scales its adapter by 4, where an engine would"):
        ws.AdapterSource(model)
