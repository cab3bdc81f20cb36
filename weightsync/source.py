"""Where weights come from: the stream of ``(name, tensor)`` that a sender publishes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from weightsync.errors import SourceError
from weightsync.manifest import DTYPE_NAMES, Manifest
from weightsync.tensors import Addresses


@dataclass(frozen=True)
class SourceOptions:
    """What the user may say about a source.

    Attributes:
        dtype: cast floating-point tensors to this dtype while they are copied; None sends each
            as it is. Integers, booleans and complex numbers are never cast.
        rename: called once per name; its result is final.
        manifest: describes a one-shot iterator, which cannot be looked at before it is sent.
    """

    dtype: torch.dtype | None = None
    rename: Callable[[str], str] | None = None
    manifest: Manifest | None = None

    def __post_init__(self) -> None:
        if self.dtype is None:
            return
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            raise SourceError(f"dtype={self.dtype!r}: a floating-point torch.dtype was expected")

    def wire_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        """The dtype a tensor is sent in."""
        if self.dtype is not None and tensor.dtype.is_floating_point:
            return self.dtype
        return tensor.dtype


@dataclass(frozen=True)
class Inventory:
    """Tensors that exist anyway (a module's parameters), all at once.

    Attributes:
        tensors: in the manifest's order, aliases left out, not yet cast.
        addresses: int64, for each tensor where its bytes lie if they are what is sent, byte for
            byte; 0 where it must be copied with a cast, from another device, or not at all.
    """

    manifest: Manifest
    tensors: list[torch.Tensor]
    addresses: Addresses


class WeightSource(ABC):
    """A set of weights that can be described without moving it, and streamed."""

    def inventory(self) -> Inventory | None:
        """All tensors at once, if they exist anyway. None: a transport streams them one by
        one and lets go of each."""
        return None

    @abstractmethod
    def manifest(self) -> Manifest:
        """Names, dtypes (after the cast), shapes and ties, without data moving.

        Raises:
            SourceError: a tensor cannot be sent; names it.
        """

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of the manifest, in any order, on any device, not yet cast.

        Aliases are left out.
        """


def check_sendable(name: str, tensor: object) -> torch.Tensor:
    """Refuse what has no bytes of its own that mean what they seem to mean.

    Raises:
        SourceError: with the name and the reason.
    """
    if not isinstance(tensor, torch.Tensor):
        raise SourceError(f"{name!r} is a {type(tensor).__name__}, not a tensor")
    reason = _unsendable(tensor)
    if reason:
        raise SourceError(f"tensor {name!r} cannot be sent: {reason}")
    return tensor


def _unsendable(tensor: torch.Tensor) -> str | None:
    kind = type(tensor).__name__
    if torch.nn.parameter.is_lazy(tensor):
        return "it is a lazy parameter that was never given a shape"
    if hasattr(tensor, "ds_id") and getattr(tensor, "ds_status", None) is not None:
        return "it is a ZeRO-3 placeholder, whose values live in shards on other ranks"
    if hasattr(tensor, "quant_state") or kind in ("Params4bit", "Int8Params"):
        return f"it is a quantised parameter ({kind}) whose bytes are packed"
    if hasattr(tensor, "full_tensor"):
        return "it is a DTensor, sharded over ranks; gather it first"
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
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
                f"a {type(weights).__name__} says itself what is sent: it takes no dtype=, "
                "rename= or manifest="
            )
        return weights
    for accepts, make in SOURCES:
        if accepts(weights):
            return make(weights, options)
    raise SourceError(
        f"a {type(weights).__name__} is not a source of weights: pass an nn.Module, a TensorDict, "
        "a mapping of names to tensors, or an iterable of (name, tensor)"
    )
