"""Packed parameters: those of bitsandbytes are dequantised, others are refused, none is sent raw.

What bitsandbytes packs into 4 or 8 bits is sent as its own arithmetic unpacks it, under the name
and in the shape that the weight had before, one tensor at a time. The scales that it writes beside
a weight into a ``state_dict`` (``weight.absmax``, ``SCB``, ...) mean nothing without the packed
bytes, and are never sent. A layer that is not quantised yet holds plain floats: they are sent as
they are.

Others (GPTQ, AWQ, HQQ, compressed-tensors, fp8, ...) each pack in a way of their own: their layers
are refused with all that lies beside the packed bytes, under names that only an engine with the
same packing would know. They are met in two ways, never by the look of a name: a layer is of a
library that packs, or it holds bytes that are no floats in a transformers model whose quantizer
packs. So what a quantizer left as it was, or unpacked while it was loaded, is sent.
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
from weightsync.words import a_kind


def weight_of(tensor: torch.Tensor) -> Weight | None:
    """The dequantised values of a packed parameter; None if it is none.

    Raises:
        SourceError: it is packed, and what is needed to unpack it is not there.
    """
    if isinstance(tensor, _Refused):
        raise SourceError(tensor.reason)
    if hasattr(tensor, "quant_state"):  # Params4bit
        return _unpacked(tensor, tensor.quant_state, None)
    if hasattr(tensor, "SCB"):  # Int8Params
        return _unpacked(tensor, None, tensor.SCB)
    return None


def dense_weight(module: nn.Module, weight: Any = None) -> Value:
    """The weight of a layer, as the layer computes with it, for whoever adds something to it.

    For a bitsandbytes layer whose weight is packed: a weight of ``[out_features, in_features]``
    (of an embedding ``[num_embeddings, embedding_dim]``). Its scales are found on the parameter
    or in the layer, where bitsandbytes leaves them after the first forward pass or when the
    parameter was sharded. For every other layer, and one that is not quantised yet: the object
    ``module.weight`` itself, for :func:`~weightsync.source.as_value`.

    The dtype is, for 4 bits, the one that the weight had before it was quantised; for 8 bits
    float32, in which bitsandbytes dequantises: it keeps no record of the dtype before.
    :func:`as_stored` turns what came of it into the checkpoint's layout.

    Args:
        weight: what a walk takes for the layer's parameter, where that is not ``module.weight``
            (FSDP holds it in a flat one).

    Raises:
        SourceError: it is packed in another way, or what is needed to unpack it is not there;
            does not know its own name.
    """
    if weight is None:
        weight = getattr(module, "weight", None)
    if not isinstance(weight, (torch.Tensor, Weight)):
        raise SourceError(f"{a_kind(module)} holds no weight that can be read")
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
    parameters = walk.parameters(module)
    weight = parameters.pop("weight", None)
    try:
        walk.add(prefix + "weight", as_stored(module, dense_weight(module, weight)))
    except SourceError as error:
        walk.add(prefix + "weight", _refused(weight, str(error)))
    for name, value in parameters.items():
        walk.add(prefix + name, value)
    walk.children(module, prefix)


def visit_parametrization(module: nn.Module, prefix: str, walk: Walk) -> None:
    """What bitsandbytes puts around a parameter outside of its own layers (experts)."""
    # <owner>.parametrizations.<name>.0. beside <owner>.parametrizations.<name>.original
    beside = prefix.removesuffix(".").rpartition(".")[0]
    owner, _, name = beside.rpartition("parametrizations.")
    packed = walk.found.pop(f"{beside}.original")
    walk.add(owner + name, _unpacked(packed, module.quant_state, None) or packed)


def visit_pretrained(module: nn.Module, prefix: str, walk: Walk) -> None:
    """A transformers model: what its quantizer packed, and nobody here unpacks, is refused."""
    method = _quantizer(module)
    inside = walk if method is None else Walk(walk)
    inside.own(module, prefix)
    inside.children(module, prefix)
    if method is None:
        return
    packed = {_owner(name) for name, value in inside.found.items() if _is_packed(value)}
    for name, value in inside.found.items():
        refuse = _owner(name) in packed
        walk.add(name, _refused(value, _PACKED.format(method)) if refuse else value)


def visit_packed_layer(module: nn.Module, prefix: str, walk: Walk) -> None:
    """A layer of a library that packs weights in a way of its own: all it holds is refused."""
    inside = Walk(walk)
    inside.own(module, prefix)
    for name, value in inside.found.items():
        walk.add(name, _refused(value, _PACKED.format(f"{a_kind(module)}")))
    walk.children(module, prefix)


@dataclass(frozen=True, eq=False)
class Dequantised(Weight):
    """A packed parameter, unpacked by bitsandbytes when it is read."""

    parameter: Value
    packed: Value
    dtype: torch.dtype
    shape: tuple[int, ...]
    unpack: Callable[[torch.Tensor], torch.Tensor]

    @property
    def identity(self) -> Hashable | None:
        if not isinstance(self.packed, Weight):
            return "dequantised", id(self.parameter)
        identity = self.packed.identity
        return None if identity is None else ("dequantised", identity)

    @property
    def collective(self) -> bool:
        return is_collective(self.packed)

    def read(self) -> torch.Tensor:
        with torch.no_grad():
            return self.unpack(read(self.packed).detach())


@dataclass(frozen=True, eq=False)
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
    if isinstance(packed, torch.Tensor) and packed.is_meta:
        raise SourceError("it is on the meta device and holds no values (offloaded?)")
    if packed.dtype in _PLAIN_DTYPES:
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
        f"it is packed into {packed.dtype}, and the scales that unpack it are not there (pass the "
        "module that holds it)"
    )


class _Refused(torch.Tensor):
    """A tensor that is not to be sent. It is refused by name, as any other, if it would be."""

    reason: str


_PACKED = (
    "{} packed it or what lies beside it; dequantise the model first (its dequantize(), or "
    "dequantize=True in its configuration), leave it out by exclude=, or pass state_dict() where "
    "the engine packs in the same way"
)


def _refused(value: Any, reason: str) -> Any:
    if not isinstance(value, torch.Tensor) or isinstance(value, _Refused):
        return value
    # A subclass that has a form of its own (a DTensor) takes no other class: its name is enough.
    own_form = type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    refused = (torch.empty(0) if own_form else value.detach()).as_subclass(_Refused)
    refused.reason = reason
    return refused


_PLAIN_DTYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.complex128, torch.complex64, torch.complex32),
    *(torch.int64, torch.bool),  # counters and masks: nobody packs into these
}


def _is_packed(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype not in _PLAIN_DTYPES


def _quantizer(model: Any) -> str | None:
    """The method by which transformers quantised a model; None if it did not."""
    config = getattr(getattr(model, "hf_quantizer", None), "quantization_config", None)
    method = getattr(config, "quant_method", None)
    return None if method is None else str(getattr(method, "value", method))


def _owner(name: str) -> str:
    """The name of the module that a tensor belongs to."""
    return name.rpartition(".")[0]


def _whole(parameter: Value) -> Value:
    """A packed parameter's bytes, also where they are sharded over ranks."""
    if isinstance(parameter, Weight):
        return parameter
    return zero.weight_of(parameter) or sharded.weight_of(parameter) or parameter


def _dense_shape(module: Any) -> tuple[int, ...] | None:
    """The shape that the weight of a bitsandbytes layer has when it is not packed."""
    if not any(base.__module__ == "bitsandbytes.nn.modules" for base in type(module).__mro__):
        return None
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    return module.out_features, module.in_features


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
    scales = state.absmax.t().reshape(-1).float()
    state.original_nested = False  # the scales are not to be packed again
    packed, state = functional._convert_weight_packed_for_cpu_inverse(packed, state)
    state.absmax = scales
    return packed, state
