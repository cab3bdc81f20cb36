"""DeepSpeed's ZeRO-3: parameters are placeholders, their values lie in shards on all ranks.

Each is gathered by DeepSpeed itself when its turn in the stream comes, on all ranks together, and
let go before the next one is: at most one parameter is whole at a time, next to its copy that is
being sent. What DeepSpeed keeps whole anyway (small parameters, those that the user's own
``GatheredParameters`` holds) is sent as the plain tensor that it is. The values are those that the
model computes with; the optimizer's float32 masters are not looked at.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from typing import Any

import torch

from weightsync.errors import SourceError
from weightsync.weight import Weight


def weight_of(tensor: torch.Tensor) -> Weight | None:
    """The gathered values of a placeholder; None if the tensor is none.

    Raises:
        SourceError: it is one that cannot be gathered (now).
    """
    if getattr(tensor, "ds_status", None) is None or _status(tensor) == "AVAILABLE":
        return None
    # Whoever holds a placeholder has imported deepspeed; nobody else pays for importing it.
    if "deepspeed" not in sys.modules:
        raise SourceError(
            "it is a ZeRO-3 placeholder, whose values live in shards on other ranks, and deepspeed,"
            " which could gather them, is not there"
        )
    return Gathered(tensor)


class Gathered(Weight):
    """The whole parameter of which each rank holds a shard."""

    def __init__(self, parameter: Any) -> None:
        self._parameter = parameter
        self.dtype = parameter.dtype
        self.shape = tuple(parameter.ds_shape)

    @property
    def identity(self) -> Hashable:
        return "zero-3", self._parameter.ds_id

    @property
    def collective(self) -> bool:
        return True

    @torch.no_grad()
    def read(self) -> torch.Tensor:
        parameter = self._parameter
        status = _status(parameter)
        if status == "AVAILABLE":  # gathered since: it is not ours to shard again
            return parameter.detach()  # type: ignore[no-any-return]
        if status != "NOT_AVAILABLE":
            raise SourceError(
                f"it is a ZeRO-3 placeholder that is {status}: a forward pass that was not "
                "completed is gathering it"
            )
        deepspeed: Any = sys.modules["deepspeed"]
        try:
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=None):
                # A copy: closing the context frees what it gathered.
                whole: torch.Tensor = parameter.detach().clone()
        except RuntimeError as error:
            raise SourceError(f"DeepSpeed cannot gather it: {error}") from error
        return whole


def _status(tensor: Any) -> str:
    """The name of ``ZeroParamStatus``: AVAILABLE (whole), NOT_AVAILABLE, INFLIGHT."""
    return str(getattr(tensor.ds_status, "name", tensor.ds_status))
