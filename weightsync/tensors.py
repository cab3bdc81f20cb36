"""What of a tensor decides how its bytes are copied, looked at quickly for many tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import numpy.typing as npt
import torch

Addresses = npt.NDArray[np.int64]

_address = torch.Tensor.data_ptr
_contiguous = torch.Tensor.is_contiguous
_negated = torch.Tensor.is_neg
_shape = attrgetter("shape")


@dataclass(frozen=True)
class Facts:
    """Equal for two looks at tensors if whatever was found out by the first still holds.

    A parameter keeps its identity when its ``data`` is replaced, and a tensor its address when it
    is transposed in place: so addresses, dtypes, shapes and strides are compared, not identities.
    A look at 20,000 tensors costs a few milliseconds, checking and describing them
    ten times that.
    """

    addresses: list[int]
    dtypes: list[torch.dtype]
    shapes: list[int]
    """Their hashes: 20,000 live tuples would set off the garbage collector at every look."""
    contiguous: list[bool]
    negated: list[bool]
    others: list[tuple[int, tuple[int, ...], bool]]
    """Index, strides and conjugate bit of the tensors that are not plain memory."""

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Facts:
        """
        Raises:
            RuntimeError: a tensor has no memory of its own to look at.
        """
        contiguous = list(map(_contiguous, tensors))
        negated = list(map(_negated, tensors))
        dtypes = [tensor.dtype for tensor in tensors]
        others = []
        if not all(contiguous) or any(map(_COMPLEX.__contains__, dtypes)):
            for index, tensor in enumerate(tensors):
                if not contiguous[index] or dtypes[index].is_complex:
                    others.append((index, tensor.stride(), tensor.is_conj()))
        addresses = list(map(_address, tensors))
        shapes = list(map(hash, map(_shape, tensors)))
        return cls(addresses, dtypes, shapes, contiguous, negated, others)


_COMPLEX = {torch.complex32, torch.complex64, torch.complex128}


def plain_address(
    tensor: torch.Tensor, dtype: torch.dtype, place: torch.device | None = None
) -> int:
    """Where a tensor's bytes lie if they are its values in that dtype, in order; otherwise 0.

    Args:
        place: the device that it has to be on; None for the processor.
    """
    plain = (
        tensor.dtype == dtype
        and (tensor.is_cpu if place is None else tensor.device == place)
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.is_conj()
        and tensor.numel() > 0
    )
    return tensor.data_ptr() if plain else 0
