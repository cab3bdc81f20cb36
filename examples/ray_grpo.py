"""GRPO with Ray: a trainer and vLLM replicas as actors on two nodes; one replica dies meanwhile.

    make example-ray             # or: python examples/ray_grpo.py

The policy, its task and the check are those of ``grpo_tiny.py``. ``weightsync.choose`` looks where
the actors are, and picks how weights travel: through memory on the trainer's node, over the network
to the other one. At a third of the way a replica is killed: the trainer's next update says so, the
loop goes on with those that are left, and a new one joins. Both nodes are on this machine
(``ray.cluster_utils``); with ``--address auto`` they are those of your cluster.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a local cluster needs no token in the home

import ray
import torch
from grpo_tiny import (
    ANSWER,
    CONFIG,
    DIGITS,
    ENVIRONMENT,
    GOAL,
    GROUP,
    LEARNING_RATE,
    PROMPT,
    SAMPLING,
    TOLERANCE,
    Rollouts,
    grpo_step,
    logprobs_and_entropy,
    make_policy,
    reward,
)
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import weightsync as ws

START, WAIT = 180.0, 60.0
"""Seconds for vLLM to start while others do, and for anything else."""

PROMPTS = [[(digit + i) % DIGITS for i in range(PROMPT)] for digit in range(DIGITS)]


@ray.remote(num_cpus=1)
class Trainer:
    """Holds the policy, sends it, and learns."""

    def __init__(self, seed: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.policy = make_policy(lora=False)
        self.optimizer = torch.optim.Adam(
            self.policy.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95)
        )

    def start(self, scheme: ws.WeightSyncScheme) -> None:
        self.sender = scheme.create_sender(self.policy, timeout=WAIT / 2)
        self.sender.connect()

    def sync(self, step: int) -> ws.SyncReport:
        return self.sender.update_weights(version=step, wait="applied")

    def learn(self, prompts: list[list[int]], rollouts: Rollouts) -> tuple[float, float]:
        """One step. Returns the reward, and how far vLLM's log-probabilities were off."""
        rows = [prompt for prompt in prompts for _ in range(GROUP)]
        tokens = torch.tensor([p + a for p, a in zip(rows, rollouts.tokens, strict=True)])
        behaviour = torch.tensor(rollouts.logprobs)
        with torch.no_grad():
            own, _ = logprobs_and_entropy(self.policy, tokens)
        grpo_step(self.policy, self.optimizer, tokens, behaviour)
        return reward(tokens).mean().item(), (own - behaviour).abs().max().item()

    def stop(self) -> None:
        self.sender.shutdown()


@ray.remote(num_cpus=1)
class Replica:
    """Holds a vLLM engine, which takes weights in the background."""

    def __init__(self) -> None:
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        self.folder = tempfile.TemporaryDirectory()
        CONFIG.save_pretrained(self.folder.name)
        self.llm = LLM(
            self.folder.name,
            load_format="dummy",
            dtype="float32",
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=PROMPT + ANSWER,
            max_num_seqs=DIGITS * GROUP,
            weight_transfer_config=WeightTransferConfig(backend="weightsync"),
        )

    def start(self, scheme: ws.WeightSyncScheme, name: str) -> None:
        self.receiver = scheme.create_receiver(self.llm, id=name)
        self.receiver.connect(timeout=WAIT)
        self.receiver.follow()

    def sample(self, prompts: list[list[int]], seed: int) -> Rollouts:
        from vllm import SamplingParams

        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        sampling = [
            SamplingParams(**SAMPLING, seed=seed + number * GROUP) for number in range(len(prompts))
        ]
        with self.receiver.hold() as version:  # no new weights between first token and last
            results = self.llm.generate(inputs, sampling, use_tqdm=False)
        outputs = [output for result in results for output in result.outputs]
        tokens = [list(output.token_ids) for output in outputs]
        logprobs = [[place.popitem()[1].logprob for place in o.logprobs] for o in outputs]
        return Rollouts(version and version.number, tokens, logprobs)

    def stop(self) -> None:
        self.receiver.shutdown()
        self.llm.llm_engine.engine_core.shutdown()


class Fleet:
    """The replicas that are there, by name, and those that will be."""

    def __init__(self) -> None:
        self.ready: dict[str, Any] = {}
        self._coming: dict[Any, tuple[str, Any]] = {}

    def join(self, name: str, replica: Any, scheme: ws.WeightSyncScheme) -> None:
        """Have it listen as soon as its engine is there; nobody waits for it."""
        self._coming[replica.start.remote(scheme, name)] = name, replica

    def look(self, timeout: float = 0.0) -> None:
        """Count in those that have come, or wait for all."""
        waiting = list(self._coming)
        for started in ray.wait(waiting, num_returns=len(waiting), timeout=timeout)[0]:
            name, replica = self._coming.pop(started)
            ray.get(started)
            self.ready[name] = replica
            print(f"replica {name!r} has joined")

    def sample(self, step: int) -> tuple[list[list[int]], Rollouts]:
        """Each samples its share of the prompts."""
        replicas = list(self.ready.values())
        shares = [PROMPTS[number :: len(replicas)] for number in range(len(replicas))]
        asked = [
            replica.sample.remote(share, (step * 100 + number) * DIGITS * GROUP)
            for number, (replica, share) in enumerate(zip(replicas, shares, strict=True))
        ]
        parts = ray.get(asked, timeout=WAIT)
        if {part.version for part in parts} != {step}:
            raise RuntimeError(f"step {step}: replicas held {[part.version for part in parts]}")
        return (
            [prompt for share in shares for prompt in share],
            Rollouts(step, *([row for part in parts for row in part[k]] for k in (1, 2))),
        )

    def stop(self) -> None:
        with suppress(ray.exceptions.RayError):
            ray.get([replica.stop.remote() for replica in self.ready.values()], timeout=WAIT)


def train(steps: int, seed: int) -> tuple[list[float], float, set[str]]:
    """Returns rewards, the largest difference of log-probabilities, and who was lost."""
    near, far = (ray.get_runtime_context().get_node_id(), *other_nodes())[:2]
    trainer = on(near, Trainer, seed)
    replicas = {"near": on(near, Replica), "far": on(far, Replica)}
    print("vLLM starts in two actors (about half a minute) ...")
    choice = ws.choose(trainer, list(replicas.values()), may_grow=True, timeout=START)
    print(choice)

    fleet, lost = Fleet(), set[str]()
    ray.get(trainer.start.remote(choice.scheme), timeout=WAIT)
    for (name, replica), scheme in zip(replicas.items(), choice.schemes, strict=True):
        fleet.join(name, replica, scheme)
    fleet.look(START)
    rewards, worst = [], 0.0
    try:
        for step in range(1, steps + 1):
            if step == steps // 3:
                print("replica 'far' is killed")
                ray.kill(replicas["far"])
            if step == 2 * steps // 3:  # by then it has come, or is waited for
                fleet.look(START)
            fleet.look()
            try:
                report = ray.get(trainer.sync.remote(step), timeout=WAIT)
            except ws.ReceiverError as error:
                report = error.report
                for failed in error.failures:
                    print(f"step {step}: {failed}")
                    lost.add(failed.receiver)
                    fleet.ready.pop(failed.receiver, None)
                    fleet.join("new", on(far, Replica), choice.scheme)
            prompts, rollouts = sample_with_living(fleet, step)
            mean, difference = ray.get(trainer.learn.remote(prompts, rollouts), timeout=WAIT)
            rewards.append(mean)
            worst = max(worst, difference)
            way = report.scheme if report else ""
            print(f"step {step:3}  reward {mean:.3f}  {way}  {'+'.join(fleet.ready)}", flush=True)
    finally:
        fleet.stop()
        with suppress(ray.exceptions.RayError):
            ray.get(trainer.stop.remote(), timeout=WAIT)
    return rewards, worst, lost


def sample_with_living(fleet: Fleet, step: int) -> tuple[list[list[int]], Rollouts]:
    """Ray says of a call that its actor is dead; the update says it too, at the next step."""
    try:
        return fleet.sample(step)
    except ray.exceptions.RayActorError as error:
        for name, replica in list(fleet.ready.items()):
            if replica._actor_id.hex() == error.actor_id:
                del fleet.ready[name]
        return fleet.sample(step)


def on(node: str, kind: Any, *arguments: Any) -> Any:
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    return kind.options(scheduling_strategy=there).remote(*arguments)


def other_nodes() -> list[str]:
    here = ray.get_runtime_context().get_node_id()
    ids = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
    return ids or [here]


@contextmanager
def nodes(address: str | None) -> Iterator[None]:
    """Ray, on a cluster of yours or on two nodes of this machine's."""
    if address is not None:
        ray.init(address, log_to_driver=False)
        yield
        ray.shutdown()
        return
    size = {"num_cpus": 3, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
    try:
        cluster.add_node(**size)
        ray.init(cluster.address, log_to_driver=False)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--address", help="of a Ray cluster; none: two nodes on this machine")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)  # what Ray starts inherits it
    began = time.monotonic()
    with nodes(options.address):
        rewards, worst, lost = train(options.steps, options.seed)
    final = sum(rewards[-5:]) / len(rewards[-5:])
    passed = final >= GOAL and worst < TOLERANCE and lost == {"far"}
    print(
        f"{'PASSED' if passed else 'FAILED'}: reward {rewards[0]:.2f} at first, {final:.2f} at the "
        f"end; log-probabilities agreed to {worst:.0e}; lost: {', '.join(lost) or 'nobody'}; "
        f"{time.monotonic() - began:.0f} s"
    )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
