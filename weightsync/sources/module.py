"""An ``nn.Module``: parameters and persistent buffers, under its names without wrappers."""

from __future__ import annotations

from typing import Any

from torch import nn

from weightsync.names import state_of
from weightsync.source import SourceOptions
from weightsync.sources.mapping import ResidentSource


class ModuleSource(ResidentSource):
    """The ``state_dict`` of a module: parameters and persistent buffers, never the others."""

    def __init__(self, module: nn.Module, options: SourceOptions) -> None:
        super().__init__(options)
        self.module = module

    def entries(self) -> tuple[list[str], list[Any]]:
        state = state_of(self.module)
        return list(state.keys()), list(state.values())


def accepts(weights: Any) -> bool:
    return isinstance(weights, nn.Module)
