"""Draft models in a real vLLM on a GPU; vLLM 0.25 has none of its own updates for them."""

import os
from contextlib import contextmanager

import pytest

import weightsync as ws
from tests.gpu.engines import MARKS, dense, greedy, make_llm, model, stop

pytestmark = MARKS


@pytest.fixture(scope="module", params=[True, False], ids=["eager", "graphs"])
def llm(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("speculating")
    for name in ("model", "draft"):
        dense().save_pretrained(folder / name)
    llm = make_llm(
        folder / "model",
        enforce_eager=request.param,
        disable_log_stats=False,
        speculative_config={
            "method": "draft_model",
            "model": str(folder / "draft"),
            "num_speculative_tokens": 3,
        },
    )
    yield llm
    stop(llm)


def said(llm):
    return greedy(llm, count=24)


def accepted(llm):
    """How many of the tokens that were drafted until now were right, and of how many."""
    counts = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return [counts[f"vllm:spec_decode_num_{kind}_tokens"] for kind in ("accepted", "draft")]


def share_of_accepted(llm):
    before = accepted(llm)
    said(llm)
    right, drafted = (now - then for now, then in zip(accepted(llm), before, strict=True))
    return right / drafted


@contextmanager
def updating(llm, path, *targets):
    """Sends to what is named, and sees that it holds it."""
    scheme = ws.DoubleBufferScheme(f"{path}-{'-'.join(targets)}")
    with scheme.create_sender() as sender, scheme.create_receiver(llm, targets=targets) as receiver:
        sender.connect()
        sender.attach(receiver)

        def send(weights):
            sender.update_weights(weights)
            found = receiver.verify_weights()
            assert found.ok, found

        yield send


def test_a_draft_model_is_updated_by_name_and_left_alone_otherwise(llm, tmp_path):
    path = f"/dev/shm/weightsync-test-{os.getpid()}-{tmp_path.name}"
    first, second, third = model(1), model(2), model(3)
    with updating(llm, path, "draft") as send:
        send(first)
    with updating(llm, path, "model") as send:
        send(first)
        tokens = said(llm)
        assert share_of_accepted(llm) > 0.8
        send(second)
        assert said(llm) != tokens
        assert share_of_accepted(llm) < 0.5  # the draft says what it said
    with updating(llm, path, "draft") as send:
        send(second)
        assert share_of_accepted(llm) > 0.8
        state = dict(third.state_dict())
        del state["model.norm.weight"]
        with pytest.raises(ws.ReceiverError, match=r"model\.norm lacks weight"):
            send(state)
        assert share_of_accepted(llm) > 0.8
    with updating(llm, path, "model", "draft") as send:
        send(first)
        assert said(llm) == tokens
        assert share_of_accepted(llm) > 0.8
