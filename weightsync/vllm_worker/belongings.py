"""What a layer of vLLM's holds: attributes, helpers (kernels, closures), and tensors within them.

vLLM keeps tensors also where neither ``parameters()`` nor ``buffers()`` look: packed copies in a
closure, matrices absorbed into others, workspaces. They are found by walking what hangs on a layer.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

_REGISTERED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")

_CACHES = ("kv_cache",)
"""Attributes that hold what requests leave behind: no weights."""

_FOREIGN = ("vllm.config", "vllm.compilation", "vllm.distributed", "vllm.platforms")
"""Modules whose objects belong to the process, not to a layer."""


def walk(layer: nn.Module, layers: Collection[nn.Module]) -> Iterator[tuple[str, Any]]:
    """Everything that hangs on a layer, by its path, but its parameters, buffers and submodules.

    Args:
        layers: all of the model. Another one that a layer refers to is not its own.
    """
    others = {id(each) for each in layers if not is_method(each)}
    yield from _walk("", layer, others - {id(layer)}, set())


def tensors(layer: nn.Module, layers: Collection[nn.Module]) -> dict[str, torch.Tensor]:
    """The tensors that hang on a layer, by path, but its parameters and buffers."""
    return {path: v for path, v in walk(layer, layers) if isinstance(v, torch.Tensor)}


def numbers(layer: nn.Module, layers: Collection[nn.Module]) -> dict[str, float]:
    """The numbers and flags that hang on a layer, by path."""
    return {
        f"{path}.{name}" if path else str(name): child
        for path, value in walk(layer, layers)
        if not isinstance(value, torch.Tensor)
        for name, child in _children(value)
        if type(child) in (bool, int, float) and name not in _BOOKKEEPING
    }


_BOOKKEEPING = (
    "_already_called_process_weights_after_loading",
    "_do_torchao_reload",
    "_original_do_torchao_reload",
)
"""What vLLM's reload notes on a layer for itself."""


class Memory:
    """A layer as it is now, to be put back: its attributes, its helpers', and their tensors.

    Attributes:
        tensors: what :func:`tensors` found.
    """

    def __init__(self, layer: nn.Module, layers: Collection[nn.Module]) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.values: dict[str, torch.Tensor] = {}
        self._bound: list[tuple[Any, Any]] = []
        for path, value in walk(layer, layers):
            if isinstance(value, torch.Tensor):
                self.tensors[path] = value
            elif isinstance(value, (dict, list)):
                self._remember(value)
            elif _is_helper(value):
                self._remember(vars(value))
                if isinstance(value, nn.Module):
                    for name in _REGISTERED:
                        self._remember(vars(value)[name])

    def _remember(self, content: Any) -> None:
        self._bound.append((content, content.copy()))

    def keep_values(self) -> None:
        """From here on ``restore`` also undoes what is written into ``tensors`` in place."""
        self.values = {path: tensor.detach().clone() for path, tensor in self.tensors.items()}

    def restore(self) -> None:
        for live, former in self._bound:
            live.clear()
            if isinstance(live, list):
                live.extend(former)
            else:
                live.update(former)
        for path, value in self.values.items():
            self.tensors[path].data.copy_(value)


def _walk(path: str, value: Any, others: Collection[int], seen: set[int]) -> Iterator[Any]:
    if id(value) in others or id(value) in seen or _is_plain(value):
        return
    seen.add(id(value))
    yield path, value
    if not isinstance(value, torch.Tensor):
        for name, child in _children(value):
            yield from _walk(f"{path}.{name}" if path else str(name), child, others, seen)


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from list(value.items())
    elif isinstance(value, (list, tuple)):
        yield from enumerate(list(value))
    elif isinstance(value, functools.partial):
        yield from enumerate(value.args)
        yield from value.keywords.items()
    elif isinstance(value, types.MethodType):
        yield "self", value.__self__
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # not bound yet
                continue
        yield from enumerate(value.__defaults__ or ())
    elif _is_helper(value):
        held = vars(value)
        if isinstance(value, nn.Module):
            yield from [(n, m) for n, m in held["_modules"].items() if is_method(m)]
        yield from [(n, v) for n, v in held.items() if n not in _SKIPPED and _OURS not in n]


_SKIPPED = {*_REGISTERED, *_CACHES}

_OURS = "_weightsync_"
"""Attributes that ``compat`` notes on a model in reload."""


def _is_helper(value: Any) -> bool:
    """Whether it is an object of vLLM's that may belong to a layer."""
    home = type(value).__module__
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, type)
        and (home.startswith("vllm.") or isinstance(value, nn.Module))
        and not home.startswith(_FOREIGN)
    )


def is_method(value: Any) -> bool:
    """Whether it says how a layer computes: sometimes a module itself, and of that layer alone."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    return isinstance(value, QuantizeMethodBase)


def _is_plain(value: Any) -> bool:
    plain = (bool, int, float, str, bytes, type, enum.Enum, torch.dtype)
    return value is None or isinstance(value, plain)
