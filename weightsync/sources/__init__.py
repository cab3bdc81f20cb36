"""One file for each kind of trainer. The first entry that accepts what the user passed is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weightsync.source import Maker
from weightsync.sources import iterable, mapping, module

SOURCES: list[tuple[Callable[[Any], bool], Maker]] = [
    (module.accepts, module.ModuleSource),
    (mapping.accepts_tensordict, mapping.tensordict_source),
    (mapping.accepts, mapping.MappingSource),
    (iterable.accepts, iterable.IterableSource),
]
