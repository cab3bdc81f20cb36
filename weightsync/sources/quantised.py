"""Packed parameters: those of bitsandbytes are dequantised, others are refused, none is sent raw.

What bitsandbytes packs into 4 or 8 bits is sent as its own arithmetic unpacks it, under the name
and in the shape that the weight had before, one tensor at a time. The scales that it writes beside
a weight into a ``state_dict`` (``weight.absmax``, ``SCB``, ...) mean nothing without the packed
bytes, and are never sent. A layer that is not quantised yet holds plain floats: they are sent as
they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weightsync.errors import SourceError
from weightsync.sources import sharded, zero
from weightsync.tree import Walk
from weightsync.weight import Value, Weight, is_collective, read


def weight_of(tensor: torch.Tensor) -> Weight | None:
    """The dequantised values of a packed parameter; None if it is none.

    Raises:
        SourceError: it is packed, and what is needed to unpack it is not there.
    """
    if hasattr(tensor, "quant_state"):  # Params4bit
        return _unpacked(tensor, tensor.quant_state, None)
    if hasattr(tensor, "SCB"):  # Int8Params
        return _unpacked(tensor, None, tensor.SCB)
    return None


def dense_weight(module: nn.Module) -> Value:
    """The weight of a layer, as the layer computes with it, for whoever adds something to it.

    For a bitsandbytes layer whose weight is packed: a weight of ``[out_features, in_features]``
    (of an embedding ``[num_embeddings, embedding_dim]``). Its scales are found on the parameter
    or in the layer, where bitsandbytes leaves them after the first forward pass or when the
    parameter was sharded. For every other layer, and one that is not quantised yet: the object
    ``module.weight`` itself, for :func:`~weightsync.source.as_value`.

    The dtype is, for 4 bits, the one that the weight had before it was quantised; for 8 bits
    float32, in which bitsandbytes dequantises: it keeps no record of the dtype before.
    :func:`as_stored` turns what came of it into the checkpoint's layout.

    Raises:
        SourceError: it is packed, and what is needed to unpack it is not there; does not know
            its own name.
    """
    weight: Any = module.weight
    state = getattr(weight, "quant_state", None)
    scales = getattr(weight, "SCB", None)
    if state is None:
        state = getattr(module, "quant_state", None)
    if scales is None:
        scales = getattr(getattr(module, "state", None), "SCB", None)
    unpacked = _unpacked(weight, state, scales, _dense_shape(module))
    return weight if unpacked is None else unpacked


def as_stored(module: nn.Module, value: Value) -> Value:
    """What a layer computes with, the way round in which its checkpoint has it.

    transformers replaces its ``Conv1D`` (GPT-2), whose weights are ``[in, out]``, by
    bitsandbytes layers, whose weights are ``[out, in]``.
    """
    if getattr(getattr(module, "source_cls", None), "__name__", "") != "Conv1D":
        return value
    return Transposed(value) if isinstance(value, Weight) else value.detach().t()


def visit_linear(module: nn.Module, prefix: str, walk: Walk) -> None:
    """A bitsandbytes layer: its weight and bias, without the scales that lie beside them."""
    try:
        walk.add(prefix + "weight", as_stored(module, dense_weight(module)))
    except SourceError as error:
        raise SourceError(f"tensor {prefix + 'weight'!r} cannot be sent: {error}") from None
    for name, value in module._parameters.items():
        if value is not None and name != "weight":
            walk.add(prefix + name, value)
    walk.children(module, prefix)


@dataclass(frozen=True)
class Dequantised(Weight):
    """A packed parameter, unpacked by bitsandbytes when it is read."""

    parameter: torch.Tensor
    packed: Value
    dtype: torch.dtype
    shape: tuple[int, ...]
    unpack: Callable[[torch.Tensor], torch.Tensor]

    @property
    def identity(self) -> Hashable:
        return "dequantised", id(self.parameter)

    @property
    def collective(self) -> bool:
        return is_collective(self.packed)

    def read(self) -> torch.Tensor:
        with torch.no_grad():
            return self.unpack(read(self.packed).detach())


@dataclass(frozen=True)
class Transposed(Weight):
    """A weight the other way round."""

    weight: Weight

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.weight.dtype

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.weight.shape[::-1]

    @property
    def identity(self) -> Hashable | None:
        identity = self.weight.identity
        return None if identity is None else ("transposed", identity)

    @property
    def collective(self) -> bool:
        return self.weight.collective

    def read(self) -> torch.Tensor:
        return self.weight.read().t()


def _unpacked(
    parameter: Any, state: Any, scales: Any, dense: tuple[int, ...] | None = None
) -> Weight | None:
    """A parameter as what its bytes stand for; None if they are plain.

    Args:
        state: what bitsandbytes keeps of a 4-bit parameter.
        scales: of the rows of an 8-bit parameter.
        dense: the shape of its values, where it is known.
    """
    if state is not None and type(state).__name__ != "QuantState":
        raise SourceError(f"its bytes are packed in a way not known here ({type(state).__name__})")
    packed = _whole(parameter)
    if packed.dtype.is_floating_point:
        # Packed bytes may be stored as floats, but never in the shape of the values.
        shape = dense if state is None else tuple(state.shape)
        plain = not getattr(parameter, "bnb_quantized", False)
        if plain if shape is None else tuple(packed.shape) == shape:
            return None
    if state is not None:
        dtype = getattr(state, "original_dtype", state.dtype)
        return Dequantised(parameter, packed, dtype, tuple(state.shape), _FourBits(state))
    if packed.dtype is torch.int8 and scales is not None:
        rows = tuple(packed.shape)
        return Dequantised(parameter, packed, torch.float32, rows, _EightBits(scales))
    raise SourceError(
        f"bitsandbytes packed it into {packed.dtype}, and the scales that unpack it are not there"
        " (pass the module that holds it)"
    )


def _whole(parameter: torch.Tensor) -> Value:
    """A packed parameter's bytes, also where they are sharded over ranks."""
    return zero.weight_of(parameter) or sharded.weight_of(parameter) or parameter


def _dense_shape(module: Any) -> tuple[int, ...] | None:
    """The shape that a layer's weight has when it is not packed."""
    for rows, columns in (("out_features", "in_features"), ("num_embeddings", "embedding_dim")):
        if hasattr(module, rows):
            return getattr(module, rows), getattr(module, columns)
    return None


@dataclass(frozen=True)
class _EightBits:
    scales: torch.Tensor

    def __call__(self, packed: torch.Tensor) -> torch.Tensor:
        from bitsandbytes.functional import int8_vectorwise_dequant

        values: torch.Tensor = int8_vectorwise_dequant(packed, self.scales.to(packed.device))
        return values


@dataclass(frozen=True)
class _FourBits:
    state: Any

    def __call__(self, packed: torch.Tensor) -> torch.Tensor:
        from bitsandbytes.functional import dequantize_4bit

        state = self.state
        if getattr(state, "packing_format_for_cpu", False):
            packed, state = _packed_as_usual(packed, state)
        values = dequantize_4bit(packed, state)
        # What has a single row is taken for transposed, and transposed back.
        return values.t() if packed.shape[0] == 1 else values


def _packed_as_usual(packed: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
    """What a forward pass in ``eval`` mode packed anew, for the kernels of some CPUs.

    The pass rounded the scales to bfloat16, for good: these are what the layer computes with now.
    """
    from bitsandbytes import functional

    state = copy.copy(state)
    scales, shape = state.absmax.t().reshape(-1).float(), state.shape
    state.original_nested = False  # the scales are not to be packed again
    packed, state = functional._convert_weight_packed_for_cpu_inverse(packed, state)
    state.absmax = scales
    return packed, state
