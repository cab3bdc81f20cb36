"""A fallback into a real vLLM ``LLM``: its workers find each version wherever it went."""

import os
import shutil

import pytest

import weightsync as ws
from tests.vllm.conftest import expected, greedy, llama_config, make_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]


def test_tokens_are_those_of_the_model_whichever_way_it_came(llama, tmp_path, path):
    scheme = ws.FallbackScheme(
        [ws.DoubleBufferScheme(path), ws.DoubleBufferScheme(tmp_path / "second", slots=3)],
        retry_after=0,
    )
    models = [make_model(llama_config(), seed=50 + number) for number in range(4)]
    with scheme.create_sender() as sender, scheme.create_receiver(llama) as receiver:
        sender.connect()
        receiver.connect()
        receiver.follow()
        ways = []
        for number, model in enumerate(models):
            if number == 1:  # nobody knows, and nobody is told
                shutil.rmtree(path)
                open(path, "w").close()
            if number == 3:
                os.unlink(path)
            report = sender.update_weights(model, version=number, wait="applied")
            ways.append(report.scheme)
            with receiver.hold() as version:
                assert version == report.version
                assert llama.get_weight_version() == str(version)
                assert greedy(llama) == expected(model)
    assert ways[:3] == ["fallback:shm", "fallback:shm#2", "fallback:shm#2"]
    assert ways[3].startswith("fallback:shm")
