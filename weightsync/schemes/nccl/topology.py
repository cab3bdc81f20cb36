"""Which process has which rank, and on which device."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence

import torch

from weightsync.errors import SchemeError

Replica = int | tuple[int, ...]
"""How many processes of a replica take part: a number, or (tensor, pipeline, data) parallel."""


def ranks_of(replicas: Sequence[Replica]) -> list[range]:
    """The ranks of each replica's processes; rank 0 is the trainer, then comes replica by replica.

    >>> ranks_of([(2, 1, 2), 3])
    [range(1, 5), range(5, 8)]
    """
    ranks = []
    first = 1
    for replica in replicas:
        size = size_of(replica)
        ranks.append(range(first, first + size))
        first += size
    return ranks


def size_of(replica: Replica) -> int:
    """
    Raises:
        SchemeError: it is no positive number, or no product of such.
    """
    factors = tuple(replica) if isinstance(replica, (tuple, list)) else (replica,)
    if not factors or any(type(factor) is not int or factor < 1 for factor in factors):
        raise SchemeError(
            f"{replica!r} is no number of GPUs, nor (tensor, pipeline, data) parallel"
        )
    return math.prod(factors)


def device_identity() -> str:
    """The current GPU as NCCL tells GPUs apart; empty without one.

    An index would not do: every process may call its only visible GPU 0.
    """
    if not torch.cuda.is_available():
        return ""
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    # NCCL compares hosts first, and NCCL_HOSTID is what it is told of them.
    host = os.environ.get("NCCL_HOSTID", "")
    return f"{uuid} of host {host}" if host else str(uuid)


def require_distinct(devices: Mapping[str, str]) -> None:
    """
    Args:
        devices: who -> the identity of its device; empty ones are not compared.

    Raises:
        SchemeError: two are on one device, which NCCL cannot do.
    """
    seen: dict[str, str] = {}
    for who, device in devices.items():
        other = seen.setdefault(device, who)
        if device and other != who:
            raise SchemeError(
                f"{other} and {who} are on the same GPU, {device}: NCCL needs one for each. Within "
                "one host use DoubleBufferScheme('/dev/shm/...'), which copies through shared "
                "memory, or give them different GPUs by CUDA_VISIBLE_DEVICES"
            )
