"""What the parts of ``multi_gpu.py`` share: their arguments, their rows, and the trainer's weights.

A part is a script with processes of its own (:class:`weightsync.testing.processes.Peer`); the
functions here that take a ``state`` run in those.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

# NVLink multicast stays off: what it reserves belongs to all who share a host's GPUs.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("VLLM_ALLREDUCE_USE_SYMM_MEM", "0")

import torch
from gpu_shapes import config_of, specs

import weightsync as ws
from weightsync.testing.processes import Peer, PeerError

PATIENCE = 60.0
"""Seconds for one answer of another process; the first of a path may page-lock much memory."""

Row = dict[str, Any]

Sizes = list[tuple[str, tuple[int, ...]]]

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Part:
    """What a part is asked for.

    Attributes:
        gpus: how many it may use; on a CPU as many processes.
        folder: of its own, in shared memory; whoever runs it removes it.
    """

    shape: str
    gpus: int
    rounds: int
    device: str
    folder: str

    @classmethod
    def of_arguments(cls) -> Part:
        parser = argparse.ArgumentParser()
        parser.add_argument("shape")
        parser.add_argument("--gpus", type=int, required=True)
        parser.add_argument("--rounds", type=int, default=4)
        parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
        parser.add_argument("--folder", required=True)
        return cls(**vars(parser.parse_args()))

    @property
    def backend(self) -> str:
        return "nccl" if self.device == "cuda" else "gloo"

    def sizes(self) -> Sizes:
        return list(specs(config_of(self.shape)))

    def say(self, path: str, **row: Any) -> None:
        print(json.dumps({"shape": self.shape, "path": path, **row}), flush=True)

    @contextmanager
    def trying(self, path: str) -> Iterator[None]:
        """What fails is a row with its words; what comes after it is tried."""
        try:
            yield
        except Exception as error:
            words = (
                str(error) if isinstance(error, PeerError) else f"{type(error).__name__}: {error}"
            )
            self.say(path, error=words[:600])


def nbytes_of(sizes: Sizes) -> int:
    return 2 * sum(torch.Size(size).numel() for _, size in sizes)


def in_milliseconds(seconds: Sequence[float]) -> list[float]:
    return [round(each * 1e3, 3) for each in seconds]


def ratios(others: Sequence[float], ours: Sequence[float]) -> float:
    """How many times as fast ours is, round by round."""
    return statistics.median(theirs / its for theirs, its in zip(others, ours, strict=True))


def ask_all(
    peers: Sequence[Peer], function: Any, *arguments: Any, within: float = PATIENCE
) -> list[Any]:
    """Have all do the same at the same time."""
    for peer in peers:
        peer.start(function, *arguments)
    return [peer.result(within) for peer in peers]


def catch_up(peers: Sequence[Peer], within: float = PATIENCE) -> None:
    """Leave out answers that nobody waited for, as of what broke off elsewhere.

    Raises:
        AssertionError, EOFError: one does not answer, or is gone.
    """
    mark = time.monotonic()
    for peer in peers:
        peer.start(echo, mark)
    for peer in peers:
        answer = None
        while answer != mark:
            with suppress(PeerError):
                answer = peer.result(within)


# -------------------------------------------------------------------- in another process


def echo(state: Any, value: float) -> float:
    return value


def become(
    state: Any, environment: Mapping[str, str], device: str, index: int | None = None
) -> None:
    """The first that a process is told: before CUDA, NCCL or vLLM look at the environment.

    Args:
        index: of its GPU; None if the environment leaves only one.
    """
    os.environ.update(environment)
    state.device = torch.device(device)
    if device == "cuda" and index is not None:
        state.device = torch.device(device, index)
        torch.cuda.set_device(state.device)


def settle(state: Any) -> None:
    """Wait for what the device was told to do."""
    if state.device.type == "cuda":
        torch.cuda.synchronize()


def hold(state: Any, sizes: Sizes) -> None:
    """Have the trainer's weights; ``reset`` brings them back."""
    state.weights = {
        name: torch.empty(size, dtype=torch.bfloat16, device=state.device) for name, size in sizes
    }
    reset(state)


def reset(state: Any) -> None:
    """Random, the same each time; norms near one, so that tokens depend on what is beside them."""
    random = torch.Generator(state.device).manual_seed(0)
    for tensor in state.weights.values():
        tensor.normal_(0, 0.02, generator=random)
        if tensor.dim() == 1:
            tensor.add_(1)
    settle(state)


def change(state: Any) -> None:
    """Every weight becomes another, and stands elsewhere, so that tokens change."""
    for tensor in state.weights.values():
        tensor.copy_(tensor.roll(1, 0)).mul_(-1.0078125)
    settle(state)


def connect(state: Any, url: str) -> None:
    state.sender = ws.scheme_from_url(url).create_sender(state.weights)
    state.sender.connect(timeout=PATIENCE)


def publish(state: Any, number: int) -> tuple[float, float]:
    """
    Returns:
        When the call began and ended.
    """
    began = time.monotonic()
    state.sender.update_weights(version=number, timeout=PATIENCE)
    return began, time.monotonic()


def disconnect(state: Any) -> None:
    sender = state.__dict__.pop("sender", None)
    if sender is not None:
        sender.shutdown()


def total(state: Any) -> int:
    """A sum of all bits, exact, however they are spread."""
    return total_of(state.weights)


def total_of(weights: Weights) -> int:
    return sum(int(each.view(torch.int16).sum(dtype=torch.int64)) for each in weights.values())
