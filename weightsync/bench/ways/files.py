"""A file for each version: safetensors and ``torch.save``, in shared memory or on a disk."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch

from weightsync.bench.measures import timed
from weightsync.bench.memory import Needs
from weightsync.bench.way import Notices, ReceivingEnd, SendingEnd, Setting, Tensors, Way
from weightsync.deadline import Deadline


@dataclass(frozen=True)
class _File(Way):
    """Written beside and renamed, so that a reader has a whole one; synced first on a disk."""

    place: Literal["shm", "disk"]
    kind: ClassVar[str]

    @property
    def name(self) -> str:
        return f"{self.kind} ({self.place})"

    @property
    def limit(self) -> str:
        return "plain copy" if self.place == "shm" else "plain file"

    def needs(self, nbytes: int, receivers: int) -> Needs:
        # Two files while one replaces the other, and what a receiver loads before it copies.
        files, loaded = 2 * nbytes, receivers * nbytes
        if self.place == "disk":
            return Needs(loaded, disk=files)
        return Needs(files + loaded, files)

    @abstractmethod
    def save(self, weights: dict[str, torch.Tensor], path: Path) -> None: ...

    @abstractmethod
    def load(self, path: Path) -> Mapping[str, torch.Tensor]: ...

    def send(self, weights: Tensors, setting: Setting) -> SendingEnd:
        return _Saves(self, dict(weights), self._path(setting))

    def receive(
        self, target: Tensors, setting: Setting, index: int, notices: Notices
    ) -> ReceivingEnd:
        return _Loads(self, target, self._path(setting), notices)

    def _path(self, setting: Setting) -> Path:
        return Path(setting.shared if self.place == "shm" else setting.disk, "weights")


class SafetensorsFile(_File):
    kind: ClassVar[str] = "safetensors"
    modules: ClassVar[tuple[str, ...]] = ("safetensors",)
    about: ClassVar[str] = "save_file; load_file, whose tensors are copied into the receiver's"

    def save(self, weights: dict[str, torch.Tensor], path: Path) -> None:
        from safetensors.torch import save_file

        save_file(weights, path)

    def load(self, path: Path) -> Mapping[str, torch.Tensor]:
        from safetensors.torch import load_file

        return load_file(path)


class TorchFile(_File):
    kind: ClassVar[str] = "torch.save"
    about: ClassVar[str] = "torch.save; torch.load with mmap=True, its fastest"

    def save(self, weights: dict[str, torch.Tensor], path: Path) -> None:
        torch.save(weights, path)

    def load(self, path: Path) -> Mapping[str, torch.Tensor]:
        loaded: Mapping[str, torch.Tensor] = torch.load(path, mmap=True, weights_only=True)
        return loaded


@dataclass
class _Saves(SendingEnd):
    way: _File
    weights: dict[str, torch.Tensor]
    path: Path

    def publish(self, version: int) -> None:
        beside = self.path.with_suffix(".new")
        self.way.save(self.weights, beside)
        if self.way.place == "disk":
            with beside.open("rb") as file:
                os.fsync(file)
        beside.rename(self.path)


@dataclass
class _Loads(ReceivingEnd):
    way: _File
    target: Tensors
    path: Path
    notices: Notices

    def receive(self, version: int, deadline: Deadline) -> float:
        self.notices.wait(version, deadline)
        return timed(self._copy)

    def _copy(self) -> None:
        for name, tensor in self.way.load(self.path).items():
            self.target[name].copy_(tensor)
