"""Where weights come from: the stream of ``(name, tensor)`` that a sender publishes."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import numpy as np
import torch

from weightsync.errors import SourceError
from weightsync.manifest import DTYPE_NAMES, Manifest
from weightsync.tensors import Addresses
from weightsync.weight import Piece, Value, Weight, is_collective
from weightsync.words import a_kind

log = logging.getLogger("weightsync")


@dataclass(frozen=True)
class SourceOptions:
    """What the user may say about a source. Patterns are shell-style (``*.gate.*``).

    Attributes:
        dtype: cast floating-point tensors to this dtype while they are copied; None sends each
            as it is. Integers, booleans and complex numbers are never cast.
        rename: called once per name; its result is final.
        manifest: describes a one-shot iterator, which cannot be looked at before it is sent.
        keep_dtype: patterns of names that ``dtype`` leaves alone.
        include, exclude: patterns of the names to send, and of those not to; exclude wins. They
            and ``keep_dtype`` look at names as they are before ``rename``.
        strict: refuse an update in which a tensor cannot be sent, or a pattern fits no name.
            With False such tensors are left out, and logged.
        merge: send a model with PEFT adapters merged. With False the adapters, and what is trained
            with them, are left out: the base is sent.
    """

    dtype: torch.dtype | None = None
    rename: Callable[[str], str] | None = None
    manifest: Manifest | None = None
    keep_dtype: Sequence[str] = ()
    include: Sequence[str] | None = None
    exclude: Sequence[str] = ()
    strict: bool = True
    merge: bool = True

    def __post_init__(self) -> None:
        dtype, rename = self.dtype, self.rename
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise SourceError(f"dtype={dtype!r}: a floating-point torch.dtype was expected")
        if rename is not None and not callable(rename):
            raise SourceError(f"rename={rename!r:.80}: a function from name to name was expected")
        for name in ("strict", "merge"):
            if type(getattr(self, name)) is not bool:
                raise SourceError(f"{name}={getattr(self, name)!r:.80}: True or False")
        if self.keep_dtype and dtype is None:
            raise SourceError("keep_dtype= exempts from dtype=, which was not given")
        for name in ("keep_dtype", "include", "exclude"):
            patterns = getattr(self, name)
            if patterns is not None and (
                isinstance(patterns, str) or not all(isinstance(p, str) for p in patterns)
            ):
                raise SourceError(f"{name}={patterns!r:.80}: a list of patterns was expected")

    def sends(self, name: str) -> bool:
        """Whether a tensor of this name (before ``rename``) is sent at all."""
        if self.include is not None and not fits(name, self.include):
            return False
        return not fits(name, self.exclude)

    def wire_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a tensor of this name (before ``rename``) and dtype is sent."""
        if self.dtype is None or not dtype.is_floating_point or fits(name, self.keep_dtype):
            return dtype
        return self.dtype

    def final(self, name: str) -> str:
        return name if self.rename is None else self.rename(name)

    def check_patterns(self, names: Sequence[str]) -> None:
        """
        Raises:
            SourceError: a pattern fits no name, a typing error most of the time.
        """
        patterns = [*self.keep_dtype, *(self.include or ()), *self.exclude]
        idle = [p for p in patterns if not any(fnmatchcase(name, p) for name in names)]
        if idle and self.strict:
            raise SourceError(
                f"no tensor has a name that fits {', '.join(map(repr, idle))} "
                f"(names look like {', '.join(map(repr, names[:3]))}); strict=False lets it pass"
            )


def fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@dataclass(frozen=True)
class Inventory:
    """One look at a source: what it holds, described, with nothing gathered, merged or copied.

    Attributes:
        values: one per tensor of the manifest, not yet cast: tensors that exist anyway (a
            module's parameters), and weights that are made when they are read. None for a tensor
            that only ``rest`` has.
        addresses: int64, for each tensor where its bytes lie if they are what is sent, byte for
            byte; 0 where it must be copied with a cast, from another device, or be made first.
        rest: what :meth:`stream` iterates instead of reading the weights one after the other.
        ranks: which ranks send it together, by their numbers in the default group; None for all.
        extras: gives the small files, by name, that lie beside the weights in a checkpoint.
    """

    manifest: Manifest
    values: Sequence[Value | None]
    addresses: Addresses
    rest: Callable[[], Iterator[tuple[str, torch.Tensor]]] | None = field(default=None)
    ranks: Collection[int] | None = None
    extras: Callable[[], Mapping[str, bytes]] = field(default=dict)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """``(name, tensor)`` of everything: what exists anyway first, then the stream."""
        for spec, value in zip(self.manifest.tensors, self.values, strict=True):
            if isinstance(value, torch.Tensor):
                yield spec.name, value
        yield from self.stream()

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """``(name, tensor)`` of all values that are no tensors yet, each made when it is asked
        for and valid until the next one is.

        Raises:
            SourceError: a tensor cannot be made; names it.
        """
        if self.rest is not None:
            yield from self.rest()
            return
        for number in self.streamed():
            name, weight = self.manifest.tensors[number].name, self.values[number]
            assert isinstance(weight, Weight)
            yield name, read_weight(name, weight)

    def streamed(self) -> list[int]:
        """The indices, in the manifest, of the tensors that come by :meth:`stream`."""
        return [n for n, value in enumerate(self.values) if not isinstance(value, torch.Tensor)]

    @property
    def collective(self) -> bool:
        """Whether some of it is spread over the ranks of a trainer."""
        return any(map(is_collective, self.values))

    @property
    def of_ranks(self) -> bool:
        """Whether ranks of a trainer hold it together, even if this one has all of it just now."""
        # DeepSpeed leaves small parameters whole, and all of them after some forward passes.
        return self.collective or any(hasattr(value, "ds_id") for value in self.values)

    def gathered(self) -> list[int]:
        """Those of them of which no rank can write its own rows."""
        return [number for number, pieces in self._pieces.items() if pieces is None]

    def pieces(self) -> list[tuple[int, Piece]]:
        """What this rank is to write of the others, with the index of the tensor in the manifest:
        all ranks together write each element once."""
        held = [(n, piece) for n, pieces in self._pieces.items() for piece in pieces or ()]
        return [(n, piece) for n, piece in held if piece.is_ours(self.ranks)]

    @cached_property
    def _pieces(self) -> dict[int, list[Piece] | None]:
        values = ((number, self.values[number]) for number in self.streamed())
        return {n: v.pieces() if isinstance(v, Weight) else None for n, v in values}


class WeightSource(ABC):
    """A set of weights that can be described without moving it, and streamed."""

    walked: bool = True
    """Whether describing it takes a walk through all of its data."""

    @abstractmethod
    def manifest(self) -> Manifest:
        """Names, dtypes (after the cast), shapes and ties.

        Raises:
            SourceError: a tensor cannot be sent; names it.
        """

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of the manifest, in any order, on any device, not yet cast.

        Aliases are left out.
        """

    def inventory(self) -> Inventory:
        """What would be sent now. By default nothing exists as a tensor before it is streamed."""
        manifest = self.manifest()
        nothing = np.zeros(len(manifest.tensors), dtype=np.int64)
        return Inventory(manifest, [None] * len(nothing), nothing, self.tensors)


class Looked(WeightSource):
    """A source that was looked at already: what it holds is settled."""

    walked = False

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory

    def inventory(self) -> Inventory:
        return self._inventory

    def manifest(self) -> Manifest:
        return self._inventory.manifest

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._inventory.tensors()


def read_weight(name: str, weight: Weight) -> torch.Tensor:
    """
    Raises:
        SourceError: it could not be made, or is not what it was said to be.
    """
    try:
        tensor = weight.read()
    except SourceError as error:
        raise SourceError(f"tensor {name!r} cannot be sent: {error}") from error
    return check_sendable(name, tensor)


def as_value(name: str, value: object) -> Value:
    """What is to be sent under a name: the tensor itself, or the weight that it stands for.

    Raises:
        SourceError: it has no bytes of its own that mean what they seem to mean.
    """
    from weightsync.sources import TENSOR_KINDS

    if isinstance(value, Weight):
        return value
    if isinstance(value, torch.Tensor):
        for weight_of in TENSOR_KINDS:
            try:
                weight = weight_of(value)
            except SourceError as error:
                raise SourceError(f"tensor {name!r} cannot be sent: {error}") from None
            if weight is not None:
                return weight
    return check_sendable(name, value)


def check_sendable(name: str, tensor: object) -> torch.Tensor:
    """Refuse what has no bytes of its own that mean what they seem to mean.

    Raises:
        SourceError: with the name and the reason.
    """
    if not isinstance(tensor, torch.Tensor):
        raise SourceError(f"{name!r} is {a_kind(tensor)}, not a tensor")
    reason = unsendable(tensor)
    if reason:
        raise SourceError(f"tensor {name!r} cannot be sent: {reason}")
    return tensor


def unsendable(tensor: torch.Tensor) -> str | None:
    if torch.nn.parameter.is_lazy(tensor):
        return "it is a lazy parameter that was never given a shape"
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        kind = type(tensor).__name__
        return f"{kind} is a tensor subclass that holds its values in another form"
    if tensor.is_meta:
        return "it is on the meta device and holds no values (offloaded or never loaded?)"
    if tensor.is_nested:
        return "it is a nested tensor, which has no single shape"
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}; only dense tensors can be sent"
    if tensor.dtype not in DTYPE_NAMES:
        return f"dtype {tensor.dtype} keeps part of its meaning outside its bytes"
    if tensor.numel() and tensor.untyped_storage().nbytes() == 0:
        return "its storage was freed (a sharded placeholder?)"
    return None


Maker = Callable[[Any, SourceOptions], WeightSource]


def as_source(weights: Any, options: SourceOptions | None = None) -> WeightSource:
    """Choose the source for whatever the user passed.

    Accepts an ``nn.Module``, a ``TensorDict``, a mapping of names to tensors, an iterable of
    ``(name, tensor)`` that starts afresh each time it is iterated, a callable that returns such
    an iterable, a one-shot iterator together with ``manifest=``, or a :class:`WeightSource`.

    Raises:
        SourceError: for anything else, saying what is accepted.
    """
    from weightsync.sources import SOURCES

    options = options or SourceOptions()
    if isinstance(weights, WeightSource):
        if options != SourceOptions():
            raise SourceError(
                f"{a_kind(weights)} says itself what is sent: it takes no dtype=, "
                "rename=, manifest= or patterns"
            )
        return weights
    for accepts, make in SOURCES:
        if accepts(weights):
            return make(weights, options)
    raise SourceError(
        f"{a_kind(weights)} is not a source of weights: pass an nn.Module, a TensorDict, "
        "a mapping of names to tensors, or an iterable of (name, tensor)"
    )
