"""Trains a small control policy with a TorchRL collector of two processes, weights through ours.

The same training runs over TorchRL's own schemes as well, and a table compares what updating the
workers costs:

    make example-torchrl                               # or ARGS="--width 2048"
    python examples/torchrl_collector.py --url disk:///tmp/run42

The task: points in a plane, each to be moved to the origin in one step, five times over. The best
mean reward is -0.18, for the actions have a deviation of 0.3.
"""

import argparse
import os
import statistics
import time
from functools import partial

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import MultiSyncCollector
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs import EnvBase
from torchrl.modules import ProbabilisticActor
from torchrl.weight_update import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme

from weightsync.integrations.torchrl import TorchRLScheme

WORKERS = 2
POINTS = 16
STEPS = 5


class ToTheOrigin(EnvBase):
    """``POINTS`` points at once. The reward is less the further away they are after a step."""

    def __init__(self):
        super().__init__(batch_size=[POINTS])
        self.observation_spec = Composite(observation=Unbounded((POINTS, 2)), shape=[POINTS])
        self.action_spec = Bounded(-4.0, 4.0, (POINTS, 2))
        self.reward_spec = Unbounded((POINTS, 1))
        self.steps = 0

    def _reset(self, tensordict=None):
        self.steps = 0
        return TensorDict({"observation": 2 * torch.rand(POINTS, 2) - 1}, [POINTS])

    def _step(self, tensordict):
        self.steps += 1
        place = tensordict["observation"] + tensordict["action"].clamp(-4, 4)
        reward = -place.square().sum(-1, keepdim=True)
        done = torch.full((POINTS, 1), self.steps == STEPS)
        fresh = 2 * torch.rand(POINTS, 2) - 1
        return TensorDict({"observation": fresh, "reward": reward, "done": done}, [POINTS])

    def _set_seed(self, seed):
        torch.manual_seed(seed)


class Gaussian(nn.Module):
    """Means by a network, at first zero; a deviation that stays."""

    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2)
        )
        nn.init.zeros_(self.net[-1].weight)

    def forward(self, observation):
        loc = self.net(observation)
        return loc, torch.full_like(loc, 0.3)


def make_policy(width):
    torch.manual_seed(0)
    return ProbabilisticActor(
        TensorDictModule(Gaussian(width), ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        out_keys=["action"],
        distribution_class=torch.distributions.Normal,
    )


def train(scheme, width, iterations):
    """Rewards of all iterations, and seconds of all updates."""
    policy = make_policy(width)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.3 / width)
    collector = MultiSyncCollector(
        [ToTheOrigin] * WORKERS,
        policy,
        frames_per_batch=WORKERS * POINTS * STEPS * 2,
        total_frames=-1,
        weight_sync_schemes={"policy": scheme},  # this is all that differs
    )
    collector.set_seed(0)  # so that the rewards are the same, if all schemes bring the same weights
    rewards, seconds = [], []
    try:
        for data in collector:
            reward = data["next", "reward"].squeeze(-1)
            advantage = (reward - reward.mean()) / reward.std()
            chosen = policy.get_dist(data).log_prob(data["action"]).sum(-1)
            loss = -(chosen * advantage).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

            began = time.perf_counter()
            collector.update_policy_weights_()
            seconds.append(time.perf_counter() - began)
            rewards.append(reward.mean().item())
            if len(rewards) == iterations:
                return rewards, seconds
    finally:
        collector.shutdown()
        scheme.shutdown()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default=f"shm:///dev/shm/torchrl-example-{os.getpid()}")
    parser.add_argument("--width", type=int, default=64, help="of the policy's layers")
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--ours-only", action="store_true")
    arguments = parser.parse_args()
    schemes = {
        f"weightsync, {arguments.url.partition(':')[0]}": partial(TorchRLScheme, arguments.url)
    }
    if not arguments.ours_only:
        schemes["TorchRL, shared memory"] = SharedMemWeightSyncScheme
        schemes["TorchRL, queues"] = MultiProcessWeightSyncScheme

    nbytes = sum(p.numel() * p.element_size() for p in make_policy(arguments.width).parameters())
    print(f"policy of {nbytes / 1e6:.2f} MB, {WORKERS} workers, {arguments.iterations} updates")
    print(f"{'scheme':24} {'reward, first 5':>16} {'last 5':>8} {'update, ms':>11} {'slowest':>8}")
    for name, make in schemes.items():
        rewards, seconds = train(make(), arguments.width, arguments.iterations)
        first, last = (statistics.mean(part) for part in (rewards[:5], rewards[-5:]))
        typical, slowest = 1e3 * statistics.median(seconds), 1e3 * max(seconds)
        print(f"{name:24} {first:16.3f} {last:8.3f} {typical:11.2f} {slowest:8.2f}", flush=True)


if __name__ == "__main__":
    main()
