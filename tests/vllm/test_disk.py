"""Versions on disk in a real vLLM ``LLM`` on the CPU: by us, and by vLLM's own loader."""

import pytest

import weightsync as ws
from tests.vllm.conftest import expected, greedy, llama_config, make_llm, make_model, stop

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture
def scheme(tmp_path):
    return ws.DiskScheme(tmp_path / "run", keep=1)


def test_successive_versions_give_the_tokens_of_the_model_that_was_sent(llama, scheme):
    with scheme.create_sender() as sender, scheme.create_receiver(llama) as receiver:
        sender.connect()
        sender.attach(receiver)
        for number in range(1, 4):
            model = make_model(llama_config(), seed=70 + number)
            report = sender.update_weights(model, version=number)
            assert greedy(llama) == expected(model)
            assert llama.get_weight_version() == str(report.version) == str(receiver.version)


def test_a_corrupt_version_is_refused_and_the_engine_goes_on(llama, scheme):
    with scheme.create_sender() as sender, scheme.create_receiver(llama, id="llm") as receiver:
        sender.connect()
        receiver.connect()
        good = make_model(llama_config(), seed=81)
        sender.update_weights(good, version=1)
        receiver.poll_and_apply(10)
        report = sender.update_weights(make_model(llama_config(), seed=82), version=2)
        with open(f"{scheme.directory(report.version)}/model.safetensors", "r+b") as file:
            file.seek(100_000)
            file.write(b"\xff" * 64)
        with pytest.raises(ws.WeightSyncError, match="model\\."):
            receiver.poll_and_apply(10)
        assert greedy(llama) == expected(good)


@pytest.mark.slow
def test_vllm_loads_and_reloads_such_directories_by_itself(tmp_path):
    """An engine that knows nothing of this library; several files are one model."""
    scheme = ws.DiskScheme(tmp_path / "shards", shard_bytes=1 << 20)
    first, second = (make_model(llama_config(), seed=seed) for seed in (91, 92))
    with scheme.create_sender() as sender:
        sender.connect()
        sender.update_weights(first, version=1)
        llm = make_llm(scheme.directory(scheme.newest()), "safetensors", backend=None)
        try:
            assert greedy(llm) == expected(first)
            sender.update_weights(second, version=2)
            folder = scheme.directory(scheme.newest())
            llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
            llm.reset_prefix_cache()
            assert greedy(llm) == expected(second)
        finally:
            stop(llm)
