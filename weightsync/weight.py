"""One tensor of a trainer that does not exist as such: sharded, merged, packed or converted."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from weightsync.errors import SourceError


class Weight(ABC):
    """A tensor that is known by its dtype and shape, and made when its turn in the stream comes.

    It looks at the trainer when it is read, never before: what it was made from may have changed
    since. Reading it never changes the trainer.

    Attributes:
        dtype, shape: of the tensor as it is sent, before the cast that the user may ask for.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def identity(self) -> Hashable | None:
        """Equal for two weights that are one tensor under two names (a tie). None: never tied."""
        return None

    @property
    def collective(self) -> bool:
        """Whether all ranks of the trainer must read it together, in the same order."""
        return False

    @property
    def among(self) -> frozenset[int] | None:
        """The ranks (their numbers in the default group) without which it is not whole, where that
        is known."""
        return None

    @abstractmethod
    def read(self) -> torch.Tensor:
        """The values: dense, of ``shape`` and ``dtype``, on any device.

        They stay as they are for as long as the trainer does and the tensor is referred to.

        Raises:
            SourceError: it cannot be made; does not know its own name.
        """

    @property
    def refusal(self) -> Refusal | None:
        """Why it cannot be sent. None: it can."""
        return None

    def pieces(self) -> list[Piece] | None:
        """What this rank holds, so that all ranks together hold each element.

        None: it is known as a whole only, and has to be read. Costs nothing, and every rank says
        None for the same weights.
        """
        return None


@dataclass(frozen=True)
class Refusal:
    """Why something cannot be sent.

    Attributes:
        excluded: it is not to be sent either, nor is anything else that it is made of.
    """

    reason: str
    excluded: bool


@dataclass(frozen=True, eq=False)
class Unsendable(Weight):
    """Stands for a tensor that cannot be sent until it is known what is made of it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    why: Refusal

    @property
    def refusal(self) -> Refusal:
        return self.why

    def read(self) -> torch.Tensor:
        raise SourceError(self.why.reason)


@dataclass(frozen=True)
class Piece:
    """A block of a whole tensor, held by this rank.

    Attributes:
        tensor: the values, not yet cast.
        whole: the shape of the whole tensor as it is to be looked at: its own, or flattened.
        offsets: where the block begins in that shape.
        rank: this process's number in the default group.
        holders: the numbers of all that hold the same block, in an order that they agree on;
            none if this rank alone does.
    """

    tensor: torch.Tensor
    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    rank: int = 0
    holders: tuple[int, ...] = ()

    def is_ours(self, ranks: Collection[int] | None) -> bool:
        """Whether this rank is the one of ``ranks`` (None: of all) to write it."""
        writers = (rank for rank in self.holders if ranks is None or rank in ranks)
        return next(writers, self.rank) == self.rank

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """The block's view of a contiguous tensor that has as many elements as the whole."""
        view = tensor.view(self.whole)
        sizes = zip(self.offsets, self.tensor.shape, strict=True)
        for dimension, (offset, size) in enumerate(sizes):
            view = view.narrow(dimension, offset, size)
        return view


Value: TypeAlias = torch.Tensor | Weight
"""What a source holds under a name: a tensor that exists anyway, or a weight to be read."""


def read(value: Value) -> torch.Tensor:
    return value.read() if isinstance(value, Weight) else value


def is_collective(value: Value | None) -> bool:
    return isinstance(value, Weight) and value.collective
