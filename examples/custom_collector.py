"""A collector and a loop of your own: asynchronous, and no sample older than two versions.

    make example-collector       # or: python examples/custom_collector.py

The policy learns to answer each of four questions by its own number. A thread samples without
a pause from a copy of it, which takes each version as it comes; the trainer takes the samples,
refuses those that are too old, and publishes after each step. With ``max_lag`` it waits for a copy
that falls further behind, and hears of one that is gone; otherwise neither waits for the other.
"""

import copy
import queue
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch
from torch.distributions import Categorical

import weightsync as ws

MAX_LAG, STEPS, BATCH, QUESTIONS, GOAL = 2, 100, 256, 4, 0.95


def collect(policy, receiver, samples, ended):
    """Sample until the trainer has ended. Each batch is tagged with the version that made it."""
    while not ended.is_set():
        asked = torch.randint(QUESTIONS, (BATCH,))
        with receiver.hold() as version, torch.no_grad():  # one version from first to last
            answers = Categorical(logits=policy(asked)).sample()
        rewards = (answers == asked).float()
        with suppress(queue.Full):  # the trainer is busy: it had better have a newer one
            samples.put((version, asked, answers, rewards), timeout=0.1)


def train(policy, sender, samples, collecting):
    """Learn from what is fresh enough. Returns each step's mean reward, and how many were not."""
    optimizer, rewarded, refused = torch.optim.Adam(policy.parameters(), lr=0.3), [], 0
    while len(rewarded) < STEPS:
        try:
            version, asked, answers, rewards = samples.get(timeout=1.0)
        except queue.Empty:
            if collecting.done():
                collecting.result()  # raises what has ended it
            continue
        if sender.lag(version) > MAX_LAG:  # it lay in the queue for too long
            refused += 1
            continue
        logprobs = Categorical(logits=policy(asked)).log_prob(answers)
        optimizer.zero_grad()
        (-(rewards - rewards.mean()) * logprobs).mean().backward()
        optimizer.step()
        rewarded.append(rewards.mean().item())
        sender.update_weights(version=len(rewarded), max_lag=MAX_LAG, timeout=10.0)
    return rewarded, refused


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)  # so small a policy needs no more
    policy = torch.nn.Embedding(QUESTIONS, QUESTIONS)
    sampling = copy.deepcopy(policy)  # what your collector calls; vLLM's LLM is passed likewise
    samples, ended = queue.Queue(maxsize=1), threading.Event()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        scheme = ws.DoubleBufferScheme(f"{folder}/run", slots=3)  # held, newest, being written
        with scheme.create_sender(policy) as sender, scheme.create_receiver(sampling) as receiver:
            sender.connect()
            receiver.connect()
            sender.update_weights(version=0)
            receiver.poll_and_apply()
            receiver.follow()
            collecting = pool.submit(collect, sampling, receiver, samples, ended)
            try:
                rewarded, refused = train(policy, sender, samples, collecting)
            finally:
                ended.set()
    first, last = sum(rewarded[:10]) / 10, sum(rewarded[-10:]) / 10
    print(f"reward {first:.2f} at first, {last:.2f} after {STEPS} steps; {refused} batches too old")
    return 0 if last > GOAL else 1


if __name__ == "__main__":
    raise SystemExit(main())
