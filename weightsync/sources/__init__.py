"""One file for each kind of trainer.

What the user passed chooses the source, the first that accepts it; inside, each tensor that does
not exist as such (sharded, packed) is recognised by the first of ``TENSOR_KINDS`` that knows it,
and each module that needs more than a look inside by its visitor (``weightsync/tree.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weightsync.source import Maker
from weightsync.sources import iterable, mapping, module, quantised, sharded, zero
from weightsync.weight import Weight

SOURCES: list[tuple[Callable[[Any], bool], Maker]] = [
    (module.accepts, module.ModuleSource),
    (mapping.accepts_tensordict, mapping.tensordict_source),
    (mapping.accepts, mapping.MappingSource),
    (iterable.accepts, iterable.IterableSource),
]

TENSOR_KINDS: list[Callable[[torch.Tensor], Weight | None]] = [
    quantised.weight_of,  # before the others: what is packed may be sharded too
    zero.weight_of,
    sharded.weight_of,
]
"""Each gives the weight a tensor stands for, None if it is of another kind, or refuses it (
``SourceError`` with the reason)."""
