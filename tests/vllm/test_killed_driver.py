"""kill -9 of the process that holds the LLM: vLLM's workers live on, the trainer goes on."""

import os
import subprocess
import sys

import psutil
import pytest
import torch

import weightsync as ws
from tests.vllm.conftest import llama_config, make_model

pytestmark = [pytest.mark.vllm, pytest.mark.live, pytest.mark.slow, pytest.mark.timeout(300)]

DRIVER = """
import os, signal, sys
import weightsync as ws
from tests.vllm.conftest import make_llm
from weightsync.engines.vllm import VLLMEngine

if __name__ == "__main__":
    llm = make_llm(sys.argv[1])
    # Killed when its workers have leased and verified the version, just before they load it.
    VLLMEngine.pause = lambda self, deadline: os.kill(os.getpid(), signal.SIGKILL)
    receiver = ws.DoubleBufferScheme(sys.argv[2]).create_receiver(llm)
    receiver.connect(timeout=60)
    print("ready", flush=True)
    receiver.poll_and_apply(timeout=60)
"""


def test_orphaned_workers_give_their_lease_back(path, tmp_path):
    config = llama_config(num_hidden_layers=1)
    config.save_pretrained(tmp_path)
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    scheme = ws.DoubleBufferScheme(path)
    orphans = []
    with scheme.create_sender(make_model(config, 1), timeout=30) as sender:
        sender.connect()
        driver = subprocess.Popen(
            [sys.executable, str(script), str(tmp_path), path],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert driver.stdout.readline().strip() == "ready"
            orphans = psutil.Process(driver.pid).children(recursive=True)
            with pytest.raises(ws.ReceiverError, match="dead"):
                sender.update_weights(version=1, wait="applied")
            assert driver.wait(30) == -9
            target = {
                name: torch.zeros_like(t) for name, t in make_model(config, 2).state_dict().items()
            }
            with scheme.create_receiver(target) as receiver:
                receiver.connect()
                for number in (2, 3, 4):  # with two slots: needs the one that the workers had
                    sender.update_weights(make_model(config, number), version=number)
                    assert receiver.poll_and_apply().version.number == number
        finally:
            driver.kill()
            driver.wait()
            for orphan in orphans:
                if orphan.is_running():
                    orphan.kill()
