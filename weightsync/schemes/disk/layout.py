"""Which tensor lies in which file, and where: files that any safetensors loader can read.

A file is an 8-byte length, a JSON header and the tensors without a hole between them. Ours begin at
a multiple of 4096 bytes, behind a header padded with spaces, and are sorted by the size of their
elements, so that each can be mapped as what it is. What safetensors has no dtype for is written as
bytes (``U8``): our own description of the layout, beside the files, tells the truth.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from weightsync.chunks import Geometry
from weightsync.errors import ManifestError, ProtocolError
from weightsync.manifest import Manifest, ParamSpec
from weightsync.run.records import number, reading, text
from weightsync.schemes.disk import names

PAGE = 4096
"""Bytes. Direct writes begin and end at a multiple, and so do mappings."""

_MAX_HEADER = 50_000_000
"""Bytes. Half of what safetensors accepts."""

_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float64: "F64",
}
"""Those that ``safetensors.torch`` reads back as they were."""


def is_portable(dtype: torch.dtype) -> bool:
    """Whether any safetensors loader reads tensors of this dtype back as they were."""
    return dtype in _DTYPES


@dataclass(frozen=True)
class Shard:
    """One file.

    Attributes:
        size: of the file, in bytes.
        tensors: the indices of its tensors in the version's manifest.
        manifest: of the file alone: the tensors in the same order, with their offsets in it.
    """

    name: str
    size: int
    tensors: tuple[int, ...]
    manifest: Manifest

    @cached_property
    def geometry(self) -> Geometry:
        """Which tensors the chunks of the file hold, its header included."""
        return Geometry(self.manifest)


@dataclass(frozen=True)
class Layout:
    """All files of a version."""

    manifest: Manifest
    shards: tuple[Shard, ...]

    @cached_property
    def nbytes(self) -> int:
        return sum(shard.size for shard in self.shards)

    @cached_property
    def place(self) -> dict[int, tuple[int, int]]:
        """For each tensor (by its index in the manifest) its shard, and its index in there."""
        return {
            tensor: (which, index)
            for which, shard in enumerate(self.shards)
            for index, tensor in enumerate(shard.tensors)
        }

    @cached_property
    def index(self) -> dict[str, int]:
        """Tensors of the manifest, by name."""
        return {spec.name: number for number, spec in enumerate(self.manifest.tensors)}

    @cached_property
    def json(self) -> bytes:
        """The ``weightsync.layout.json`` of docs/architecture.md."""
        shards = [
            {
                "name": shard.name,
                "size": shard.size,
                "tensors": [
                    [tensor, spec.offset]
                    for tensor, spec in zip(shard.tensors, shard.manifest.tensors, strict=True)
                ],
            }
            for shard in self.shards
        ]
        return json.dumps(
            {"manifest": json.loads(self.manifest.to_json()), "files": shards}
        ).encode()

    @classmethod
    def from_json(cls, data: bytes, what: str) -> Layout:
        """
        Raises:
            ProtocolError, ManifestError: it is no layout, or cannot be true; says which file it
                was, and why.
        """
        with reading(what):
            document = json.loads(data)
            try:
                manifest = Manifest.from_json(json.dumps(document["manifest"]).encode())
            except ManifestError as error:
                raise ManifestError(f"{what}: {error}") from None
            shards = tuple(_read_shard(entry, manifest) for entry in document["files"])
        seen = sorted(tensor for shard in shards for tensor in shard.tensors)
        if seen != list(range(len(manifest.tensors))):
            raise ProtocolError(f"{what}: its files do not hold each tensor once")
        if len({shard.name for shard in shards}) != len(shards):
            raise ProtocolError(f"{what}: two files have one name")
        return cls(manifest, shards)


def _read_shard(entry: Any, manifest: Manifest) -> Shard:
    name, size = text(entry["name"]), number(entry["size"])
    if not names.is_shard(name):
        raise ValueError(f"no such file: {name!r:.80}")
    tensors = tuple(number(tensor) for tensor, _ in entry["tensors"])
    offsets = [number(offset) for _, offset in entry["tensors"]]
    shard = _shard(name, size, manifest, tensors, offsets)
    end = 0
    for spec in shard.manifest.tensors:
        if spec.offset < end or spec.offset % max(1, spec.dtype.itemsize):
            raise ValueError(f"{name}: {spec.name!r:.80} overlaps or is not aligned")
        end = spec.offset + spec.nbytes
    if end > size:
        raise ValueError(f"{name} has {size} bytes, its tensors end at {end}")
    return shard


def _shard(
    name: str, size: int, manifest: Manifest, tensors: Sequence[int], offsets: Sequence[int]
) -> Shard:
    specs = (manifest.tensors[tensor] for tensor in tensors)
    placed = tuple(
        ParamSpec(spec.name, spec.dtype, spec.shape, offset, spec.nbytes)
        for spec, offset in zip(specs, offsets, strict=True)
    )
    return Shard(name, size, tuple(tensors), Manifest(placed, {}, size))


# -------------------------------------------------------------------- making one


@dataclass(frozen=True)
class Checkpoint:
    """A layout to be written, with what foreign loaders want to find.

    Attributes:
        headers: what each shard begins with, whole pages.
        index: of ``save_pretrained``; None for a single file, which needs none.
    """

    layout: Layout
    headers: tuple[bytes, ...]
    index: bytes | None

    @classmethod
    def plan(cls, manifest: Manifest, shard_bytes: int) -> Checkpoint:
        """
        Args:
            shard_bytes: a shard is begun anew before it would hold more, in stream order.
        """
        keys = _keys(manifest)
        groups = list(_groups(manifest, keys, shard_bytes)) or [[]]
        shards, headers = [], []
        for which, group in enumerate(groups):
            # Ranked by size of element, each begins at a multiple of it whatever came before.
            tensors = sorted(group, key=lambda tensor: -manifest.tensors[tensor].dtype.itemsize)
            header = _header([(keys[t], manifest.tensors[t]) for t in tensors])
            offsets, end = [], len(header)
            for tensor in tensors:
                offsets.append(end)
                end += manifest.tensors[tensor].nbytes
            name = names.shard_name(which, len(groups))
            shards.append(_shard(name, end, manifest, tensors, offsets))
            headers.append(header)
        layout = Layout(manifest, tuple(shards))
        return cls(layout, tuple(headers), _index(layout, keys) if len(shards) > 1 else None)


def _keys(manifest: Manifest) -> list[str]:
    """What each tensor is called in safetensors: by its own name, wherever the format allows it."""
    taken = set(manifest.by_name)
    keys = []
    for spec in manifest.tensors:
        key = spec.name.encode("utf-8", "backslashreplace").decode()
        while key == "__metadata__" or (key != spec.name and key in taken):
            key += "_"
        taken.add(key)
        keys.append(key)
    return keys


def _groups(manifest: Manifest, keys: Sequence[str], shard_bytes: int) -> Iterator[list[int]]:
    group: list[int] = []
    nbytes = described = 0
    for tensor, spec in enumerate(manifest.tensors):
        description = 200 + 6 * len(keys[tensor]) + 20 * len(spec.shape)
        if group and (nbytes + spec.nbytes > shard_bytes or described + description > _MAX_HEADER):
            yield group
            group, nbytes, described = [], 0, 0
        group.append(tensor)
        nbytes += spec.nbytes
        described += description
    if group:
        yield group


def _header(entries: Sequence[tuple[str, ParamSpec]]) -> bytes:
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, spec in entries:
        dtype = _DTYPES.get(spec.dtype)
        shape = [spec.nbytes] if dtype is None else list(spec.shape)
        place = [end, end + spec.nbytes]
        described[key] = {"dtype": dtype or "U8", "shape": shape, "data_offsets": place}
        end += spec.nbytes
    data = json.dumps(described, separators=(",", ":")).encode()
    length = -(-(8 + len(data)) // PAGE) * PAGE - 8
    return length.to_bytes(8, "little") + data.ljust(length)


def _index(layout: Layout, keys: Sequence[str]) -> bytes:
    files = {keys[tensor]: shard.name for shard in layout.shards for tensor in shard.tensors}
    total = {"total_size": layout.manifest.payload}
    return json.dumps({"metadata": total, "weight_map": files}, indent=1).encode()
