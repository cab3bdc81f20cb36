"""Sets of weights: which tensors, what they hold, and digests that tell versions apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import xxhash

_PATTERN = (1 << 18) - 1
"""Values of the pattern that tensors begin with: odd, so that it lies otherwise in each of them."""

_DIGEST = 8
"""Bytes of one tensor's digest."""


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
        tile = pattern.view(torch.uint8)
        made = {}
        for spec in self.specs:
            tensor = made[spec.name] = spec.empty()
            into = bytes_of(tensor)
            for begin in range(0, into.numel(), tile.numel()):
                piece = into[begin : begin + tile.numel()]
                piece.copy_(tile[: piece.numel()])
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
    """A digest of each tensor, one after the other."""
    return b"".join(
        xxhash.xxh3_64_digest(memoryview(bytes_of(tensor).numpy())) for tensor in weights.values()
    )


def is_whole(found: bytes, versions: Iterable[bytes]) -> bool:
    """Whether what was found is one of the versions, and no mixture."""
    return found in versions


def differing(found: bytes, version: bytes) -> int:
    """How many tensors are not those of a version."""
    offsets = range(0, max(len(found), len(version)), _DIGEST)
    return sum(found[at : at + _DIGEST] != version[at : at + _DIGEST] for at in offsets)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, not copied."""
    return tensor.detach().reshape(-1).view(torch.uint8)


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
