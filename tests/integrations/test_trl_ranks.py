"""Several ranks of one trainer: with an engine in each of their processes, or with one server."""

import pytest
import torch

import weightsync as ws
from tests.live import trainers
from tests.live.processes import PeerError
from tests.live.world import World

pytest.importorskip("trl")

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def ranks(tmp_path):
    made = World(2, tmp_path / "store")
    yield made
    made(end)
    made.dispose()


def link(state, path, kind, engines, timeout=30.0):
    """What ``attach`` makes on each rank: a model, and an engine on each or on rank 0 alone."""
    from weightsync.integrations.trl import Link, Plan

    leads = torch.distributed.get_rank() == 0
    trainers.build(state, kind)
    state.engine = trainers.plain(seed=9) if leads or engines == "each" else None
    state.link = Link(Plan(ws.DoubleBufferScheme(path), timeout), state.engine, leads=leads)


def send_and_train(state, seed):
    right = send_whole(state)
    trainers.train(state, seed)
    return right


def send_whole(state):
    state.link.send(state.model)
    whole = trainers.whole(state)  # by all ranks together
    return state.engine is None or all(
        torch.equal(tensor, whole[name]) for name, tensor in state.engine.state_dict().items()
    )


def refuse(state):
    if torch.distributed.get_rank() == 1:
        state.engine.register_parameter("another", torch.nn.Parameter(torch.ones(1)))


def end(state):
    if getattr(state, "link", None) is not None:
        state.link.close()


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "fsdp1"])
@pytest.mark.parametrize("engines", ["one", "each"])
def test_every_engine_has_each_step_of_a_trainer_of_two_ranks(ranks, run_dir, kind, engines):
    ranks(link, run_dir, kind, engines, within=200.0)  # imports all of TRL
    for step in range(3):
        assert ranks(send_and_train, step) == [True, True]


def test_a_rank_whose_engine_refuses_says_so_itself(ranks, run_dir):
    ranks(link, run_dir, "ddp", "each", within=200.0)
    ranks(refuse)
    first, second = ranks.outcomes(send_whole)  # the other one is served
    assert not isinstance(first, PeerError)
    assert "another" in str(second)
