"""Weights that lie in memory under names: a mapping, or a ``TensorDict``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from weightsync.errors import ManifestError, SourceError
from weightsync.manifest import Manifest
from weightsync.source import Inventory, SourceOptions, WeightSource, check_sendable
from weightsync.tensors import Addresses, Facts, plain_address


class ResidentSource(WeightSource):
    """Tensors that exist anyway. ``entries`` lists them afresh for every update.

    Tied weights are found by their storage: two names for the same elements in the same order
    are sent once, under the name that comes first.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._known: _Known | None = None

    def entries(self) -> tuple[list[str], list[Any]]:
        """All names and all tensors, tied ones under each of their names, names not yet final."""
        raise NotImplementedError

    def manifest(self) -> Manifest:
        return self.inventory().manifest

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        inventory = self.inventory()
        names = (spec.name for spec in inventory.manifest.tensors)
        return zip(names, inventory.tensors, strict=True)

    def inventory(self) -> Inventory:
        names, tensors = self.entries()
        try:
            facts = Facts.of(tensors)
        except (RuntimeError, ValueError, TypeError, AttributeError):
            facts = None  # something is no tensor, or has no memory: it is refused by name below
        known = self._known
        if known is None or facts is None or known.names != names or known.facts != facts:
            manifest, primary = self._describe(names, tensors)
            addresses = [
                plain_address(tensors[index], spec)
                for index, spec in zip(primary, manifest.tensors, strict=True)
            ]
            known = _Known(names, facts, manifest, primary, np.array(addresses, dtype=np.int64))
            self._known = known
        sent = [tensors[index] for index in known.primary] if known.aliased else tensors
        return Inventory(known.manifest, sent, known.addresses)

    def _describe(self, names: list[str], tensors: list[Any]) -> tuple[Manifest, list[int]]:
        rename = self._options.rename or (lambda name: name)
        first: dict[Any, str] = {}
        aliases: dict[str, str] = {}
        entries: list[tuple[str, torch.dtype, torch.Size]] = []
        primary: list[int] = []
        for index, (name, value) in enumerate(zip(names, tensors, strict=True)):
            if not isinstance(name, str):
                raise SourceError(f"names are texts, not {type(name).__name__}: {name!r:.80}")
            tensor = check_sendable(name, value)
            final = rename(name)
            same = _identity(tensor)
            if same is not None and same in first:
                if final in aliases:
                    raise SourceError(f"two tensors would be called {final!r}")
                aliases[final] = first[same]
                continue
            if same is not None:
                first[same] = final
            entries.append((final, self._options.wire_dtype(tensor), tensor.shape))
            primary.append(index)
        try:
            return Manifest.build(entries, aliases), primary
        except ManifestError as error:
            raise SourceError(str(error)) from None


@dataclass(frozen=True)
class _Known:
    """What was found out about tensors, for as long as they have the same names and facts."""

    names: list[str]
    facts: Facts | None
    manifest: Manifest
    primary: list[int]
    addresses: Addresses

    @property
    def aliased(self) -> bool:
        return len(self.primary) != len(self.names)


def _identity(tensor: torch.Tensor) -> Any:
    """Equal for tensors that are the same elements in the same order; None if there are none."""
    if tensor.numel() == 0:
        return None
    bits = tensor.is_conj(), tensor.is_neg()
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device, bits


class MappingSource(ResidentSource):
    """A mapping of names to tensors. The names are the user's own."""

    def __init__(self, weights: Mapping[str, torch.Tensor], options: SourceOptions) -> None:
        super().__init__(options)
        self._weights = weights

    def entries(self) -> tuple[list[str], list[Any]]:
        return list(self._weights.keys()), list(self._weights.values())


def accepts(weights: Any) -> bool:
    return isinstance(weights, Mapping)


class TensorDictSource(ResidentSource):
    """A ``TensorDict``; nested names are joined with dots."""

    def __init__(self, weights: Any, options: SourceOptions) -> None:
        super().__init__(options)
        self._weights = weights

    def entries(self) -> tuple[list[str], list[Any]]:
        leaves = list(self._weights.items(True, True))
        names = [key if isinstance(key, str) else ".".join(key) for key, _ in leaves]
        return names, [value for _, value in leaves]


def accepts_tensordict(weights: Any) -> bool:
    # Whoever holds a TensorDict has imported tensordict; nobody else pays for importing it.
    module = sys.modules.get("tensordict")
    return module is not None and isinstance(weights, module.TensorDictBase)


def tensordict_source(weights: Any, options: SourceOptions) -> WeightSource:
    return TensorDictSource(weights, options)
