"""``FullyShardedDataParallel``: gathered unit by unit."""

from __future__ import annotations

from torch import nn

from weightsync.tree import Walk


def visit(module: nn.Module, prefix: str, walk: Walk) -> None:
    """An FSDP unit."""
    raise NotImplementedError
