"""Where weights come from: the stream of ``(name, tensor)`` that a sender publishes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from weightsync.errors import SourceError
from weightsync.manifest import DTYPE_NAMES, Manifest


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

    def wire_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        """The dtype a tensor is sent in."""
        if self.dtype is not None and tensor.dtype.is_floating_point:
            return self.dtype
        return tensor.dtype


class WeightSource(ABC):
    """A set of weights that can be described without moving it, and streamed.

    ``resident`` says whether the tensors exist anyway (a module's parameters): a transport may
    then hold all of them at once. It must let go of the others bucket by bucket.
    """

    resident: bool = False

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
        return weights
    for accepts, make in SOURCES:
        if accepts(weights):
            return make(weights, options)
    raise SourceError(
        f"a {type(weights).__name__} is not a source of weights: pass an nn.Module, a TensorDict, "
        "a mapping of names to tensors, or an iterable of (name, tensor)"
    )
