"""Models of the transformers library: the names, shapes and ties of their own checkpoints.

What a model calls its tensors at run time is not what ``save_pretrained`` writes: names differ,
experts are packed, fused projections are split. The model's own conversion says how, so that no
architecture is special here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from weightsync.weight import Value


class Checkpoint:
    """The checkpoint layout of one ``PreTrainedModel``."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def convert(self, values: dict[str, Value]) -> dict[str, Value]:
        """Values under run-time names to values under the checkpoint's names."""
        return values

    def primary(self, names: Sequence[str]) -> str:
        """Which of the names of a tied weight the checkpoint keeps."""
        return names[0]

    def keeps(self, name: str, dtype: torch.dtype | None) -> bool:
        """Whether the model wants a tensor (by its checkpoint name) to stay float32."""
        return False


def checkpoint_of(module: nn.Module) -> Checkpoint | None:
    """The layout of a transformers model; None for any other module."""
    return None
