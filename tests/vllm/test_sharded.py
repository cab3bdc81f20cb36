"""A trainer of two FSDP2 ranks, each of which writes its own rows, and a real vLLM engine."""

import pytest

import weightsync as ws
from tests.live import trainers
from tests.live.world import World
from tests.vllm.conftest import expected, greedy, llama_config, make_model

pytestmark = [pytest.mark.vllm, pytest.mark.live, pytest.mark.timeout(600)]


def build_llama(state, seed):
    state.model = trainers.KINDS["fsdp2"](make_model(llama_config(), seed), layers="model.layers")


@pytest.mark.parametrize("gather", [True, False], ids=["gathered", "direct"])
def test_two_ranks_publish_and_the_engine_generates_as_their_model(llama, path, tmp_path, gather):
    ranks = World(2, tmp_path / "store")
    try:
        ranks(build_llama, 31)
        ranks(trainers.connect, path, gather=gather)
        with ws.DoubleBufferScheme(path).create_receiver(llama) as receiver:
            receiver.connect(timeout=30)
            tokens = []
            for number, seed in ((1, 31), (2, 32)):
                ranks(build_llama, seed)
                ranks(trainers.register)
                ranks(trainers.update, number)
                assert receiver.poll_and_apply(timeout=30).version.number == number
                tokens.append(greedy(llama))
                assert tokens[-1] == expected(make_model(llama_config(), seed))
            assert tokens[0] != tokens[1]
        ranks(trainers.end_senders)
    finally:
        ranks.dispose()
