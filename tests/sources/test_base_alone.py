"""merge=False: the base of a model with adapters, bit for bit what it was before it had them."""

import logging

import peft
import pytest
from peft import LoraConfig

from tests.conftest import assert_all_same
from tests.sources.test_peft import ATTENTION, SEVEN, adapted, look, qwen2, qwen3_moe, sent, trained
from weightsync.errors import SourceError
from weightsync.source import SourceOptions, as_source


def base_of(model):
    source = as_source(model, SourceOptions(merge=False))
    tensors = {name: tensor.clone() for name, tensor in source.tensors()}
    return source.manifest(), tensors


def by_transformers():
    model = qwen2()
    model.add_adapter(LoraConfig(target_modules=ATTENTION))
    return trained(model)


def of_two_kinds():
    """An adapter around another one."""
    inner = peft.inject_adapter_in_model(LoraConfig(target_modules=ATTENTION), qwen2())
    return trained(peft.inject_adapter_in_model(peft.LoHaConfig(target_modules=ATTENTION), inner))


def of(config, **options):
    return lambda: trained(peft.get_peft_model(qwen2(**options), config()))


def lora(**options):
    return of(lambda: LoraConfig(**{"target_modules": ATTENTION, "r": 2, **options}))


ADAPTED = {
    "LoRA": lora(),
    "all projections": lora(target_modules=SEVEN),
    "DoRA": lora(use_dora=True),
    "bias": lora(lora_bias=True),
    "RS-LoRA": lora(use_rslora=True),
    "embeddings": lora(target_modules=["embed_tokens", "q_proj"]),
    "DoRA on embeddings": lora(target_modules=["embed_tokens"], use_dora=True),
    "head": lora(target_modules=["lm_head"]),
    "trainable tokens beside LoRA": lora(trainable_token_indices=[1, 3]),
    "modules_to_save": lora(modules_to_save=["lm_head", "embed_tokens"]),
    "trainable tokens": of(
        lambda: peft.TrainableTokensConfig(target_modules=["embed_tokens"], token_indices=[1])
    ),
    "AdaLoRA": of(
        lambda: peft.AdaLoraConfig(target_modules=ATTENTION, init_r=2, target_r=1, total_step=10)
    ),
    "LoHa": of(lambda: peft.LoHaConfig(target_modules=ATTENTION, r=2)),
    "LoKr": of(lambda: peft.LoKrConfig(target_modules=ATTENTION, r=2)),
    "IA3": of(lambda: peft.IA3Config(target_modules=ATTENTION, feedforward_modules=[])),
    "OFT": of(lambda: peft.OFTConfig(target_modules=ATTENTION, oft_block_size=4, r=0)),
    "VeRA": of(lambda: peft.VeraConfig(target_modules=["q_proj"], r=2)),
    "layer norms": of(lambda: peft.LNTuningConfig(target_modules=["input_layernorm"])),
    "cannot be merged": of(
        lambda: peft.PolyConfig(target_modules=ATTENTION, task_type="CAUSAL_LM")
    ),
    "prompt tuning": of(
        lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    ),
    "prefix tuning": of(
        lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    ),
    "injected": lambda: trained(
        peft.inject_adapter_in_model(LoraConfig(target_modules=ATTENTION), qwen2())
    ),
    "added by transformers": by_transformers,
    "two kinds": of_two_kinds,
}


@pytest.mark.parametrize("kind", ADAPTED)
def test_the_base_is_what_it_was(kind):
    model = ADAPTED[kind]()
    before = look(model)
    manifest, tensors = base_of(model)
    assert look(model) == before
    expected, values = sent(qwen2())
    assert_all_same(tensors, values)
    assert manifest == expected


@pytest.mark.parametrize(
    "parameters", [["mlp.experts.gate_up_proj"], ["mlp.experts.down_proj", "mlp.gate.weight"]]
)
def test_the_base_of_adapted_parameters(parameters):
    """Packed experts are split as those of the model without adapters are."""
    model = adapted(qwen3_moe(), target_modules=ATTENTION, target_parameters=parameters)
    manifest, tensors = base_of(model)
    expected, values = sent(qwen3_moe())
    assert_all_same(tensors, values)
    assert manifest == expected


@pytest.mark.parametrize("targets", [["lm_head"], ["embed_tokens"], ATTENTION])
def test_t1_a_tie_of_the_base_is_one(targets, caplog):
    """The adapter that makes them differ is not sent."""
    model = adapted(qwen2(tied=True), target_modules=targets)
    assert base_of(model)[0].aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert not [r for r in caplog.records if r.name.startswith("weightsync")]


@pytest.mark.parametrize("kind", ["LoRA", "DoRA", "AdaLoRA", "embeddings", "injected"])
def test_the_base_of_a_merged_model_is_refused(kind):
    """It is not there any more: subtracting gives it but for rounding."""
    model = ADAPTED[kind]()
    for module in model.modules():
        if isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer):
            module.merge()
    with pytest.raises(SourceError, match=r"'model\..*unmerge_adapter"):
        base_of(model)


# ---- merged after all ----


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_t1_an_injected_adapter_that_breaks_a_tie_is_told_by_name(target, caplog):
    """There is no ``PeftModel`` around it that could say so."""
    config = LoraConfig(target_modules=[target], r=2)
    model = trained(peft.inject_adapter_in_model(config, qwen2(tied=True)))
    with caplog.at_level(logging.WARNING, "weightsync"):
        manifest, _ = sent(model)
        sent(model)
    assert manifest.aliases == {}
    told = [r.getMessage() for r in caplog.records if r.name.startswith("weightsync")]
    assert len(told) == 1
    assert "'lm_head.weight'" in told[0]
    assert "'model.embed_tokens.weight'" in told[0]
