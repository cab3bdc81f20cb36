"""Weights that come as a stream of ``(name, tensor)`` and are not held in memory together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from weightsync.errors import ManifestError, SourceError
from weightsync.manifest import Manifest
from weightsync.source import SourceOptions, WeightSource, check_sendable

Stream = Iterable[tuple[str, torch.Tensor]]


_EXPECTED = "where an iterable of (name, tensor) was expected"


class IterableSource(WeightSource):
    """A stream that starts afresh each time it is asked for: an iterable, or a callable.

    It is walked once for the names, dtypes and shapes, holding one tensor at a time, and once
    for the values; the order may differ between the two. A one-shot iterator is walked once
    only, and needs a manifest.
    """

    def __init__(self, weights: Stream | Callable[[], Stream], options: SourceOptions) -> None:
        self._weights = weights
        self._options = options
        if isinstance(weights, Iterator) and options.manifest is None:
            raise SourceError(
                "a one-shot iterator cannot be looked at before it is sent: pass manifest=, or a "
                "callable that returns a fresh iterator"
            )

    def _stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        rename = self._options.rename or (lambda name: name)
        stream = self._weights() if callable(self._weights) else self._weights
        if not isinstance(stream, Iterable):
            raise SourceError(f"the callable returned a {type(stream).__name__}, {_EXPECTED}")
        for entry in stream:
            pair = isinstance(entry, (tuple, list)) and len(entry) == 2
            if not pair or not isinstance(entry[0], str):
                raise SourceError(f"the stream holds a {type(entry).__name__}, {_EXPECTED}")
            name, tensor = entry
            yield rename(name), check_sendable(name, tensor)

    def manifest(self) -> Manifest:
        if self._options.manifest is not None:
            return self._options.manifest
        entries = [
            (name, self._options.wire_dtype(tensor), tensor.shape)
            for name, tensor in self._stream()
        ]
        try:
            return Manifest.build(entries)
        except ManifestError as error:
            raise SourceError(str(error)) from None

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._stream()


def accepts(weights: Any) -> bool:
    if isinstance(weights, (str, bytes, torch.Tensor, type)):
        return False
    return callable(weights) or isinstance(weights, Iterable)
