"""DeepSpeed's ZeRO-3: parameters are placeholders, their values lie in shards on all ranks."""

from __future__ import annotations

import torch

from weightsync.errors import SourceError
from weightsync.weight import Weight


def weight_of(tensor: torch.Tensor) -> Weight | None:
    """The gathered values of a placeholder; None if the tensor is none.

    Raises:
        SourceError: it is one, and deepspeed is not installed to gather it.
    """
    if hasattr(tensor, "ds_id") and getattr(tensor, "ds_status", None) is not None:
        raise SourceError("it is a ZeRO-3 placeholder, whose values live in shards on other ranks")
    return None
