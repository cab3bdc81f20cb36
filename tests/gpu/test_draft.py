"""Draft models in a real vLLM on a GPU; vLLM 0.25 has none of its own updates for them."""

import importlib.util
import os
from contextlib import contextmanager

import pytest
import torch

import weightsync as ws

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm"),
]

PROMPTS = [[1, 2, 3, 4], [9, 8, 7], [42], [5] * 20]


def config():
    from tests.vllm.conftest import llama_config

    return llama_config(
        hidden_size=512, num_attention_heads=8, num_key_value_heads=4, torch_dtype="bfloat16"
    )


def model(seed):
    from tests.vllm.conftest import make_model

    return make_model(config(), seed).bfloat16()


@pytest.fixture(scope="module", params=[True, False], ids=["eager", "graphs"])
def llm(tmp_path_factory, request):
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    folder = tmp_path_factory.mktemp("speculating")
    for name in ("model", "draft"):
        config().save_pretrained(folder / name)
    llm = LLM(
        str(folder / "model"),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=request.param,
        max_model_len=128,
        gpu_memory_utilization=0.2,
        disable_log_stats=False,
        speculative_config={
            "method": "draft_model",
            "model": str(folder / "draft"),
            "num_speculative_tokens": 3,
        },
        weight_transfer_config=WeightTransferConfig(backend="weightsync"),
    )
    yield llm
    llm.llm_engine.engine_core.shutdown()


def greedy(llm):
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=24, detokenize=False, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


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
        tokens = greedy(llm)
        assert share_of_accepted(llm) > 0.8
        send(second)
        assert greedy(llm) != tokens
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
        assert greedy(llm) == tokens
        assert share_of_accepted(llm) > 0.8
