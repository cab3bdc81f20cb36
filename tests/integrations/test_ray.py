"""Trainer and replicas as Ray actors on two nodes, a scheme chosen for them and handed to them."""

import os
import re
import socket
import time

import psutil
import pytest

import weightsync as ws
from tests.docs import run as run_page
from tests.integrations.ray_cluster import WAIT, Replica, Trainer, two_nodes
from weightsync.testing.processes import eventually

pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def nodes():
    with two_nodes() as nodes:
        yield nodes


@pytest.fixture(scope="module")
def actors(nodes):
    """A trainer, a replica on its node, and one on the other."""
    made = [nodes.make(nodes.here, Trainer), nodes.make(nodes.here, Replica)]
    made.append(nodes.make(nodes.there, Replica))
    yield made
    for actor in made:
        nodes.ray.kill(actor)


@pytest.fixture
def run(nodes, actors):
    """Those actors; their sender and receivers end with the test."""
    made = Run(nodes, *actors)
    yield made
    made.stop()


class Run:
    def __init__(self, nodes, trainer, near, far):
        self._nodes = nodes
        self.trainer, self.near, self.far = trainer, near, far
        self._started = []

    def start(self, choice, **outputs):
        """As a user does: the scheme is an argument like any other."""
        self._get(self.trainer, "start", choice.scheme)
        for scheme, name in zip(choice.schemes, ("near", "far"), strict=True):
            self.join(getattr(self, name), name, scheme, **outputs.get(name, {}))

    def started(self, *actors):
        self._started += actors

    def join(self, actor, name, scheme, **options):
        self._get(actor, "start", scheme, name, **options)

    def step(self, number):
        return self._get(self.trainer, "step", number)

    def holds(self, actor):
        return self._get(actor, "holds")

    def stop(self):
        for actor in reversed(self._started):
            self._get(actor, "stop")

    def lose(self, actor, by=None):
        """Have it gone: Ray waits for nothing."""
        self._started.remove(actor)
        pid = self._nodes.get(actor.__ray_call__.remote(lambda actor: os.getpid()))
        (by or self._nodes.ray.kill)(actor)
        eventually(lambda: not psutil.pid_exists(pid))

    def _get(self, actor, method, *arguments, **options):
        if method == "start":
            self._started.append(actor)
        return self._nodes.get(getattr(actor, method).remote(*arguments, **options))


def test_memory_leads_to_the_replica_on_the_trainers_node_and_the_network_to_the_other(run):
    choice = ws.choose(run.trainer, [run.near, run.far])
    assert [type(scheme) for scheme in choice.schemes] == [ws.DoubleBufferScheme, ws.NCCLScheme]
    assert f"on one host with the trainer: {run.near!r}" in choice.reasons
    assert f"; {run.far!r} heard it" in choice.why
    assert choice.scheme.schemes[1].token not in str(choice)
    run.start(choice)
    for number in 1, 2:
        report = run.step(number)
        assert report.scheme == "fallback:shm+nccl"
        assert {r.receiver: r.state for r in report.receivers} == {
            "near": "applied",
            "far": "applied",
        }
        assert run.holds(run.near) == run.holds(run.far) == (number, [number])


def test_what_the_page_shows(run, run_dir, capsys):
    replicas = [run.near, run.far]
    names = run_page(
        "docs/integrations/ray.md", "ray", run_dir, trainer=run.trainer, replicas=replicas
    )
    run.started(run.trainer, *replicas)
    assert str(names["choice"]) in capsys.readouterr().out
    assert [r.receiver for r in run.step(1).receivers] == ["replica-0", "replica-1"]


def test_a_directory_leads_to_the_other_node_where_the_network_does_not(run, tmp_path):
    with socket.create_server((ws.Place.here().address, 0)) as other:  # another program's
        port = other.getsockname()[1]
        choice = ws.choose(run.trainer, [run.near, run.far], port=port, directory=str(tmp_path))
    assert f"port {port} of" in choice.why
    assert f"the trainer wrote into {tmp_path}; {run.far!r} read it" in choice.reasons
    assert os.listdir(tmp_path) == []
    run.start(choice)
    assert run.step(1).scheme == "fallback:shm+disk"
    assert run.holds(run.near) == run.holds(run.far) == (1, [1])


def test_replicas_of_the_trainers_node_alone_share_its_memory(run):
    choice = ws.choose(run.trainer, run.near)
    assert isinstance(choice.scheme, ws.DoubleBufferScheme)
    assert choice.schemes == (choice.scheme,)
    grows = ws.choose(run.trainer, run.near, may_grow=True)
    assert [type(scheme) for scheme in grows.scheme.schemes] == [
        ws.DoubleBufferScheme,
        ws.NCCLScheme,
    ]


def test_a_replica_that_refuses_is_an_error_in_the_users_loop_in_its_own_words(run):
    run.start(ws.choose(run.trainer, [run.near, run.far]), far={"outputs": 5})
    with pytest.raises(ws.ReceiverError, match=r"'far' .*'weight': sent .*4, 4.*here .*5, 4"):
        run.step(1)
    assert run.holds(run.near) == (1, [1])


def test_a_replica_is_lost_and_another_one_joins_while_training_goes_on(run, nodes):
    choice = ws.choose(run.trainer, [run.near, run.far])
    run.start(choice)
    run.step(1)
    new = nodes.make(nodes.there, Replica)  # it takes a while to start
    run.lose(run.far)
    began = time.monotonic()
    with pytest.raises(ws.ReceiverError, match=r"receiver 'far' .*: dead") as caught:
        run.step(2)
    assert time.monotonic() - began < WAIT / 2
    assert [failed.receiver for failed in caught.value.failures] == ["far"]
    assert run.holds(run.near) == (2, [2])
    with pytest.raises(ws.EngineDiedError, match=re.escape(repr(run.far))):
        ws.choose(run.trainer, [run.near, run.far])
    run.join(new, "new", choice.scheme)  # wherever it is, the trainer's scheme leads to it
    assert {r.receiver for r in run.step(3).receivers} == {"near", "new"}
    assert run.holds(run.near) == run.holds(new) == (3, [3])


def test_an_actor_that_does_not_answer_is_named(run):
    run.trainer.be_busy.remote(2.0)
    with pytest.raises(ws.DeadlineError, match=r"Actor\(Trainer, .*\) had not answered to look"):
        ws.choose(run.trainer, [run.near], timeout=0.5)


@pytest.mark.slow
def test_a_node_is_lost_with_its_replica(nodes, actors):
    trainer, near, _ = actors
    node = nodes.add()
    run = Run(nodes, trainer, near, nodes.make(node.node_id, Replica))
    run.start(ws.choose(trainer, [near, run.far]))
    run.step(1)
    run.lose(run.far, by=lambda actor: nodes.lose(node))
    with pytest.raises(ws.ReceiverError, match=r"receiver 'far' .*: dead"):
        run.step(2)
    assert run.holds(near) == (2, [2])
    run.stop()
