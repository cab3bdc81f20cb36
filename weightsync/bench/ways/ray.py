"""Ray's object store."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from weightsync.bench.measures import timed
from weightsync.bench.memory import Needs
from weightsync.bench.way import Notices, ReceivingEnd, SendingEnd, Setting, Tensors, Way
from weightsync.bench.weights import bytes_of
from weightsync.deadline import Deadline

_KEPT = 2
"""Versions whose objects stay: the one that is read, and the one that is written."""


_BOARD = "board"


class _Board:
    """An actor by which the drivers of a cluster hand references on."""

    def __init__(self) -> None:
        self._shown: list[Any] = []

    def show(self, references: list[Any]) -> None:
        self._shown = references

    def shown(self) -> list[Any]:
        return self._shown


@dataclass(frozen=True)
class RayObjects(Way):
    name: ClassVar[str] = "Ray object store"
    modules: ClassVar[tuple[str, ...]] = ("ray",)
    about: ClassVar[str] = (
        "one put of all tensors as numpy arrays, which Ray neither pickles nor copies again when "
        "they are read; receivers are drivers of one cluster, which an actor gives the reference, "
        "and copy them into their weights"
    )

    def needs(self, nbytes: int, receivers: int) -> Needs:
        return Needs((_KEPT + 1) * nbytes, (_KEPT + 1) * nbytes)

    def send(self, weights: Tensors, setting: Setting) -> SendingEnd:
        import ray

        nbytes = sum(tensor.nbytes for tensor in weights.values())
        context = ray.init(
            **_quiet(),
            object_store_memory=int((_KEPT + 1.5) * nbytes) + (200 << 20),
            num_cpus=1,
        )
        board = ray.remote(num_cpus=0)(_Board).options(name=_BOARD).remote()
        ray.get(board.shown.remote())
        where = Path(setting.shared, "ray")
        where.with_suffix(".new").write_text(context.address_info["address"])
        where.with_suffix(".new").rename(where)
        return _Puts(weights, board)

    def receive(
        self, target: Tensors, setting: Setting, index: int, notices: Notices
    ) -> ReceivingEnd:
        import ray

        where = Path(setting.shared, "ray")
        setting.deadline().wait(lambda: where.exists() or None)
        ray.init(address=where.read_text(), **_quiet())
        return _Gets(target, notices)


def _quiet() -> dict[str, Any]:
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    return {
        "include_dashboard": False,
        "log_to_driver": False,
        "logging_level": "ERROR",
        "namespace": "weightsync-bench",
    } | ({"_node_ip_address": "127.0.0.1"})


@dataclass
class _Puts(SendingEnd):
    weights: Tensors
    board: Any
    kept: list[Any] = field(default_factory=list)

    def publish(self, version: int) -> None:
        import ray

        arrays = [bytes_of(tensor).numpy() for tensor in self.weights.values()]
        self.kept = [*self.kept, ray.put(arrays)][-_KEPT:]
        # In a list it stays a reference: its content does not go to the actor.
        ray.get(self.board.show.remote(self.kept[-1:]))

    def close(self) -> None:
        import ray

        ray.shutdown()


@dataclass
class _Gets(ReceivingEnd):
    target: Tensors
    notices: Notices

    def receive(self, version: int, deadline: Deadline) -> float:
        import ray

        self.notices.wait(version, deadline)
        board = ray.get_actor(_BOARD)
        [reference] = ray.get(board.shown.remote(), timeout=deadline.remaining)
        return timed(lambda: self._copy(ray.get(reference, timeout=deadline.remaining)))

    def _copy(self, arrays: list[Any]) -> None:
        for into, array in zip(self.target.values(), arrays, strict=True):
            bytes_of(into).copy_(torch.from_numpy(array))

    def close(self) -> None:
        import ray

        ray.shutdown()
