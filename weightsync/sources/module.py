"""An ``nn.Module``: parameters and persistent buffers, under the names of its checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from weightsync.source import SourceOptions
from weightsync.sources import transformers
from weightsync.sources.mapping import ResidentSource
from weightsync.tree import inside, state_of
from weightsync.weight import Value


class ModuleSource(ResidentSource):
    """What a module holds: parameters and persistent buffers, never the others.

    Whatever wraps it, the names are those that the model's checkpoint has.
    """

    def __init__(self, module: nn.Module, options: SourceOptions) -> None:
        self.module = module
        super().__init__(options)
        self._checkpoint = transformers.checkpoint_of(inside(module))

    def entries(self) -> tuple[list[str], list[Any]]:
        state = state_of(self.module, self._options.merge)
        peft = sys.modules.get("weightsync.sources.peft")
        if peft is not None:  # this module, or another, has adapters
            peft.warn_of_broken_ties(state)
        return list(state.keys()), list(state.values())

    def converted(self, values: dict[str, Value]) -> dict[str, Value]:
        return values if self._checkpoint is None else self._checkpoint.convert(values)

    def keeps(self, name: str) -> bool:
        dtype = self._options.dtype
        return self._checkpoint is not None and self._checkpoint.keeps(name, dtype)

    def extras(self) -> Mapping[str, bytes]:
        return {} if self._checkpoint is None else self._checkpoint.extras(self._options.dtype)

    def primary(self, names: Sequence[str]) -> str:
        return names[0] if self._checkpoint is None else self._checkpoint.primary(names)


def accepts(weights: Any) -> bool:
    return isinstance(weights, nn.Module)
