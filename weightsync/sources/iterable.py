"""Weights that come as a stream of ``(name, tensor)`` and are not held in memory together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from weightsync.errors import ManifestError, SourceError
from weightsync.manifest import Manifest
from weightsync.source import SourceOptions, WeightSource, check_sendable

Stream = Iterable[tuple[str, torch.Tensor]]


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
        weights = self._weights
        rename = self._options.rename or (lambda name: name)
        stream = iter(weights() if callable(weights) else weights)
        if stream is weights and self._options.manifest is None:
            raise SourceError("the iterable gave a one-shot iterator: pass manifest= with it")
        for name, tensor in stream:
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
    return callable(weights) or (
        isinstance(weights, Iterable) and not isinstance(weights, (str, bytes))
    )
