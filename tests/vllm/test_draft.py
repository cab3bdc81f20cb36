"""Draft models on a real vLLM: updated where they are named, and left alone where not."""

from contextlib import contextmanager

import pytest
import torch

import weightsync as ws
from tests.vllm.conftest import expected, greedy, llama_config, make_llm, make_model, stop

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]


def speculating(folder, method, draft):
    return make_llm(
        folder,
        speculative_config={"method": method, "model": str(draft), "num_speculative_tokens": 3},
        disable_log_stats=False,
    )


def accepted(llm):
    """How many of the tokens that were drafted until now were right, and of how many."""
    counts = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return [counts[f"vllm:spec_decode_num_{kind}_tokens"] for kind in ("accepted", "draft")]


def share_of_accepted(llm):
    before = accepted(llm)
    greedy(llm)
    right, drafted = (now - then for now, then in zip(accepted(llm), before, strict=True))
    return right / drafted


@contextmanager
def updating(llm, path, *targets, **options):
    """Sends to what is named, and sees that it holds it."""
    scheme = ws.DoubleBufferScheme(f"{path}-{'-'.join(targets)}")
    receiver = scheme.create_receiver(llm, targets=targets, **options)
    with scheme.create_sender() as sender, receiver:
        sender.connect()
        sender.attach(receiver)

        def send(weights):
            sender.update_weights(weights)
            assert receiver.verify_weights().ok

        yield send


def test_what_the_model_was_planned_for_is_not_kept_for_its_draft(tmp_path, path):
    """The two are sent manifests of their own, of which only parts are planned."""
    large, small = llama_config(num_hidden_layers=6, intermediate_size=2048), llama_config()
    large.save_pretrained(tmp_path / "model")
    small.save_pretrained(tmp_path / "draft")
    llm = speculating(tmp_path / "model", "draft_model", tmp_path / "draft")
    try:
        for target, config in (("model", large), ("draft", small), ("model", large)):
            with updating(llm, path, target, apply="plan", stage=True) as send:
                for seed in (1, 2, 3):
                    send(make_model(config, seed))
        assert greedy(llm) == expected(make_model(large, 3))
    finally:
        stop(llm)


def test_a_draft_model_is_updated_by_name_and_left_alone_otherwise(tmp_path, path):
    config = llama_config()
    for name in ("model", "draft"):
        config.save_pretrained(tmp_path / name)
    first, second, third = (make_model(config, seed) for seed in (1, 2, 3))
    llm = speculating(tmp_path / "model", "draft_model", tmp_path / "draft")
    try:
        with updating(llm, path, "draft") as send:
            send(first)
        with updating(llm, path, "model") as send:
            send(first)
            assert greedy(llm) == expected(first)
            assert share_of_accepted(llm) > 0.8  # the last ones are cut off
            send(second)
            assert greedy(llm) == expected(second)
            assert share_of_accepted(llm) < 0.5  # the draft says what it said
        with updating(llm, path, "draft") as send:
            send(second)
            assert greedy(llm) == expected(second)
            assert share_of_accepted(llm) > 0.8
            state = dict(third.state_dict())
            del state["model.norm.weight"]
            with pytest.raises(ws.ReceiverError, match=r"model\.norm lacks weight"):
                send(state)
            assert share_of_accepted(llm) > 0.8
        with updating(llm, path, "model", "draft") as send:
            send(third)
            assert greedy(llm) == expected(third)
            assert share_of_accepted(llm) > 0.8
    finally:
        stop(llm)


def eagle_weights(seed):
    """One layer, and what brings it its input; the embedding and the head are the model's."""
    state = make_model(llama_config(num_hidden_layers=1), seed).state_dict()
    torch.manual_seed(seed)
    layer = {
        name.removeprefix("model."): tensor
        for name, tensor in state.items()
        if "layers.0" in name and "input_layernorm" not in name
    }
    return {**layer, "fc.weight": torch.randn(128, 256) / 10}


def test_a_speculative_head_shares_what_the_model_brings(tmp_path, path):
    config = llama_config()
    config.save_pretrained(tmp_path / "model")
    head = llama_config(num_hidden_layers=1, architectures=["EagleLlamaForCausalLM"])
    head.save_pretrained(tmp_path / "head")
    llm = speculating(tmp_path / "model", "eagle", tmp_path / "head")
    try:
        model = make_model(config, 1)
        with updating(llm, path, "model") as send:
            send(model)
        for number in (2, 3):
            with updating(llm, path, "draft") as send:
                send(eagle_weights(number))
                assert greedy(llm) == expected(model)
                lacking = eagle_weights(number)
                del lacking["fc.weight"]
                with pytest.raises(ws.ReceiverError, match="fc lacks weight"):
                    send(lacking)
            model = make_model(config, number)
            with updating(llm, path, "model") as send:
                send(model)
            assert greedy(llm) == expected(model)
    finally:
        stop(llm)
