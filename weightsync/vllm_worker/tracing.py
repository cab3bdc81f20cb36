"""What loaders copy where: every copy of an incoming tensor into a layer's own is noted.

The incoming tensors are stand-ins: of the shape and dtype of those that will come, with values that
nothing else in the model has. So what was not copied from where the trace says shows in the
outcome.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from weightsync.vllm_worker.runs import Geometry

_WIDE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_NARROW = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
_NARROW_DTYPES = tuple(getattr(torch, name) for name in _NARROW if hasattr(torch, name))


def has_stand_in(dtype: torch.dtype) -> bool:
    """Not integers: they may be indices, which are followed. Not packed numbers."""
    return dtype in _WIDE or dtype in _NARROW_DTYPES


def stand_in(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A contiguous tensor of the same shape and dtype; a copy if :func:`has_stand_in` says no.

    Its numbers lie between 2 and 4, as few weights do. A scalar's is made from the scalar: loaders
    demand of some that they be equal.
    """
    dtype = tensor.dtype
    if not has_stand_in(dtype):
        return tensor.to(device).clone(memory_format=torch.contiguous_format)
    if tensor.numel() == 1:
        return torch.full(tensor.shape, _other(tensor), device=device).to(dtype)
    made = torch.empty(
        tensor.shape, dtype=dtype if dtype in _WIDE else torch.float32, device=device
    )
    return made.uniform_(2, 4).to(dtype)


def _other(scalar: torch.Tensor) -> float:
    value = float(scalar.float().item())
    value = value if math.isfinite(value) and abs(value) < 200 else 0.0
    return value * 0.5 + 2.5 if abs(value - 5) > 1 else value + 4


@dataclass(frozen=True)
class Source:
    """A tensor that came in. ``number``: in the manifest. ``name``: it may be an alias."""

    number: int
    name: str
    dtype: torch.dtype


@dataclass(frozen=True)
class Piece:
    """A copy that was seen.

    Attributes:
        into: where it went, in the storage of the destination.
        out_of: where it came from, in the source; of the same shape.
        values: what was copied.
    """

    into: Geometry
    source: Source
    out_of: Geometry
    values: torch.Tensor

    def moved(self, distance: int) -> Piece:
        into = Geometry(self.into.offset + distance, self.into.size, self.into.stride)
        return Piece(into, self.source, self.out_of, self.values)


class Sources:
    """Which memory holds incoming tensors, and which was computed from them."""

    def __init__(self) -> None:
        # A weak reference keeps the identity of a storage from being used again.
        self._tensors: dict[int, tuple[Any, Source]] = {}
        self._names: dict[int, tuple[Any, frozenset[str]]] = {}

    def add(self, tensor: torch.Tensor, source: Source) -> None:
        reference = _weak(tensor)
        self._tensors[reference.cdata] = reference, source
        self._names[reference.cdata] = reference, frozenset({source.name})

    def at(self, tensor: torch.Tensor) -> Source | None:
        """The incoming tensor that this is a view of."""
        found = self._tensors.get(storage_of(tensor))
        return found[1] if found else None

    def names(self, tensor: torch.Tensor) -> frozenset[str]:
        """Of the incoming tensors that this was computed from."""
        found = self._names.get(storage_of(tensor))
        return found[1] if found else frozenset()

    def inherit(self, made: torch.Tensor, parents: Iterable[torch.Tensor]) -> None:
        names = self.names(made)
        more = names.union(*(self.names(parent) for parent in parents))
        if more != names:
            reference = _weak(made)
            self._names[reference.cdata] = reference, more


class Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active, notes what is written into some tensors.

    Attributes:
        pieces: copies of incoming tensors, in order, by the storage that they went to.
        strange: what else was written there, in words.
        names: of the incoming tensors that it was all made of, as far as that is known.
    """

    def __init__(self, sources: Sources, into: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sources = sources
        self._into = {storage_of(tensor): tensor for tensor in into}
        self.pieces: dict[int, list[Piece]] = {}
        self.strange: dict[int, str] = {}
        self.names: dict[int, set[str]] = {}

    def watches(self, tensor: torch.Tensor) -> bool:
        return storage_of(tensor) in self._into

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _written(func, args, kwargs or {}):
            own = self._into.get(storage_of(tensor))
            if own is not None and tensor.numel():
                where = storage_of(own)
                given = [self._sources.names(each) for each in _tensors(args)]
                self.names.setdefault(where, set()).update(*given)
                if _zeroes(func, args):
                    continue  # as padding is: shows in the outcome where it matters
                if func is not torch.ops.aten.copy_.default:
                    self.strange.setdefault(where, f"written by {func}")
                elif not self._copied(own, *args[:2]):
                    self.strange.setdefault(where, "computed before it is copied")
        return func(*args, **(kwargs or {}))

    def _copied(self, own: torch.Tensor, into: torch.Tensor, out_of: torch.Tensor) -> bool:
        """Whether it was a copy that can be done again with other values."""
        source = self._sources.at(out_of)
        odd = any(each.is_neg() or each.is_conj() for each in (into, out_of))
        if source is None or odd or into.dtype != own.dtype or out_of.dtype != source.dtype:
            return False
        values = out_of.expand(into.shape)
        piece = Piece(Geometry.of(into), source, Geometry.of(values), values)
        if piece.into.overlaps_itself:
            return False
        self.pieces.setdefault(storage_of(own), []).append(piece)
        return True


class Lineage(TorchFunctionMode):
    """While it is active, what is computed from incoming tensors is known to be.

    And what is written into the tensors that ``direct`` watches is noted there.
    """

    def __init__(self, sources: Sources, direct: Copies) -> None:
        super().__init__()
        self._sources, self._direct = sources, direct

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        writes = func in (torch.Tensor.copy_, torch.Tensor.__setitem__)
        if writes and not args[0].is_meta and self._direct.watches(args[0]):
            with self._direct:
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        made = args[0] if func is torch.Tensor.__setitem__ else result
        for each in _tensors(made):
            if not each.is_meta:
                self._sources.inherit(each, _tensors((args, kwargs)))
        return result


def _weak(tensor: torch.Tensor) -> Any:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def storage_of(tensor: torch.Tensor) -> int:
    """The identity of a tensor's memory."""
    return int(tensor.untyped_storage()._cdata)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _zeroes(func: Any, args: Any) -> bool:
    zero = torch.ops.aten.zero_.default
    return func is zero or (func is torch.ops.aten.fill_.Scalar and args[1] == 0)


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments that an operator writes into."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    given = dict(zip((each.name for each in schema.arguments), args, strict=False)) | kwargs
    written = [
        given.get(each.name)
        for each in schema.arguments
        if each.alias_info is not None and each.alias_info.is_write
    ]
    return [each for each in _tensors(written) if not each.is_meta]
