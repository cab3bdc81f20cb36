"""verl trains a policy on two actor ranks, and two rollout workers get its weights by our scheme.

    make example-verl                           # or, in an environment that has verl:
    python examples/verl_counting.py --url "disk:///tmp/run42"

The policy sees a digit and is rewarded for the one that follows. What takes the weights from the
actor to the rollouts is verl's own ``CheckpointEngineManager``; all that is ours is in ``config``.
At each step the log-probabilities of what was sampled are compared with the trainer's own: they
agree if, and only if, the rollouts have the weights of the step before.
"""

from __future__ import annotations

import argparse
import os
import sys

import ray
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from verl.checkpoint_engine import (
    CheckpointEngineManager,
    CheckpointEngineRegistry,
    CheckpointEngineWorker,
)
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.distributed import initialize_global_process_group_ray
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig, RolloutConfig
from verl.workers.rollout import BaseRollout, RolloutReplica

DIGITS, SAMPLES, STEPS, GOAL, TOLERANCE = 10, 256, 25, 0.9, 1e-4


def config(url: str) -> CheckpointEngineConfig:
    """What a user of verl writes, as a rule in YAML: the module, its name, and a scheme's URL."""
    return CheckpointEngineConfig(
        custom_backend_module="weightsync.integrations.verl",
        backend="weightsync",
        engine_kwargs={"weightsync": {"url": url, "timeout": 60}},
    )


def policy() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(DIGITS, 32), nn.Tanh(), nn.Linear(32, DIGITS))


class Actor(Worker):
    """A rank of the trainer. With a language model this is verl's ``ActorRolloutRefWorker``."""

    def __init__(self, engine: CheckpointEngineConfig) -> None:
        super().__init__()
        initialize_global_process_group_ray(backend="cpu:gloo")
        ranks = torch.distributed.get_world_size()
        self.policy = fully_shard(policy(), mesh=init_device_mesh("cpu", (ranks,)))
        self.optimizer = torch.optim.Adam(self.policy.parameters(), 0.03)
        import_external_libs(engine.custom_backend_module)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            engine.backend,
            is_master=torch.distributed.get_rank() == 0,
            bucket_size=engine.update_weights_bucket_megabytes << 20,
            **engine.engine_kwargs[engine.backend],
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def train(self, batch):
        """One step on this rank's share; how far its log-probabilities were from the rollout's."""
        digits, answers, sampled = batch
        rewards = (answers == (digits + 1) % DIGITS).float()
        log_probs = self.policy(digits).log_softmax(-1).gather(1, answers[:, None])[:, 0]
        self.optimizer.zero_grad()
        (-(rewards - rewards.mean()) * log_probs).mean().backward()
        self.optimizer.step()
        return rewards.mean().item(), (log_probs.detach() - sampled).abs().max().item()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps=None, mode="auto"):
        weights = ((name, w.full_tensor()) for name, w in self.policy.state_dict().items())
        return await self.checkpoint_engine.send_weights(weights, global_steps=global_steps)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method, *args, **kwargs):
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)


class Adapter(BaseRollout):
    """Loads what the checkpoint engine hands out. With a language model verl brings it."""

    def __init__(self) -> None:
        self.policy = policy()

    async def resume(self, tags): ...

    async def release(self): ...

    async def update_weights(self, weights, **options):
        held = self.policy.state_dict()
        async for name, tensor in weights:
            held[name].copy_(tensor)


class RolloutWorker(CheckpointEngineWorker):
    def __init__(self, rollout_config, model_config):
        super().__init__(rollout_config, model_config, Adapter())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @torch.no_grad()
    def sample(self):
        digits = torch.randint(DIGITS, (SAMPLES,))
        log_probs = self.server_adapter.policy(digits).log_softmax(-1)
        answers = torch.multinomial(log_probs.exp(), 1)
        return digits, answers[:, 0], log_probs.gather(1, answers)[:, 0]


class Replica(RolloutReplica):
    """One worker and no server: nothing to pause, and no cache to release."""

    def __init__(self, worker) -> None:
        self.workers, self.servers = [worker], []

    def get_ray_class_with_init_args(self): ...

    async def launch_servers(self): ...

    async def release_kv_cache(self): ...

    async def resume_kv_cache(self): ...


def group(kind, **options) -> RayWorkerGroup:
    pool = RayResourcePool([2], use_gpu=False, max_colocate_count=1)
    made = RayClassWithInitArgs(ray.remote(kind), **options)
    return RayWorkerGroup(pool, made, use_gpu=False)


def loop(actor: RayWorkerGroup, rollout: RayWorkerGroup, manager: CheckpointEngineManager) -> float:
    """The training loop; gives the last step's mean reward."""
    manager.update_weights(global_steps=0)
    reward = 0.0
    for step in range(1, STEPS + 1):
        outcomes = actor.train(rollout.sample())  # each rank gets what one worker sampled
        reward = sum(mean for mean, _ in outcomes) / len(outcomes)
        apart = max(difference for _, difference in outcomes)
        sync = manager.update_weights(global_steps=step)
        print(
            f"step {step:2}  reward {reward:.2f}  log-probabilities apart {apart:.1e}  "
            f"version {sync['weightsync/version']} in {sync['weightsync/seconds'] * 1e3:.1f} ms"
        )
        if apart > TOLERANCE:
            sys.exit("the rollouts do not have the trainer's weights")
    return reward


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default=f"shm:///dev/shm/weightsync-verl-{os.getpid()}")
    engine = config(parser.parse_args().url)
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    actor = group(Actor, engine=engine)
    rollouts = RolloutConfig(name="vllm", checkpoint_engine=engine)
    rollout = group(RolloutWorker, rollout_config=rollouts, model_config=None)
    manager = CheckpointEngineManager(engine, actor, [Replica(w) for w in rollout.workers])
    try:
        reward = loop(actor, rollout, manager)
    finally:
        # verl has no call for this; without it the last version stays in shared memory.
        ray.get(actor.execute_checkpoint_engine(["shutdown"] * actor.world_size))
        ray.shutdown()
    return 0 if reward >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
