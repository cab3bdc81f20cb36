"""Engines that are slow, get stuck or fail: each goes wrong in one way."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from weightsync.deadline import Deadline
from weightsync.engine import Update
from weightsync.engines.module import ModuleEngine
from weightsync.transport import Targets


class SlowEngine(ModuleEngine):
    """Copies one tensor, takes its time, and copies the others."""

    def __init__(self, target: Mapping[str, torch.Tensor], seconds: float = 0.5) -> None:
        super().__init__(target)
        self._seconds = seconds

    def apply(self, update: Update, deadline: Deadline) -> None:
        others = dict(self.target)
        name, tensor = others.popitem()
        manifest = update.snapshot.manifest
        update.snapshot.copy_into(Targets(manifest, {name: tensor}))
        time.sleep(self._seconds)
        update.snapshot.copy_into(Targets(manifest, others))


class StuckEngine(ModuleEngine):
    """Copies the first tensor of one of its updates, and never comes back."""

    def __init__(self, target: Mapping[str, torch.Tensor], update: int = 2) -> None:
        super().__init__(target)
        self._left = update

    def apply(self, update: Update, deadline: Deadline) -> None:
        self._left -= 1
        if self._left == 0:
            name = next(iter(self.target))
            self.target[name].copy_(update.snapshot.tensor(name))
            time.sleep(3600)
        super().apply(update, deadline)


class FailingEngine(ModuleEngine):
    """Fails half-way through the updates that bring a certain value."""

    def __init__(
        self, target: Mapping[str, torch.Tensor], value: float = 3, words: str = "no such kernel"
    ) -> None:
        super().__init__(target)
        self._value = value
        self._words = words

    def apply(self, update: Update, deadline: Deadline) -> None:
        name = next(iter(self.target))
        if (update.snapshot.tensor(name) == self._value).all():
            self.target[name].copy_(update.snapshot.tensor(name))
            raise RuntimeError(self._words)
        super().apply(update, deadline)


class BrokenEngine(ModuleEngine):
    """Cannot even be set up."""

    def connect(self, url: str, deadline: Deadline) -> None:
        raise RuntimeError("no nccl")
