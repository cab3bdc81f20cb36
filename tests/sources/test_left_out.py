"""What cannot be sent, or is not wanted: left out whole, or refused by name, never in part."""

import pytest
from torch import nn

from tests.conftest import assert_all_same
from tests.sources.architectures import make
from tests.sources.test_iterable import stream
from tests.sources.test_transformers import sent
from weightsync.errors import SourceError
from weightsync.source import SourceOptions, as_source

# ---- tensors of a checkpoint that are made of several ----

FUSED = {
    # model -> what is offloaded, by the model's name; what it is in, by the checkpoint's
    "gte": (
        "gte.layers.0.self_attn.k_proj.weight",
        ["gte.encoder.layer.0.attention.qkv_proj.weight"],
    ),
    "nomic_bert": (
        "nomic_bert.layers.0.self_attn.k_proj.weight",
        ["nomic_bert.encoder.layers.0.attn.Wqkv.weight"],
    ),
    "qwen3_moe": (
        "model.layers.0.mlp.experts.gate_up_proj",
        [
            f"model.layers.0.mlp.experts.{expert}.{half}_proj.weight"
            for expert in range(4)
            for half in ("gate", "up")
        ],
    ),
}


def offloaded(name):
    """A model of which one tensor is on ``meta``."""
    model = make(name)
    module, _, attribute = FUSED[name][0].rpartition(".")
    owner = model.get_submodule(module)
    setattr(owner, attribute, nn.Parameter(getattr(owner, attribute).to("meta")))
    return model


def whole_without(name):
    """What is sent of the whole model, without what the offloaded tensor is fused into."""
    tensors = sent(make(name))
    for fused in FUSED[name][1]:
        del tensors[fused]
    return tensors


def sent_of(model, **options):
    return dict(as_source(model, SourceOptions(**options)).tensors())


@pytest.mark.parametrize("name", FUSED)
def test_a_part_that_cannot_be_sent_is_refused_by_name(name):
    with pytest.raises(SourceError, match=f"'{FUSED[name][0]}'.*meta"):
        as_source(offloaded(name)).manifest()


@pytest.mark.parametrize("name", FUSED)
def test_what_it_is_fused_into_is_left_out_whole(name):
    """Not one of q, k and v made of two of them."""
    assert_all_same(sent_of(offloaded(name), strict=False), whole_without(name))


@pytest.mark.parametrize("name", FUSED)
def test_it_is_excluded_by_the_checkpoints_name(name):
    tensors = sent_of(offloaded(name), exclude=FUSED[name][1])
    assert_all_same(tensors, whole_without(name))


def test_another_exclusion_does_not_excuse_it():
    with pytest.raises(SourceError, match=r"k_proj.*meta"):
        as_source(offloaded("gte"), SourceOptions(exclude=["*.1.*"])).manifest()


def test_a_part_of_a_fused_tensor_is_not_excluded_by_the_models_name():
    """The fused one would lack it: whoever does not want the part must say so of the whole."""
    with pytest.raises(SourceError, match=f"'{FUSED['gte'][0]}'.*meta"):
        as_source(offloaded("gte"), SourceOptions(exclude=["*.k_proj.weight"])).manifest()


def test_what_is_all_of_it_is_excluded_by_the_models_name():
    model = offloaded("qwen3_moe")
    tensors = sent_of(model, exclude=["*.layers.0.mlp.experts.gate_up_proj"])
    assert_all_same(tensors, whole_without("qwen3_moe"))


@pytest.mark.parametrize("pattern", ["vision_tower.*", "model.vision_tower.*"])
def test_a_vision_tower_that_is_offloaded_and_excluded(pattern):
    """Its name in the checkpoint, or in the model."""
    expected = {n: t for n, t in sent(make("llava")).items() if not n.startswith("vision_tower.")}
    model = make("llava")
    model.model.vision_tower.to("meta")
    assert_all_same(sent_of(model, exclude=[pattern]), expected)
    assert_all_same(sent_of(model, strict=False), expected)
    with pytest.raises(SourceError, match=r"'model\.vision_tower\..*meta"):
        as_source(model).manifest()


# ---- streams ----


@pytest.mark.parametrize(
    "patterns", [{"exclude": ["b*"]}, {"include": ["a"]}, {"include": ["*"], "exclude": ["b"]}]
)
def test_patterns_choose_from_a_stream(patterns, ends):
    """What is excluded is in the stream, and counts as found."""
    source = as_source(stream, SourceOptions(**patterns))
    assert source.manifest().names() == ["a"]
    assert [name for name, _ in source.tensors()] == ["a"]
    ends.sender(stream, **patterns).update_weights(version=1)


@pytest.mark.parametrize("patterns", [{"exclude": ["head*"]}, {"include": ["a", "head*"]}])
def test_a_pattern_that_nothing_in_a_stream_matches(patterns):
    with pytest.raises(SourceError, match=r"head\*"):
        as_source(stream, SourceOptions(**patterns)).manifest()
