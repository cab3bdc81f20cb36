"""Two hundred updates leave nothing behind in vLLM's worker: threads, descriptors, memory."""

import os
import threading
import time

import psutil
import pytest

import weightsync as ws
from tests.vllm.conftest import expected, greedy, llama_config, make_llm, make_model, stop

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]


def belongings(model):
    """Of the worker's process: threads of ours, descriptors, megabytes."""
    time.sleep(1)  # threads that watch a driver look twice a second
    ours = [thread.name for thread in threading.enumerate() if "weightsync" in thread.name]
    process = psutil.Process(os.getpid())
    return sorted(ours), process.num_fds(), process.memory_info().rss / 2**20


@pytest.mark.parametrize("verify", [False, True], ids=["updates", "with verification"])
def test_nothing_grows_over_many_updates(verify, tmp_path, path, monkeypatch):
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    config = llama_config()
    config.save_pretrained(tmp_path)
    models = [make_model(config, seed) for seed in (1, 2)]
    lacking = dict(models[0].state_dict())
    del lacking["model.norm.weight"]
    llm = make_llm(tmp_path)
    try:
        scheme = ws.DoubleBufferScheme(path)
        with scheme.create_sender() as sender, scheme.create_receiver(llm) as receiver:
            sender.connect()
            sender.attach(receiver)
            for number in range(1, 201):
                if number == 20:
                    (before,) = llm.apply_model(belongings)
                if number % 10 == 5:
                    with pytest.raises(ws.ReceiverError, match="norm"):
                        sender.update_weights(lacking, version=number)
                    continue
                sender.update_weights(models[number % 2], version=number)
                if verify and number % 5 == 0:
                    assert receiver.verify_weights().ok
            (after,) = llm.apply_model(belongings)
            assert greedy(llm) == expected(models[0])
    finally:
        stop(llm)
    assert after[0] == before[0]
    assert after[1] == before[1]
    assert after[2] < before[2] + 64
