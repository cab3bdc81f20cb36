"""verl's own ``CheckpointEngineManager`` over our schemes, with actor ranks and rollouts in Ray."""

import os
import re
import signal
import threading

import pytest
import torch

from tests.conftest import assert_all_same

ray = pytest.importorskip("ray")
pytest.importorskip("verl")


def assert_held(run, workers, steps):
    """Each rollout worker has what the trainer has, bit for bit."""
    for held_steps, weights in ray.get([worker.held.remote() for worker in workers]):
        assert held_steps == steps
        assert_all_same(weights, run.expected)


def test_all_rollouts_hold_what_the_trainer_holds_at_rising_versions(any_run):
    run, versions = any_run, []
    for steps in (None, 1, 2, 2, 10):
        run.train()
        metrics = run.manager.update_weights(global_steps=steps)
        versions.append(metrics["weightsync/version"])
        assert_held(run, run.workers, steps)
    assert versions == [0, 1, 2, 3, 10]
    assert metrics["weightsync/bytes"] == sum(t.nbytes for t in run.expected.values())


def test_a_rollout_that_refuses_is_an_error_in_the_users_loop_with_its_words(run):
    """C1."""
    pid = ray.get(run.workers[1].behave.remote("refuse"))
    with pytest.raises(RuntimeError, match="this layout is not mine") as caught:
        run.manager.update_weights(global_steps=20)
    assert f"pid={pid}" in str(caught.value)
    ray.get(run.workers[1].behave.remote("take"))
    run.train()
    run.manager.update_weights(global_steps=21)
    assert_held(run, run.workers, 21)


def test_a_rollout_that_stops_is_named_within_the_deadline(run):
    """H1."""
    pid = ray.get(run.workers[2].behave.remote("stop"))
    with pytest.raises(RuntimeError, match=rf"receiver '.*' \(pid {pid} on .*: waiting") as caught:
        run.manager.update_weights(global_steps=30)
    assert len(re.findall("receiver '", str(caught.value).splitlines()[-1])) == 1
    ray.get(run.workers[2].behave.remote("take"))
    run.train()
    run.manager.update_weights(global_steps=31)
    assert_held(run, run.workers, 31)


def test_weights_that_cannot_be_sent_are_named_and_no_rank_is_left_in_a_collective(run):
    """H6."""
    run.actor.add("odd", torch.empty(3, device="meta"))
    with pytest.raises(RuntimeError, match="tensor 'odd' cannot be sent"):
        run.manager.update_weights(global_steps=40)
    run.actor.add("odd", None)
    run.train()
    run.manager.update_weights(global_steps=41)
    assert_held(run, run.workers, 41)


def test_weights_are_published_while_a_rollout_still_takes_others(run):
    """R1. Rollouts that go on are not waited for; they take the newest from the cache later."""
    run.manager.update_weights(global_steps=50)
    before = dict(run.expected)
    slow, other = run.workers[:2]
    ray.get(slow.behave.remote("stop"))
    stopped = slow.take_from_cache.remote()
    while not ray.get(slow.taking.remote()):
        pass
    for steps in (51, 52):
        run.train()
        published = ray.get(run.actor.update_weights(global_steps=steps, mode="weightsync"))
        assert published[0]["weightsync/version"] == steps
        ray.get(other.take_from_cache.remote())
        assert_all_same(ray.get(other.held.remote())[1], run.expected)
    ray.get(slow.behave.remote("take"))
    ray.get(stopped)
    assert_all_same(ray.get(slow.held.remote())[1], before)


def test_a_killed_rollout_is_named_and_the_others_go_on_without_it(run):
    """H1, and the one that replaces it."""
    victim = run.workers.pop()
    pid = ray.get(victim.behave.remote("stop"))

    def kill():
        while not ray.get(victim.taking.remote()):
            pass
        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises((ray.exceptions.RayActorError, RuntimeError)) as caught:
        run.manager.update_weights(global_steps=60)
    killer.join()
    assert re.search(rf"pid[:=]? ?{pid}\b", str(caught.value))
    lost = run.replicas.pop()
    run.manager.remove_replicas([lost])
    run.train()
    run.manager.update_weights(global_steps=61)
    assert_held(run, run.workers, 61)

    from tests.integrations.verl.actors import Replica

    new = run.more(1)
    run.workers.extend(new)
    run.manager.add_replicas([Replica(new[0])])
    run.train()
    run.manager.update_weights(global_steps=62)
    assert_held(run, run.workers, 62)
