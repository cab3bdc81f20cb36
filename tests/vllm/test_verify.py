"""Q4 on a real vLLM: what an engine holds wrongly is found and named, and nothing else is."""

import copy
import os

import pytest
import torch
from torch import nn

import weightsync as ws
from tests.vllm.conftest import expected, greedy, llama_config, make_llm, make_model, stop

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

CONFIG = {"attention_bias": True}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verified")
    llama_config(**CONFIG).save_pretrained(folder)
    # Damage is done by functions that are sent to the worker.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    try:
        llm = make_llm(folder)
        yield llm
        stop(llm)
    finally:
        del os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"]


@pytest.fixture
def ends(llm, path):
    scheme = ws.DoubleBufferScheme(path)
    with scheme.create_sender() as sender, scheme.create_receiver(llm) as receiver:
        sender.connect()
        sender.attach(receiver)
        yield sender, receiver


def matrix(layer):
    """The weight of a linear layer, out of the kernel that keeps it."""
    size = layer.input_size_per_partition
    return layer.quant_method.apply(layer, torch.eye(size)).t().contiguous()


def put(layer, weight):
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.quant_method.process_weights_after_loading(layer)


def flip_a_bit(model):
    weight = model.model.norm.weight.data
    weight.view(torch.uint8)[5] ^= 4


def flip_a_bit_in_a_kernel(model):
    layer = model.model.layers[0].self_attn.o_proj
    weight = matrix(layer)
    weight.view(torch.uint8)[7, 13] ^= 1
    put(layer, weight)


def flip_a_bit_of_a_bias(model):
    model.model.layers[1].self_attn.qkv_proj.bias.data.view(torch.uint8)[0] ^= 1


def swap_gate_and_up(model):
    layer = model.model.layers[1].mlp.gate_up_proj
    put(layer, matrix(layer).roll(256, 0))


def flip_a_bit_of_the_embedding(model):
    model.model.embed_tokens.weight.data.view(torch.uint8)[3, 3] ^= 1


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (flip_a_bit, ["model.norm.weight"]),
        (flip_a_bit_in_a_kernel, ["model.layers.0.self_attn.o_proj.weight"]),
        (
            flip_a_bit_of_a_bias,
            [f"model.layers.1.self_attn.{part}_proj.bias" for part in ("qkv", "q", "k", "v")],
        ),
        (
            swap_gate_and_up,
            [f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate_up", "gate", "up")],
        ),
        (flip_a_bit_of_the_embedding, ["model.embed_tokens.weight"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_q4_what_differs_is_found_and_named(llm, ends, damage, named):
    sender, receiver = ends
    model = make_model(llama_config(**CONFIG), seed=1)
    sender.update_weights(model, version=1)
    clean = receiver.verify_weights()
    assert clean.ok, clean
    assert clean.checked == len(dict(model.named_parameters()))
    llm.apply_model(damage)
    (words,) = receiver.verify_weights().different
    for name in named:
        assert name in words
    # Looking mended nothing; the next update does.
    assert receiver.verify_weights().different == (words,)
    receiver.apply_weights()
    assert receiver.verify_weights().ok
    assert greedy(llm) == expected(model)


def test_an_update_that_is_refused_leaves_every_bit_as_it_was(ends):
    """Biases too, which vLLM writes at once while it looks at an update."""
    sender, receiver = ends
    sender.update_weights(make_model(llama_config(**CONFIG), seed=2), version=1)
    state = dict(make_model(llama_config(**CONFIG), seed=3).state_dict())
    del state["model.norm.weight"]
    with pytest.raises(ws.ReceiverError, match=r"model\.norm lacks weight"):
        sender.update_weights(state, version=2)
    assert receiver.version.number == 1
    assert receiver.verify_weights().ok


def test_nan_and_the_sign_of_zero_are_compared(llm, ends):
    sender, receiver = ends
    state = dict(make_model(llama_config(**CONFIG), seed=4).state_dict())
    state["model.norm.weight"][:2] = torch.tensor([float("nan"), 0.0])
    sender.update_weights(state, version=1)
    assert receiver.verify_weights().ok
    llm.apply_model(negate_a_zero)
    (words,) = receiver.verify_weights().different
    assert "model.norm.weight" in words


def negate_a_zero(model):
    model.model.norm.weight.data[1] = -0.0


def test_a_draft_that_the_engine_does_not_have_is_said_so(llm, path):
    scheme = ws.DoubleBufferScheme(path)
    with scheme.create_sender() as sender:
        sender.connect()
        with scheme.create_receiver(llm, targets=("draft",)) as receiver:
            sender.attach(receiver)
            with pytest.raises(ws.ReceiverError, match="no draft model"):
                sender.update_weights(make_model(llama_config(**CONFIG), seed=5), version=1)


def test_nothing_is_compared_with_a_version_that_went_with_its_sender(llm, path):
    """In place of a wait of minutes for a sender that has ended as it should."""
    scheme = ws.DoubleBufferScheme(path)
    with scheme.create_sender() as sender, scheme.create_receiver(llm) as receiver:
        sender.connect()
        receiver.connect()
        sender.update_weights(make_model(llama_config(**CONFIG), seed=6), version=1)
        receiver.poll_and_apply(timeout=10)
        assert receiver.verify_weights().ok
        sender.shutdown()
        with pytest.raises(ws.VersionGoneError, match="is gone"):
            receiver.verify_weights()
        assert receiver.ready


def swap_a_layer(model):
    """For a copy of it, which vLLM cannot load."""
    layer = model.model.layers[0]
    model.swapped = [layer.input_layernorm]  # a list, so that it is no part of the model
    layer.input_layernorm = copy.deepcopy(layer.input_layernorm)


def swap_it_back(model):
    (model.model.layers[0].input_layernorm,) = model.__dict__.pop("swapped")


@pytest.mark.parametrize("apply", ["plan", "reload"])
def test_a_model_that_has_changed_is_tried_before_anything_of_it_is_touched(llm, path, apply):
    """It fitted once, and does so no more: refused, and the engine goes on with what it holds."""
    first, second = (make_model(llama_config(**CONFIG), seed) for seed in (1, 2))
    scheme = ws.DoubleBufferScheme(path)
    receiver = scheme.create_receiver(llm, apply=apply)
    with scheme.create_sender() as sender, receiver:
        sender.connect()
        receiver.connect()
        sender.update_weights(first, version=1)
        receiver.poll_and_apply()
        llm.apply_model(swap_a_layer)
        try:
            sender.update_weights(second, version=2)
            with pytest.raises(ws.EngineError, match="input_layernorm"):
                receiver.poll_and_apply()
            assert (receiver.state, receiver.version.number) == ("applied", 1)
            assert greedy(llm) == expected(first)
        finally:
            llm.apply_model(swap_it_back)
        sender.update_weights(second, version=3)
        receiver.poll_and_apply()
        assert greedy(llm) == expected(second)
