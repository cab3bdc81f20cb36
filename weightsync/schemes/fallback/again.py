"""Weights that are read more than once: by every attempt to send them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from weightsync.errors import SourceError
from weightsync.source import Inventory, Looked, WeightSource

Entry = tuple[str, torch.Tensor]


class Rereadable:
    """One look at the weights, for several attempts.

    Attributes:
        source: what the attempts are given.
        error: what the weights themselves raised: no other scheme would fare better.
    """

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory
        self._attempts = 0
        self._count = 0
        self.error: Exception | None = None
        self.source: WeightSource = Looked(replace(inventory, rest=self._stream))

    def _stream(self) -> Iterator[Entry]:
        self._attempts += 1
        self._count = 0
        try:
            yield from map(self._counted, self._inventory.stream())
            self._require_all()
        except Exception as error:
            self.error = error
            raise

    def _counted(self, entry: Entry) -> Entry:
        self._count += 1
        return entry

    def _require_all(self) -> None:
        """
        Raises:
            SourceError: an earlier attempt has used the stream up.
        """
        one_by_one = all(self._inventory.values[n] is None for n in self._inventory.streamed())
        if self._attempts > 1 and one_by_one and self._count < len(self._inventory.streamed()):
            raise SourceError(
                "the weights are a one-shot iterator that the attempt before has used up: pass a "
                "callable that returns a fresh iterator"
            )
