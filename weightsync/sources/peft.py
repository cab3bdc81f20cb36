"""Models with PEFT adapters: merged values, computed per tensor into the stream.

The trainer is never merged, not for a moment: each layer's own arithmetic runs on a stand-in that
shares nothing writable with it.
"""

from __future__ import annotations

from torch import nn

from weightsync.tree import Walk


def visit_model(module: nn.Module, prefix: str, walk: Walk) -> None:
    """A ``PeftModel``."""
    raise NotImplementedError


def visit_tuner(module: nn.Module, prefix: str, walk: Walk) -> None:
    """A ``BaseTuner`` (``LoraModel``, ...)."""
    raise NotImplementedError


def visit_layer(module: nn.Module, prefix: str, walk: Walk) -> None:
    """A ``BaseTunerLayer`` (``lora.Linear``, ...)."""
    raise NotImplementedError


def visit_auxiliary(module: nn.Module, prefix: str, walk: Walk) -> None:
    """An ``AuxiliaryTrainingWrapper``: ``modules_to_save``, trainable tokens."""
    raise NotImplementedError
