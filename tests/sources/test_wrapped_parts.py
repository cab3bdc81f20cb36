"""Names are the checkpoint's, whatever is around a part of a model or was loaded into it."""

import copy

import peft
import pytest
import torch
import transformers
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.conftest import assert_all_same
from tests.sources.architectures import EXPERTS, TEXT, VISION, make
from tests.sources.test_peft import trained
from tests.sources.test_transformers import sent, unchanged

# ---- adapters that transformers loaded ----


@pytest.mark.parametrize("loaded", [False, True], ids=["from a config", "from_pretrained"])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_names_after_load_adapter_are_the_checkpoints(name, loaded, tmp_path):
    """N1, M1: it leaves its own conversions on the model, in the place of the model's."""
    base = make(name)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    adapter = trained(peft.get_peft_model(copy.deepcopy(base), config))
    adapter.save_pretrained(tmp_path / "adapter")
    expected = sent(adapter)
    assert set(expected) == set(sent(base))
    if loaded:
        base.save_pretrained(tmp_path / "base")
        base = type(base).from_pretrained(tmp_path / "base")
    base.load_adapter(tmp_path / "adapter")
    check = unchanged(base)
    assert_all_same(sent(base), expected)
    check()
    experts = [n for n in expected if ".experts." in n]
    assert all(n.endswith("_proj.weight") for n in experts)
    assert bool(experts) == (name == "qwen3_moe")


# ---- wrappers around a part ----


def model(name):
    """A model of vision and text whose conversion is, from a config, that of its parts."""
    if name == "llava":
        return make(name)
    config = transformers.LlavaConfig(
        text_config=transformers.Qwen3MoeConfig(**{**TEXT, **EXPERTS}),
        vision_config=transformers.CLIPVisionConfig(**VISION),
        image_token_index=3,
    )
    torch.manual_seed(0)
    return transformers.LlavaForConditionalGeneration(config)


def compiled(model):
    model.model.language_model = torch.compile(model.model.language_model)
    return model


def compiled_within(model):
    model.model = torch.compile(model.model)
    return model


def compiled_tower(model):
    model.model.vision_tower = torch.compile(model.model.vision_tower)
    return model


def checkpointed(model):
    model.model.language_model = checkpoint_wrapper(model.model.language_model)
    return model


def twice(model):
    model.model.language_model = torch.compile(checkpoint_wrapper(model.model.language_model))
    return torch.compile(model)


def saved_whole(model):
    config = peft.LoraConfig(r=2, target_modules=["fc1"], modules_to_save=["language_model"])
    return peft.get_peft_model(model, config)  # LoRA's B is zero: the values are the base's


@pytest.mark.parametrize(
    "wrap", [compiled, compiled_within, compiled_tower, checkpointed, twice, saved_whole]
)
@pytest.mark.parametrize("name", ["llava", "llava of experts"])
def test_n4_wrappers_around_a_part_of_a_model(name, wrap):
    """N1, N4: the conversion of a part is found by the part's name, which a wrapper changes."""
    expected = sent(model(name))
    assert any(n.startswith("language_model.model.layers.1.mlp.") for n in expected)
    assert_all_same(sent(wrap(model(name))), expected)


def test_n4_a_wrapped_part_of_a_model_that_was_loaded(tmp_path):
    whole = model("llava of experts")
    whole.save_pretrained(tmp_path)
    loaded = type(whole).from_pretrained(tmp_path)
    assert_all_same(sent(compiled(loaded)), sent(whole))


def test_n4_a_wrapped_part_of_an_engine(ends):
    one, other = model("llava of experts"), compiled(model("llava of experts"))
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.add_(1)
    sender, receiver = ends.pair(one, other)
    sender.update_weights(version=1)
    receiver.poll_and_apply()
    assert_all_same(sent(other), sent(one))
