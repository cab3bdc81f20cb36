"""Sets of weights: which tensors, what they hold, and digests that tell versions apart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import xxhash

_PATTERN = (1 << 18) - 1
"""Values of the pattern that is repeated in all tensors."""

_SHIFT = 104_729
"""Bytes by which it is shifted from each tensor to the next, so that no two are alike."""


@dataclass(frozen=True)
class Spec:
    """One tensor. ``dtype`` is torch's name of it, without ``torch.``."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * torch_dtype(self.dtype).itemsize

    def empty(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=torch_dtype(self.dtype))


@dataclass(frozen=True)
class WeightSet:
    """Tensors that a benchmark moves."""

    title: str
    specs: tuple[Spec, ...]

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)

    def flat(self) -> WeightSet:
        """As many bytes in one tensor: what a bound moves."""
        return WeightSet(self.title, (Spec("flat", (self.nbytes,), "uint8"),))

    def zeros(self) -> dict[str, torch.Tensor]:
        """What a receiver starts with, every page of it touched."""
        return {spec.name: spec.empty().zero_() for spec in self.specs}

    def weights(self) -> dict[str, torch.Tensor]:
        """What a trainer starts with."""
        pattern = torch.randn(_PATTERN, generator=torch.Generator().manual_seed(0))
        length = pattern.nbytes
        twice = torch.cat((pattern, pattern)).view(torch.uint8)
        made = {spec.name: spec.empty() for spec in self.specs}
        for number, tensor in enumerate(made.values()):
            begin = number * _SHIFT % length
            for piece in torch.split(bytes_of(tensor), length):
                piece.copy_(twice[begin : begin + piece.numel()])
        return made


def uniform(count: int, nbytes: int) -> WeightSet:
    """``count`` float32 tensors of the same size, about ``nbytes`` bytes in all.

    Raises:
        ValueError: there are fewer bytes than ``count`` tensors need.
    """
    each = nbytes // count // 4
    if each < 1:
        raise ValueError(f"{count} tensors of float32 do not fit into {nbytes} bytes")
    names = (f"layers.{n // 10}.part{n % 10}.weight" for n in range(count))
    return WeightSet(
        f"{size_text(nbytes)} in {count:,} tensors", tuple(Spec(name, (each,)) for name in names)
    )


def change(weights: Mapping[str, torch.Tensor]) -> None:
    """Another version: every byte differs from the one before, so that any mixture of two shows."""
    for tensor in weights.values():
        bytes_of(tensor).add_(1)


def digests(weights: Mapping[str, torch.Tensor]) -> bytes:
    """The first byte, which no neighbouring version shares, and a digest of each tensor."""
    each = (xxhash.xxh3_64_digest(view_of(tensor)) for tensor in weights.values())
    return bytes([_first_byte(weights)]) + b"".join(each)


def is_version(held: bytes, weights: Mapping[str, torch.Tensor]) -> bool:
    """Whether digests are those of one version, whichever: of these weights, changed so often."""
    steps = (held[0] - _first_byte(weights)) % 256
    for tensor in weights.values():
        bytes_of(tensor).add_(steps)
    found = digests(weights) == held
    for tensor in weights.values():
        bytes_of(tensor).sub_(steps)
    return found


def _first_byte(weights: Mapping[str, torch.Tensor]) -> int:
    return next((int(bytes_of(tensor)[0]) for tensor in weights.values() if tensor.numel()), 0)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, not copied."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def view_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor, for what takes a buffer."""
    return bytes_of(tensor).numpy().data


def torch_dtype(name: str) -> torch.dtype:
    """
    Raises:
        ValueError: torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r:.40}")
    return dtype


def size_text(nbytes: float) -> str:
    """Three digits and a decimal unit: ``1.26 GB``."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"
