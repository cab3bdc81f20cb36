"""Parameters that bitsandbytes packed into 4 or 8 bits: dequantised, never sent as packed bytes."""

from __future__ import annotations

import torch
from torch import nn

from weightsync.errors import SourceError
from weightsync.tree import Walk
from weightsync.weight import Weight


def weight_of(tensor: torch.Tensor) -> Weight | None:
    """The dequantised values of a packed parameter; None if it is none.

    Raises:
        SourceError: it is packed, and what is needed to unpack it is not there.
    """
    kind = type(tensor).__name__
    if hasattr(tensor, "quant_state") or kind in ("Params4bit", "Int8Params"):
        raise SourceError(f"it is a quantised parameter ({kind}) whose bytes are packed")
    return None


def visit_linear(module: nn.Module, prefix: str, walk: Walk) -> None:
    """A bitsandbytes layer: its weight and bias, without the scales that lie beside them."""
    raise NotImplementedError
