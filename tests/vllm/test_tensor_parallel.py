"""TP=2: both workers open the snapshot themselves, and fail or succeed together."""

import pytest
import torch

import weightsync as ws
from tests.vllm.conftest import expected, greedy, llama_config, make_llm, make_model, stop

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_tensor_parallel_engine_gets_the_same_weights(path, tmp_path):
    config = llama_config()
    config.save_pretrained(tmp_path)
    llm = make_llm(tmp_path, tensor_parallel_size=2)
    try:
        scheme = ws.DoubleBufferScheme(path)
        with scheme.create_sender() as sender, scheme.create_receiver(llm) as receiver:
            sender.connect()
            sender.attach(receiver)
            for number in range(1, 4):
                model = make_model(config, number)
                sender.update_weights(model, version=number)
                assert greedy(llm) == expected(model)
            # Only the second worker's half of this one is too short: its failure undoes both.
            state = dict(make_model(config, 9).state_dict())
            state["model.layers.1.mlp.down_proj.weight"] = torch.zeros(128, 200)
            with pytest.raises(ws.ReceiverError, match=r"worker 1: .*down_proj") as caught:
                sender.update_weights(state, version=10)
            assert "worker 0" not in str(caught.value)
            assert receiver.status().state == "applied"
            assert greedy(llm) == expected(model)
            # Later calls answer for themselves, not for the one that failed.
            last = make_model(config, 11)
            sender.update_weights(last, version=11)
            assert greedy(llm) == expected(last)
            folder = tmp_path / "saved"
            last.save_pretrained(folder)
            tokens = greedy(llm)
    finally:
        stop(llm)
    fresh = make_llm(folder, "safetensors", backend=None)
    try:
        assert greedy(fresh) == tokens
    finally:
        stop(fresh)


@pytest.mark.slow
def test_an_engine_that_dies_is_said_so_within_seconds(path, tmp_path):
    """H1 on vLLM: its engine process is killed; the sender learns of it long before its timeout."""
    import time

    import psutil

    config = llama_config(num_hidden_layers=1)
    config.save_pretrained(tmp_path)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    llm = make_llm(tmp_path)
    try:
        scheme = ws.DoubleBufferScheme(path)
        with scheme.create_sender() as sender, scheme.create_receiver(llm) as receiver:
            sender.connect()
            sender.attach(receiver)
            sender.update_weights(make_model(config, 1), version=1)
            for child in psutil.Process().children(recursive=True):
                if child.pid not in before and "EngineCore" in " ".join(child.cmdline()):
                    child.kill()
            began = time.monotonic()
            with pytest.raises(ws.ReceiverError, match=r"died|dead"):
                sender.update_weights(make_model(config, 2), version=2, timeout=120)
            assert time.monotonic() - began < 60
            assert receiver.status().state == "unusable"
    finally:
        stop(llm)
