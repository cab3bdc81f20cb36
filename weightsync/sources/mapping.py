"""Weights that lie in memory under names: a mapping, or a ``TensorDict``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from weightsync.errors import ManifestError, SourceError
from weightsync.manifest import Manifest
from weightsync.source import SourceOptions, WeightSource, check_sendable


class ResidentSource(WeightSource):
    """Tensors that exist anyway. ``entries`` lists them afresh for every update.

    Tied weights are found by their storage: two names for the same elements in the same order
    are sent once, under the name that comes first.
    """

    resident = True

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._checked: tuple[list[str], list[Any], Manifest, list[int]] | None = None

    def entries(self) -> Iterable[tuple[str, Any]]:
        """All ``(name, tensor)``, tied ones under each of their names, names not yet final."""
        raise NotImplementedError

    def manifest(self) -> Manifest:
        return self._look()[0]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._look()[1])

    def _look(self) -> tuple[Manifest, list[tuple[str, torch.Tensor]]]:
        """List the tensors, and check and describe them unless nothing changed since last time."""
        names: list[str] = []
        tensors: list[Any] = []
        for name, tensor in self.entries():
            names.append(name)
            tensors.append(tensor)
        looks = [_look_of(tensor) for tensor in tensors]
        if self._checked is None or self._checked[0] != names or self._checked[1] != looks:
            self._checked = names, looks, *self._describe(names, tensors)
        _, _, manifest, primary = self._checked
        return manifest, [
            (spec.name, tensors[index])
            for spec, index in zip(manifest.tensors, primary, strict=True)
        ]

    def _describe(self, names: list[str], tensors: list[Any]) -> tuple[Manifest, list[int]]:
        rename = self._options.rename or (lambda name: name)
        first: dict[Any, str] = {}
        aliases: dict[str, str] = {}
        entries: list[tuple[str, torch.dtype, torch.Size]] = []
        primary: list[int] = []
        for index, (name, value) in enumerate(zip(names, tensors, strict=True)):
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


def _look_of(tensor: Any) -> Any:
    """What has to stay the same for the last update's checks to hold for this one too."""
    if isinstance(tensor, torch.Tensor):
        try:
            return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        except RuntimeError:  # no storage: refused by name when it is described
            pass
    return object()


def _identity(tensor: torch.Tensor) -> Any:
    """Equal for tensors that are the same elements in the same order; None if there are none."""
    if tensor.numel() == 0:
        return None
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device


class MappingSource(ResidentSource):
    """A mapping of names to tensors. The names are the user's own."""

    def __init__(self, weights: Mapping[str, torch.Tensor], options: SourceOptions) -> None:
        super().__init__(options)
        self._weights = weights

    def entries(self) -> Iterable[tuple[str, Any]]:
        for name in self._weights:
            if not isinstance(name, str):
                raise SourceError(f"names are texts, not {type(name).__name__}: {name!r:.80}")
        return self._weights.items()


def accepts(weights: Any) -> bool:
    return isinstance(weights, Mapping)


class TensorDictSource(ResidentSource):
    """A ``TensorDict``; nested names are joined with dots."""

    def __init__(self, weights: Any, options: SourceOptions) -> None:
        super().__init__(options)
        self._weights = weights

    def entries(self) -> Iterable[tuple[str, Any]]:
        return [
            (key if isinstance(key, str) else ".".join(key), value)
            for key, value in self._weights.items(True, True)
        ]


def accepts_tensordict(weights: Any) -> bool:
    # Whoever holds a TensorDict has imported tensordict; nobody else pays for importing it.
    module = sys.modules.get("tensordict")
    return module is not None and isinstance(weights, module.TensorDictBase)


def tensordict_source(weights: Any, options: SourceOptions) -> WeightSource:
    return TensorDictSource(weights, options)
