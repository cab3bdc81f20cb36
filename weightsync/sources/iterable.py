"""Weights that come as a stream of ``(name, tensor)`` and are not held in memory together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from weightsync.errors import ManifestError, SourceError
from weightsync.manifest import Manifest
from weightsync.source import SourceOptions, WeightSource, as_value, check_sendable
from weightsync.weight import Weight
from weightsync.words import a_kind

Stream = Iterable[tuple[str, torch.Tensor]]


_EXPECTED = "where an iterable of (name, tensor) was expected"


def pair_of(entry: Any) -> tuple[str, Any]:
    """
    Raises:
        SourceError: it is something else.
    """
    pair = isinstance(entry, (tuple, list)) and len(entry) == 2
    if not pair or not isinstance(entry[0], str):
        raise SourceError(f"the stream holds {a_kind(entry)}, {_EXPECTED}")
    return entry[0], entry[1]


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

    def _stream(self, names: list[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """The stream, with names as they are before ``rename``.

        Args:
            names: gets all of them, of what is not sent as well.
        """
        options = self._options
        stream = self._weights() if callable(self._weights) else self._weights
        if not isinstance(stream, Iterable):
            raise SourceError(f"the callable returned {a_kind(stream)}, {_EXPECTED}")
        for entry in stream:
            name, tensor = pair_of(entry)
            if names is not None:
                names.append(name)
            if not options.sends(name):
                continue
            value = as_value(name, tensor)
            if isinstance(value, Weight):
                if value.collective:
                    raise SourceError(
                        f"tensor {name!r} cannot be sent: it is sharded over ranks; pass the "
                        "module, or gather it before it comes into the stream"
                    )
                value = check_sendable(name, value.read())
            yield name, value

    @property
    def walked(self) -> bool:  # type: ignore[override]
        return self._options.manifest is None

    def manifest(self) -> Manifest:
        options = self._options
        if options.manifest is not None:
            return options.manifest
        names: list[str] = []
        entries = []
        for name, tensor in self._stream(names):
            dtype = options.wire_dtype(name, tensor.dtype)
            entries.append((options.final(name), dtype, tensor.shape))
        options.check_patterns(names)
        try:
            return Manifest.build(entries)
        except ManifestError as error:
            raise SourceError(str(error)) from None

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((self._options.final(name), tensor) for name, tensor in self._stream())


def accepts(weights: Any) -> bool:
    if isinstance(weights, (str, bytes, torch.Tensor, type)):
        return False
    return callable(weights) or isinstance(weights, Iterable)
