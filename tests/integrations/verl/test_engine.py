"""The checkpoint engine by itself: the calls that verl makes of it, in one process."""

import asyncio

import pytest
import torch

import weightsync as ws
from tests.conftest import assert_all_same, looking

pytest.importorskip("verl")

from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.checkpoint_engine.base import CheckpointEngineWithCache

from weightsync.integrations.verl import WeightSyncCheckpointEngine

TIMEOUT = 10.0


def engine(url, **options):
    options = {"timeout": TIMEOUT, **options}
    return CheckpointEngineRegistry.new("weightsync", bucket_size=1 << 20, url=url, **options)


@pytest.fixture
def ends(run_dir):
    """Two ranks of an actor, the first of which sends, and two rollouts."""
    url = f"shm://{run_dir}?slots=3"
    made = [engine(url, is_master=True), *(engine(url) for _ in range(3))]
    yield made[:2], made[2:]
    for one in made:
        one.shutdown()


def weights(value):
    return {"a": torch.full((4, 4), float(value)), "b": torch.arange(3) + value}


def set_up(actors, rollouts):
    metadata = [one.prepare() for one in (*actors, *rollouts)]
    made = type(actors[0]).build_topology(len(actors), len(rollouts), metadata)
    for group, options in zip((actors, rollouts), made, strict=True):
        assert {len(values) for values in options.values()} == {len(group)}
    # Rollouts first: in one process nobody can wait for another.
    for group, options in zip((rollouts, actors), made[::-1], strict=True):
        for number, one in enumerate(group):
            one.init_process_group(**{key: values[number] for key, values in options.items()})


async def taken(stream):
    return {name: tensor.clone() async for name, tensor in stream}


async def update(actors, rollouts, value, steps=None):
    """What the manager does; gives what the rollouts received."""
    streams = [asyncio.create_task(taken(r.receive_weights(steps))) for r in rollouts]
    sends = [actor.send_weights(iter(weights(value).items()), steps) for actor in actors]
    metrics, other = await asyncio.gather(*sends)
    assert other is None
    return metrics, await asyncio.gather(*streams)


def test_verl_finds_it_by_its_name_and_it_is_one_with_a_cache():
    assert CheckpointEngineRegistry.get("weightsync") is WeightSyncCheckpointEngine
    assert issubclass(WeightSyncCheckpointEngine, CheckpointEngineWithCache)


def test_every_rollout_receives_every_update(ends):
    actors, rollouts = ends
    for steps in (None, 5, 5):
        set_up(actors, rollouts)
        metrics, received = asyncio.run(update(actors, rollouts, 1 + (steps or 0), steps))
        for held in received:
            assert_all_same(held, weights(1 + (steps or 0)))
        for one in (*actors, *rollouts):
            one.finalize()
    assert metrics["weightsync/version"] == 6


def test_a_rollout_does_not_take_the_former_version_for_the_one_that_is_sent(ends):
    """Also one that is new, and has none to compare with."""
    actors, rollouts = ends
    asyncio.run(actors[0].send_weights(iter(weights(1).items()), 1))
    set_up(actors, rollouts)

    async def early():
        begun = [looking(rollout._receiver) for rollout in rollouts]
        streams = [asyncio.create_task(taken(r.receive_weights(2))) for r in rollouts]
        for each in begun:
            assert await asyncio.to_thread(each.wait, TIMEOUT)
        await actors[0].send_weights(iter(weights(2).items()), 2)
        return await asyncio.gather(*streams)

    for held in asyncio.run(early()):
        assert_all_same(held, weights(2))


def test_the_cache_gives_the_newest_version_as_often_as_one_likes(ends):
    actors, rollouts = ends
    for value in (1, 2):
        asyncio.run(actors[0].send_weights(iter(weights(value).items()), value))
        for _ in range(2):
            assert_all_same(asyncio.run(taken(rollouts[0].get_weights())), weights(value))


def test_weights_are_cast_on_their_way(run_dir):
    sender = engine(f"shm://{run_dir}", is_master=True, dtype="bfloat16")
    rollout = engine(f"shm://{run_dir}")
    asyncio.run(sender.send_weights(iter(weights(1).items())))
    held = asyncio.run(taken(rollout.get_weights()))
    assert {name: t.dtype for name, t in held.items()} == {"a": torch.bfloat16, "b": torch.int64}
    rollout.shutdown()
    sender.shutdown()


@pytest.mark.parametrize(
    ("url", "options", "words"),
    [
        ("shm:///dev/shm/x", {"dtype": "half"}, "dtype='half'"),
        ("cuda-ipc:///dev/shm/x", {}, "keeps no copy"),
        ("nonsense", {}, "not a URL of a scheme"),
    ],
)
def test_wrong_options_are_refused_when_the_engine_is_made(url, options, words):
    with pytest.raises(ws.SchemeError, match=words):
        engine(url, **options)
