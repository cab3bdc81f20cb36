"""Which bytes of a manifest's layout a rank of an engine needs, and where it keeps them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from weightsync.tensors import Addresses

_ALIGNED = 16
"""Bytes. What is kept begins at the same multiple as in the layout, so that it is copied fast."""

_MAX_PITCH = 1 << 28
"""Bytes. What every GPU takes."""

_NEARLY = 0.9
"""Of the layout: from here on all of it is kept, as it is."""


@dataclass(frozen=True)
class Block:
    """``count`` runs of ``width`` bytes, at equal distances on both sides.

    Attributes:
        begin: of the first in the layout. place: where it is kept.
    """

    begin: int
    place: int
    width: int
    count: int
    pitch: int
    place_pitch: int

    @property
    def end(self) -> int:
        """In the layout."""
        return self.begin + (self.count - 1) * self.pitch + self.width


@dataclass(frozen=True)
class Selection:
    """Runs of the layout, sorted and apart from each other.

    Attributes:
        begin, length, place: int64: where each begins in the layout, its bytes, where it is kept.
        nbytes: of the memory that keeps it.
        whole: everything is kept, at the place that it has in the layout.
    """

    begin: Addresses
    length: Addresses
    place: Addresses
    nbytes: int
    whole: bool

    @classmethod
    def everything(cls, nbytes: int) -> Selection:
        zero = np.zeros(1, dtype=np.int64)
        return cls(zero, zero + nbytes, zero, nbytes, True)

    @classmethod
    def of(cls, begin: Addresses, length: Addresses, nbytes: int) -> Selection:
        """The bytes of some runs, in any order, which may overlap, of a layout of ``nbytes``."""
        order = np.argsort(begin[length > 0], kind="stable")
        begin, length = begin[length > 0][order], length[length > 0][order]
        if len(begin) and int(length.sum()) >= _NEARLY * nbytes:
            return cls.everything(nbytes)
        ends = np.maximum.accumulate(begin + length)
        first, last = np.ones((2, len(begin)), dtype=bool)
        first[1:] = last[:-1] = begin[1:] > ends[:-1]
        begin, length = begin[first], ends[last] - begin[first]
        # Each a little behind the former one's end, so that it is aligned as in the layout.
        lead = begin % _ALIGNED
        room = -(-(lead + length) // _ALIGNED) * _ALIGNED
        place = np.cumsum(room) - room + lead
        return cls(begin, length, place, int(room.sum()), False)

    def places(self, offsets: Addresses) -> Addresses:
        """Where bytes of the layout are kept.

        Raises:
            IndexError: some are not among those selected.
        """
        run = np.searchsorted(self.begin, offsets, side="right") - 1
        if ((run < 0) | (offsets >= self.begin[run] + self.length[run])).any():
            raise IndexError("bytes of the layout are asked for that were not selected")
        kept: Addresses = self.place[run] + offsets - self.begin[run]
        return kept

    def windows(self, size: int) -> list[list[Block]]:
        """What is kept in each piece of ``size`` bytes of the memory, as few copies."""
        begin, length, place = cut(self.begin, self.length, self.place, size)
        bounds = np.searchsorted(place, np.arange(0, self.nbytes + size, size))
        return [
            _blocks(begin[low:high], length[low:high], place[low:high])
            for low, high in pairwise(bounds)
            if high > low
        ]


def cut(
    begin: Addresses, length: Addresses, place: Addresses, size: int
) -> tuple[Addresses, Addresses, Addresses]:
    """The same runs, cut where their places cross a multiple of ``size``."""
    first, last = place // size, (place + np.maximum(length, 1) - 1) // size
    parts = np.where(length > 0, last - first + 1, 0)
    row = np.repeat(np.arange(len(length)), parts)
    window = first[row] + np.arange(len(row)) - (np.cumsum(parts) - parts)[row]
    low = np.maximum(place[row], window * size)
    high = np.minimum(place[row] + length[row], (window + 1) * size)
    return begin[row] + low - place[row], high - low, low


def _blocks(begins: Addresses, lengths: Addresses, places: Addresses) -> list[Block]:
    """Neighbours of one length and at one distance become one copy in two dimensions."""
    begin, length, place = begins.tolist(), lengths.tolist(), places.tolist()
    blocks, at = [], 0
    while at < len(begin):
        stop, pitch, place_pitch = at + 1, 0, 0
        if stop < len(begin):
            pitch, place_pitch = begin[stop] - begin[at], place[stop] - place[at]
        while (
            stop < len(begin)
            and length[stop] == length[at]
            and begin[stop] - begin[stop - 1] == pitch < _MAX_PITCH
            and place[stop] - place[stop - 1] == place_pitch
        ):
            stop += 1
        blocks.append(Block(begin[at], place[at], length[at], stop - at, pitch, place_pitch))
        at = stop
    return blocks
