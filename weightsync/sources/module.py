"""A plain ``nn.Module``: parameters and persistent buffers, under their ``state_dict`` names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from weightsync.source import SourceOptions
from weightsync.sources.mapping import ResidentSource

_EXTRA = "_extra_state"  # torch's key for what get_extra_state() returns: no weight


class ModuleSource(ResidentSource):
    """The ``state_dict`` of a module: parameters and persistent buffers, never the others."""

    def __init__(self, module: nn.Module, options: SourceOptions) -> None:
        super().__init__(options)
        self.module = module

    def entries(self) -> Iterable[tuple[str, Any]]:
        state = self.module.state_dict(keep_vars=True)
        return [
            (name, value)
            for name, value in state.items()
            if not name.endswith(_EXTRA) or name.rpartition(".")[2] != _EXTRA
        ]


def accepts(weights: Any) -> bool:
    return isinstance(weights, nn.Module)
