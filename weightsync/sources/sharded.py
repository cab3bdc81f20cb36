"""DTensors: FSDP2 (``fully_shard``) and tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from weightsync.errors import SourceError
from weightsync.tree import Walk
from weightsync.weight import Weight


def weight_of(tensor: torch.Tensor) -> Weight | None:
    """The whole tensor of which a DTensor holds this rank's part; None if it is none."""
    if hasattr(tensor, "full_tensor"):
        raise SourceError("it is a DTensor, sharded over ranks; gather it first")
    return None


def visit_fsdp2(module: nn.Module, prefix: str, walk: Walk) -> None:
    """A module to which ``fully_shard`` was applied."""
    mixin: Any = next(base for base in type(module).__mro__ if base.__name__ == "FSDPModule")
    # As state_dict does: what a forward pass gathered may be older than the shards.
    module.reshard()  # type: ignore[operator]
    walk.visit(module, prefix, beyond=mixin)
