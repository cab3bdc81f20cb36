"""``TensorDict.memmap``: a folder of mapped files, written in place from the second version on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from weightsync.bench.measures import timed
from weightsync.bench.memory import Needs
from weightsync.bench.way import Notices, ReceivingEnd, SendingEnd, Setting, Tensors, Way
from weightsync.deadline import Deadline


@dataclass(frozen=True)
class MemoryMapped(Way):
    name: ClassVar[str] = "TensorDict.memmap"
    modules: ClassVar[tuple[str, ...]] = ("tensordict",)
    about: ClassVar[str] = (
        "memmap once, then update_ in place; receivers map the files once. Nothing keeps a version "
        "from being overwritten while it is read, which is what makes it fast"
    )

    def needs(self, nbytes: int, receivers: int) -> Needs:
        return Needs(nbytes, nbytes)

    def send(self, weights: Tensors, setting: Setting) -> SendingEnd:
        from tensordict import TensorDict

        return _Sending(TensorDict(dict(weights), batch_size=[]), Path(setting.shared, "weights"))

    def receive(
        self, target: Tensors, setting: Setting, index: int, notices: Notices
    ) -> ReceivingEnd:
        from tensordict import TensorDict

        own = TensorDict(dict(target), batch_size=[])
        return _Receiving(own, Path(setting.shared, "weights"), notices)


@dataclass
class _Sending(SendingEnd):
    plain: Any
    path: Path
    mapped: Any = None

    def publish(self, version: int) -> None:
        if self.mapped is None:
            self.mapped = self.plain.memmap(str(self.path))
        else:
            self.mapped.update_(self.plain)


@dataclass
class _Receiving(ReceivingEnd):
    own: Any
    path: Path
    notices: Notices
    mapped: Any = None

    def receive(self, version: int, deadline: Deadline) -> float:
        self.notices.wait(version, deadline)
        if self.mapped is None:
            self.mapped = type(self.own).load_memmap(str(self.path))
        return timed(lambda: self.own.update_(self.mapped))
