"""``torch.multiprocessing`` queues."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from weightsync.bench.measures import timed
from weightsync.bench.way import Notices, ReceivingEnd, SendingEnd, Setting, Tensors, Way
from weightsync.bench.weights import bytes_of
from weightsync.deadline import Deadline


@dataclass(frozen=True)
class Queue(Way):
    name: ClassVar[str] = "multiprocessing queue"
    about: ClassVar[str] = (
        "one flat tensor in shared memory for each version, put into each receiver's queue: "
        "a tensor takes a file descriptor, however small. A new one each time, because a consumer "
        "may hold the last one for as long as it likes"
    )

    def channels(self, context: Any, receivers: int) -> Any:
        return [context.Queue() for _ in range(receivers)]

    def send(self, weights: Tensors, setting: Setting) -> SendingEnd:
        return _Puts(weights, setting.channels)

    def receive(
        self, target: Tensors, setting: Setting, index: int, notices: Notices
    ) -> ReceivingEnd:
        return _Gets(target, setting.channels[index])


@dataclass
class _Puts(SendingEnd):
    weights: Tensors
    queues: list[Any]

    def publish(self, version: int) -> None:
        parts = [bytes_of(tensor) for tensor in self.weights.values()]
        flat = torch.empty(sum(part.numel() for part in parts), dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
        torch.cat(parts, out=flat)
        for queue in self.queues:
            queue.put((version, flat))


@dataclass
class _Gets(ReceivingEnd):
    target: Tensors
    queue: Any

    def receive(self, version: int, deadline: Deadline) -> float:
        held = -1
        while held < version:
            held, flat = self.queue.get(timeout=deadline.remaining)
        return timed(lambda: self._copy(flat))

    def _copy(self, flat: torch.Tensor) -> None:
        tensors = list(map(bytes_of, self.target.values()))
        pieces = torch.split(flat, [tensor.numel() for tensor in tensors])
        for into, piece in zip(tensors, pieces, strict=True):
            into.copy_(piece)
