"""``torch.distributed`` broadcast over gloo, into the receivers' own tensors."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar

import torch
import torch.distributed as dist

from weightsync.bench.measures import timed
from weightsync.bench.memory import Needs
from weightsync.bench.way import Notices, ReceivingEnd, SendingEnd, Setting, Tensors, Way
from weightsync.deadline import Deadline

_SMALL = 1 << 20
_BUCKET = 32 << 20


@dataclass(frozen=True)
class GlooBroadcast(Way):
    name: ClassVar[str] = "gloo broadcast"
    about: ClassVar[str] = (
        "large tensors each by a broadcast of its own, all of them under way; those under 1 MiB "
        "packed into buckets of 32 MiB, as DistributedDataParallel does. The pause is the whole "
        "transfer, since it goes straight into the weights"
    )

    @property
    def limit(self) -> str:
        return "plain socket"

    def needs(self, nbytes: int, receivers: int) -> Needs:
        return Needs(2 * _BUCKET * (receivers + 1))

    def send(self, weights: Tensors, setting: Setting) -> SendingEnd:
        _join(setting, 0)
        return _Sends(list(weights.values()))

    def receive(
        self, target: Tensors, setting: Setting, index: int, notices: Notices
    ) -> ReceivingEnd:
        _join(setting, index + 1)
        return _Receives(list(target.values()))


def _join(setting: Setting, rank: int) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{setting.shared}/store",
        rank=rank,
        world_size=setting.receivers + 1,
        timeout=timedelta(seconds=setting.timeout),
    )


def _broadcast(tensors: list[torch.Tensor]) -> None:
    large = [tensor for tensor in tensors if tensor.nbytes >= _SMALL]
    works = [dist.broadcast(tensor, 0, async_op=True) for tensor in large]
    for work in works:
        work.wait()
    small = [tensor for tensor in tensors if tensor.nbytes < _SMALL]
    if small:  # what DistributedDataParallel sends its buffers with
        group = dist.distributed_c10d._get_default_group()
        torch._C._distributed_c10d._broadcast_coalesced(group, small, _BUCKET, 0)


@dataclass
class _Sends(SendingEnd):
    tensors: list[torch.Tensor]

    def publish(self, version: int) -> None:
        _broadcast(self.tensors)

    def close(self) -> None:
        dist.destroy_process_group()


@dataclass
class _Receives(ReceivingEnd):
    tensors: list[torch.Tensor]

    def receive(self, version: int, deadline: Deadline) -> float:
        return timed(lambda: _broadcast(self.tensors))

    def close(self) -> None:
        dist.destroy_process_group()
