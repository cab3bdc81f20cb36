"""A local Ray cluster of two nodes, and actors as a user writes them, with a tiny module."""

import os
import time
from contextlib import contextmanager

import torch

WAIT = 30.0
"""Seconds for whatever should take none: only a broken test waits that long."""

SIZE = {"num_cpus": 4, "object_store_memory": 80 << 20}
"""Of a node."""


@contextmanager
def two_nodes():
    """Gives a :class:`Nodes`; Ray has nothing running afterwards."""
    os.environ["RAY_AUTH_MODE"] = "disabled"  # it would write a token into the home
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**SIZE, "include_dashboard": False})
    try:
        ray.init(cluster.address, log_to_driver=False)
        yield Nodes(ray, cluster)
    finally:
        ray.shutdown()
        cluster.shutdown()


class Nodes:
    """The driver's node, and another one."""

    def __init__(self, ray, cluster):
        self.ray, self._cluster = ray, cluster
        self.here, self.there = ray.get_runtime_context().get_node_id(), self.add().node_id

    def add(self):
        return self._cluster.add_node(**SIZE)

    def lose(self, node):
        self._cluster.remove_node(node, allow_graceful=False)

    def make(self, node, kind, *arguments):
        """An actor on a node."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(node, soft=False)
        actor = self.ray.remote(num_cpus=0)(kind)
        return actor.options(scheduling_strategy=there).remote(*arguments)

    def get(self, reference, timeout=WAIT):
        return self.ray.get(reference, timeout=timeout)


class Trainer:
    def __init__(self):
        torch.set_num_threads(1)
        self.policy = torch.nn.Linear(4, 4)

    def start(self, scheme):
        self.sender = scheme.create_sender(self.policy, timeout=10.0)
        self.sender.connect(timeout=WAIT)

    def step(self, number):
        with torch.no_grad():
            self.policy.weight.fill_(number)
        return self.sender.update_weights(version=number, wait="applied")

    def be_busy(self, seconds):
        time.sleep(seconds)

    def stop(self):
        self.sender.shutdown()


class Replica:
    def __init__(self):
        torch.set_num_threads(1)

    def start(self, scheme, name, outputs=4):
        self.engine = torch.nn.Linear(4, outputs)
        self.receiver = scheme.create_receiver(self.engine, id=name)
        self.receiver.connect(timeout=WAIT)
        self.receiver.follow()

    def holds(self):
        with self.receiver.hold() as version:
            return version and version.number, self.engine.weight.unique().tolist()

    def stop(self):
        self.receiver.shutdown()
