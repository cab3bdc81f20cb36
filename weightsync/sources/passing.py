"""Streams that can be walked once, a new one for each update and all alike, as frameworks have."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from weightsync.errors import SourceError
from weightsync.manifest import Manifest
from weightsync.source import SourceOptions, WeightSource, check_sendable
from weightsync.sources.iterable import IterableSource, pair_of
from weightsync.sources.mapping import MappingSource

Stream = Iterable[tuple[str, torch.Tensor]]


class PassingStreams:
    """Makes sources of such streams.

    The first one tells what there is, and is held in host memory, whole, until it is sent. From
    then on a stream is expected to bring the same, and passes through tensor by tensor. After an
    update that failed the next one is held again: the model may have changed.

    Args:
        dtype: see :class:`~weightsync.source.SourceOptions`.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._options = SourceOptions(dtype=dtype)
        self._manifest: Manifest | None = None

    @contextmanager
    def source(self, stream: Stream) -> Iterator[WeightSource]:
        """The source of one update, which is to be sent within the block.

        However the block ends, the stream is walked to its end: where the ranks of a trainer make
        its tensors together, the others would wait in a collective for one that stopped.
        """
        rest = iter(stream)
        manifest, self._manifest = self._manifest, None
        try:
            source = self._source(rest, manifest)
            yield source
            self._manifest = source.manifest()
        finally:
            walk(rest)

    def _source(
        self, rest: Iterator[tuple[str, torch.Tensor]], known: Manifest | None
    ) -> WeightSource:
        if known is not None:
            return IterableSource(rest, replace(self._options, manifest=known))
        held: dict[str, torch.Tensor] = {}
        for entry in rest:
            name, tensor = pair_of(entry)
            if name in held:
                raise SourceError(f"two tensors would be called {name!r}")
            held[name] = check_sendable(name, tensor).detach().to("cpu", copy=True)
        return MappingSource(held, self._options)


def walk(stream: Stream) -> None:
    """Take part in making the tensors, and keep none."""
    deque(stream, maxlen=0)
