"""A copy between two strided tensors as copies of contiguous bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from weightsync.tensors import Addresses


@dataclass(frozen=True)
class Geometry:
    """Where a view lies in a tensor: ``offset`` and ``stride`` are counted in elements."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, view: torch.Tensor, begin: int = 0) -> Geometry:
        """
        Args:
            begin: of the tensor, in elements of the storage that it shares with the view.
        """
        return cls(int(view.storage_offset()) - begin, tuple(view.shape), view.stride())

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view, in a tensor of the same layout as the one it was found in."""
        whole = tensor.detach()
        return whole.as_strided(self.size, self.stride, whole.storage_offset() + self.offset)

    @property
    def overlaps_itself(self) -> bool:
        return any(
            step == 0 and size > 1 for size, step in zip(self.size, self.stride, strict=True)
        )


@dataclass(frozen=True)
class Runs:
    """Runs of equal length, contiguous on both sides, as nested loops: outermost first.

    Attributes:
        into, out_of: where the first begins, in elements.
        loops: ``(count, step of the destination, step of the source)``, in elements.
        length: of each run, in elements.
    """

    into: int
    out_of: int
    loops: tuple[tuple[int, int, int], ...]
    length: int

    @classmethod
    def of(cls, into: Geometry, out_of: Geometry) -> Runs:
        """Of the copy of a view into another one of the same shape."""
        loops: list[tuple[int, int, int]] = []
        dimensions = zip(into.size, into.stride, out_of.stride, strict=True)
        for size, step, other in sorted(dimensions, key=lambda each: -each[1]):
            if size == 1:
                continue
            if loops and loops[-1][1:] == (step * size, other * size):
                loops[-1] = loops[-1][0] * size, step, other
            else:
                loops.append((size, step, other))
        length = loops.pop()[0] if loops and loops[-1][1:] == (1, 1) else 1
        return cls(into.offset, out_of.offset, tuple(loops), length)

    @property
    def count(self) -> int:
        return math.prod(count for count, _, _ in self.loops)

    def rows(self) -> tuple[Addresses, Addresses]:
        """Where each run begins in the destination and in the source, in elements."""
        into, out_of = np.array([self.into]), np.array([self.out_of])
        for count, step, other in self.loops:
            number = np.arange(count)
            into = (into[:, None] + number * step).ravel()
            out_of = (out_of[:, None] + number * other).ravel()
        return into.astype(np.int64), out_of.astype(np.int64)
