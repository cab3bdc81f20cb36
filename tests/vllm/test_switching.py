"""A real vLLM ``LLM`` on the CPU goes from one run to another, and back."""

from concurrent.futures import ThreadPoolExecutor

import pytest

import weightsync as ws
from tests.vllm.conftest import expected, greedy, llama_config, make_model
from weightsync.testing.processes import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

WAIT = 60.0


def model(seed, **changes):
    return make_model(llama_config(**changes), seed)


@pytest.fixture
def scheme(path):
    return ws.DoubleBufferScheme(path)


@pytest.fixture
def elsewhere(request, tmp_path):
    """Another run, by another scheme."""
    kinds = {
        "disk": lambda: ws.DiskScheme(str(tmp_path / "run"), durable=False),
        "nccl": lambda: ws.NCCLScheme(backend="gloo"),
    }
    return kinds[request.param]()


@pytest.mark.parametrize(
    "elsewhere", ["disk", pytest.param("nccl", marks=pytest.mark.slow)], indirect=True
)
def test_from_one_run_to_another_and_back(llama, scheme, elsewhere):
    """Its workers read from both for a while; a version on its way back has no higher number."""
    with (
        elsewhere.create_sender(timeout=WAIT) as other,
        scheme.create_sender(timeout=WAIT) as sender,
        scheme.create_receiver(llama, id="llm") as receiver,
    ):
        other.connect()
        sender.connect()
        first, second, third = model(101), model(102), model(103)
        sender.update_weights(first, version=10)
        receiver.connect()
        receiver.poll_and_apply(WAIT)
        assert greedy(llama) == expected(first)
        with ThreadPoolExecutor(1) as pool:
            switching = pool.submit(receiver.switch, elsewhere, WAIT)
            eventually(lambda: other.receivers() or None, WAIT)
            other.update_weights(second, version=5)
            report = switching.result(WAIT)
        assert greedy(llama) == expected(second)
        assert llama.get_weight_version() == str(report.version) == str(other.version)
        assert receiver.verify_weights().ok
        assert sender.receivers() == []
        receiver.follow()
        other.update_weights(third, version=6, wait="applied")
        with receiver.hold():
            assert greedy(llama) == expected(third)
        assert receiver.switch(scheme).version == sender.version
        with receiver.hold():
            assert greedy(llama) == expected(first)


@pytest.mark.parametrize("elsewhere", ["disk"], indirect=True)
def test_another_architecture_is_refused_and_the_engine_goes_on(llama, scheme, elsewhere):
    with (
        elsewhere.create_sender() as other,
        scheme.create_sender() as sender,
        scheme.create_receiver(llama, id="llm") as receiver,
    ):
        other.connect()
        sender.connect()
        good = model(111)
        sender.update_weights(good, version=1)
        receiver.connect()
        receiver.poll_and_apply(WAIT)
        other.update_weights(model(112, num_hidden_layers=3), version=1)
        with pytest.raises(ws.MismatchError, match=r"tensors are not here \('model\.layers\.2"):
            receiver.switch(elsewhere)
        assert greedy(llama) == expected(good)
        assert llama.get_weight_version() == str(receiver.version) == str(sender.version)
        assert receiver.verify_weights().ok
        newer = model(113)
        sender.update_weights(newer, version=2)
        receiver.poll_and_apply(WAIT)
        assert greedy(llama) == expected(newer)
