"""Real vLLM replicas as Ray actors on two nodes: one dies, one joins, all hold what was sent."""

import contextlib
import os

import psutil
import pytest

import weightsync as ws
from tests.integrations.ray_cluster import WAIT, two_nodes
from tests.vllm.conftest import expected, greedy, llama_config, make_llm, make_model, stop
from weightsync.testing.processes import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.live, pytest.mark.timeout(500)]

START = 200.0
"""Seconds for an actor to load its engine."""


class VLLMTrainer:
    def __init__(self):
        self.model = make_model(llama_config(), seed=1)

    def start(self, scheme):
        self.sender = scheme.create_sender(self.model, timeout=WAIT)
        self.sender.connect()

    def step(self, number):
        self.model.load_state_dict(make_model(llama_config(), seed=number).state_dict())
        return self.sender.update_weights(version=number, wait="applied")

    def stop(self):
        self.sender.shutdown()


class VLLMReplica:
    def __init__(self, folder):
        llama_config().save_pretrained(folder)
        self.llm = make_llm(folder)

    def start(self, scheme, name):
        self.receiver = scheme.create_receiver(self.llm, id=name)
        self.receiver.connect(timeout=WAIT)
        self.receiver.follow()

    def answers(self):
        with self.receiver.hold() as version:
            return version.number, greedy(self.llm)

    def stop(self):
        self.receiver.shutdown()
        stop(self.llm)


def test_replicas_of_two_nodes_answer_as_the_trainers_model_also_after_one_is_lost(tmp_path):
    with two_nodes() as nodes:
        trainer = nodes.make(nodes.here, VLLMTrainer)
        near = nodes.make(nodes.here, VLLMReplica, str(tmp_path / "near"))
        far = nodes.make(nodes.there, VLLMReplica, str(tmp_path / "far"))
        choice = ws.choose(trainer, [near, far], timeout=START)
        nodes.get(trainer.start.remote(choice.scheme))
        for replica, name, scheme in zip((near, far), ("near", "far"), choice.schemes, strict=True):
            nodes.get(replica.start.remote(scheme, name), START)
        assert nodes.get(trainer.step.remote(2), START).scheme == "fallback:shm+nccl"
        assert answers(nodes, near, far) == [right(2)] * 2

        new = nodes.make(nodes.there, VLLMReplica, str(tmp_path / "new"))
        kill(nodes, far)
        with pytest.raises(ws.ReceiverError, match=r"receiver 'far' .*: dead"):
            nodes.get(trainer.step.remote(3), START)
        assert answers(nodes, near) == [right(3)]
        nodes.get(new.start.remote(choice.scheme, "new"), START)
        nodes.get(trainer.step.remote(4), START)
        assert answers(nodes, near, new) == [right(4)] * 2
        nodes.get([near.stop.remote(), new.stop.remote(), trainer.stop.remote()])


def right(number):
    return number, expected(make_model(llama_config(), seed=number))


def answers(nodes, *replicas):
    return nodes.get([replica.answers.remote() for replica in replicas], START)


def kill(nodes, replica):
    pid = nodes.get(replica.__ray_call__.remote(lambda actor: os.getpid()))
    children = psutil.Process(pid).children(recursive=True)
    nodes.ray.kill(replica)
    eventually(lambda: not psutil.pid_exists(pid))
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
