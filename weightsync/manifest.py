"""What a set of weights consists of: names, dtypes, shapes, and where each tensor's bytes lie.

A manifest is made from a source, written as JSON beside the bytes, and validated when read back:
nothing a foreign file claims is believed before it was checked.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import xxhash

from weightsync.errors import ManifestError

ALIGNMENT = 64
"""Bytes. Every tensor starts at a multiple: a cache line, and enough for any dtype's view."""

_MAX_BYTES = 1 << 50  # A petabyte: no real manifest, and far from overflow in any arithmetic.


def _sendable_dtypes() -> dict[str, torch.dtype]:
    """All dtypes whose bytes mean the same everywhere: everything but the quantised ones.

    A quantised dtype (``quint8``, ...) is bytes plus a scale that lives in the tensor object.
    """
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    names = {str(dtype).removeprefix("torch."): dtype for dtype in dtypes}
    return {name: names[name] for name in sorted(names) if not name.startswith(("qint", "quint"))}


DTYPES: dict[str, torch.dtype] = _sendable_dtypes()
"""Name in a manifest (``"bfloat16"``) to dtype."""

DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class ParamSpec:
    """One tensor: ``nbytes`` contiguous, row-major bytes at ``offset``."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def __str__(self) -> str:
        return describe(self.dtype, self.shape)


def describe(dtype: torch.dtype, shape: Iterable[int]) -> str:
    """``bfloat16[4, 8]``: how shapes and dtypes are written in messages."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


@dataclass(frozen=True)
class Manifest:
    """All tensors of a set of weights, in stream order.

    Attributes:
        tensors: the tensors that are sent, with offsets that ascend and do not overlap.
        aliases: tied weights, ``other name -> name in tensors``; their bytes are sent once.
        nbytes: bytes from the first tensor's start to the last one's end, padding included.
    """

    tensors: tuple[ParamSpec, ...]
    aliases: Mapping[str, str]
    nbytes: int

    @classmethod
    def build(
        cls,
        entries: Iterable[tuple[str, torch.dtype, Iterable[int]]],
        aliases: Mapping[str, str] | None = None,
    ) -> Manifest:
        """Lay tensors out one after the other, each at a multiple of 64 bytes.

        Raises:
            ManifestError: a name twice, an empty name, an alias of nothing, an unknown dtype.
        """
        specs = []
        offset = 0
        for name, dtype, shape in entries:
            sizes = tuple(map(operator.index, shape))
            nbytes = math.prod(sizes) * dtype.itemsize
            specs.append(ParamSpec(name, dtype, sizes, offset, nbytes))
            offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
        end = specs[-1].offset + specs[-1].nbytes if specs else 0
        manifest = cls(tuple(specs), dict(aliases or {}), end)
        manifest._check()
        return manifest

    @cached_property
    def by_name(self) -> Mapping[str, ParamSpec]:
        return {spec.name: spec for spec in self.tensors}

    @cached_property
    def payload(self) -> int:
        """Bytes of all tensors, padding not counted."""
        return sum(spec.nbytes for spec in self.tensors)

    @cached_property
    def fingerprint(self) -> str:
        """128-bit XXH3 of all of it, as hexadecimal: equal layouts have equal fingerprints."""
        return xxhash.xxh3_128_hexdigest(self._body())

    def spec(self, name: str) -> ParamSpec:
        """The spec under a name or an alias of it.

        Raises:
            KeyError: no such tensor.
        """
        return self.by_name[self.aliases.get(name, name)]

    def names(self) -> list[str]:
        """All names a receiver may ask for, aliases last."""
        return [*self.by_name, *self.aliases]

    def _check(self) -> None:
        end = 0
        for spec in self.tensors:
            where = f"tensor {spec.name!r:.200}"
            if not isinstance(spec.name, str):
                raise ManifestError(f"names are texts, not {spec.name!r:.80}")
            if not spec.name:
                raise ManifestError("a tensor without a name")
            if spec.dtype not in DTYPE_NAMES:
                raise ManifestError(f"{where}: dtype {spec.dtype} cannot be sent")
            if any(size < 0 for size in spec.shape):
                raise ManifestError(f"{where}: negative size in {list(spec.shape)}")
            if spec.nbytes != math.prod(spec.shape) * spec.dtype.itemsize:
                raise ManifestError(f"{where}: {spec.nbytes} bytes do not fit {spec}")
            if spec.offset % ALIGNMENT or spec.offset < end:
                raise ManifestError(f"{where}: offset {spec.offset} overlaps or is not aligned")
            end = spec.offset + spec.nbytes
        if self.nbytes != end or end > _MAX_BYTES:
            raise ManifestError(f"{self.nbytes} bytes in all, but the tensors end at {end}")
        if len(self.by_name) != len(self.tensors):
            seen: set[str] = set()
            for spec in self.tensors:
                if spec.name in seen:
                    raise ManifestError(f"two tensors are called {spec.name!r:.200}")
                seen.add(spec.name)
        for alias, name in self.aliases.items():
            if not isinstance(alias, str):
                raise ManifestError(f"names are texts, not {alias!r:.80}")
            if not alias or alias in self.by_name or name not in self.by_name:
                raise ManifestError(f"alias {alias!r:.200} of {name!r:.200} is empty or dangling")

    def _body(self) -> bytes:
        tensors = [
            [spec.name, DTYPE_NAMES[spec.dtype], list(spec.shape), spec.offset, spec.nbytes]
            for spec in self.tensors
        ]
        return json.dumps([tensors, dict(self.aliases), self.nbytes]).encode()

    def to_json(self) -> bytes:
        """The ``manifest.json`` of docs/architecture.md."""
        document = {
            "tensors": [
                {
                    "name": spec.name,
                    "dtype": DTYPE_NAMES[spec.dtype],
                    "shape": list(spec.shape),
                    "offset": spec.offset,
                    "nbytes": spec.nbytes,
                }
                for spec in self.tensors
            ],
            "aliases": dict(self.aliases),
            "nbytes": self.nbytes,
            "fingerprint": self.fingerprint,
        }
        return json.dumps(document).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """Read and validate a manifest that somebody else wrote.

        Raises:
            ManifestError: it is not JSON, a field is missing or of the wrong type, tensors
                overlap, sizes do not add up, or the fingerprint is not that of its content.
        """
        try:
            document = json.loads(data)
            tensors = document["tensors"]
            aliases = document["aliases"]
            if not isinstance(tensors, list) or not isinstance(aliases, dict):
                raise TypeError("tensors is a list and aliases a dict")
            specs = tuple(_read_spec(entry) for entry in tensors)
            manifest = cls(
                specs,
                {_text(alias): _text(name) for alias, name in aliases.items()},
                _count(document["nbytes"]),
            )
            fingerprint = _text(document["fingerprint"])
        except ManifestError:
            raise
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            kind = type(error).__name__
            raise ManifestError(f"not a manifest: {kind}: {error!s:.200}") from None
        manifest._check()
        if manifest.fingerprint != fingerprint:
            raise ManifestError("the manifest's fingerprint is not that of its content")
        return manifest


def _read_spec(entry: Any) -> ParamSpec:
    dtype = DTYPES.get(_text(entry["dtype"]))
    name = _text(entry["name"])
    if dtype is None:
        raise ManifestError(f"tensor {name!r:.200}: unknown dtype {entry['dtype']!r:.80}")
    shape = entry["shape"]
    if not isinstance(shape, list) or len(shape) > 64:
        raise ManifestError(f"tensor {name!r:.200}: a shape is a list of at most 64 sizes")
    return ParamSpec(
        name,
        dtype,
        tuple(_count(size) for size in shape),
        _count(entry["offset"]),
        _count(entry["nbytes"]),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ManifestError(f"a text was expected, not {value!r:.80}")
    return value


def _count(value: Any) -> int:
    # bool is an int to Python, and true is not a size.
    if type(value) is not int or not 0 <= value <= _MAX_BYTES:
        raise ManifestError(f"a size was expected, not {value!r:.80}")
    return value
