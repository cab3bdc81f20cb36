"""Compares what a model in vLLM holds with a version, bit for bit, and changes nothing.

A reload without its end: each layer is loaded and processed as in an update, and where vLLM would
copy the outcome into the layer's own tensors, the two are compared and the layer is put back. So
fused, sharded, repacked, tied and quantised weights are compared in the form that kernels read.

A kernel that keeps the weights where nobody can look (oneDNN's) is asked what it makes of the
identity matrix: all bits but the sign of a zero, on which no result depends.

Not compared is what no version holds: rotary tables, expert maps, default scales.

Depends on a vLLM release, like ``compat``: it takes the place of three functions of the reload.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from weightsync.vllm_worker import compat
from weightsync.vllm_worker.belongings import Memory, tensors, walk

_ROWS = 256
"""Rows of the identity matrix that a kernel is asked at a time."""

_NAMES = 6
"""Checkpoint names that are said of one tensor of the engine's."""

Tensors = Mapping[str, torch.Tensor]


@dataclass
class Findings:
    """What one worker found.

    Attributes:
        compared: checkpoint names whose values were compared, where this worker has them.
        different: tensors of the engine's that differ, with what was loaded into them.
        unchecked: those that nothing can be said of.
    """

    compared: set[str] = field(default_factory=set)
    different: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)


def compare(
    model: nn.Module, model_config: Any, weights: Iterable[tuple[str, torch.Tensor]]
) -> Findings:
    """To be used between two steps of the model.

    Raises:
        Exception: vLLM does not load these weights. The model is as before in any case.
    """
    return _Comparison(model, model_config).run(weights)


class _Comparison:
    def __init__(self, model: nn.Module, model_config: Any) -> None:
        self._model, self._config = model, model_config
        self._names = {layer: name for name, layer in model.named_modules()}
        self._memories = {layer: Memory(layer, self._names) for layer in self._names}
        self._unguarded: dict[int, compat.Unguarded] = {}
        self._sources: dict[tuple[nn.Module, str], list[str]] = {}
        self._current = ""
        self._kept: dict[str, torch.Tensor] = {}
        self._probe: torch.Tensor | None = None
        self._any = False
        self._found = Findings()

    def run(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Findings:
        try:
            with self._instead_of_the_reload():
                compat.begin_reload(self._model)
                self._watch()
                compat.load(self._model, self._noting(weights), self._wrote)
                for layer in compat.finish_layers(self._model, self._config):
                    self._begin(layer)
                    compat.process(layer)
                    self._compare(layer, self._kept, _registered(layer))
                    self._end(layer)
                self._compare_unguarded()
        finally:
            compat.abandon_reload(self._model)
            for memory in self._memories.values():
                memory.restore()
        return self._found

    @contextmanager
    def _instead_of_the_reload(self) -> Iterator[None]:
        from vllm.model_executor.model_loader.reload import layerwise

        process = layerwise._layerwise_process
        finalize = layerwise._finalize_attention_layer

        def dry_process(layer: nn.Module, info: Any) -> None:
            self._begin(layer)
            process(layer, info)
            self._end(layer)

        def dry_finalize(layer: nn.Module, info: Any, model_config: Any) -> None:
            self._begin(layer, info)
            finalize(layer, info, model_config)
            self._compare(layer, self._kept, _registered(layer))
            self._end(layer)

        def dry_copy(layer: nn.Module, info: Any) -> None:
            parameters, buffers = info.kernel_tensors
            self._compare(layer, parameters | buffers, _registered(layer))
            layerwise._place_kernel_tensors(layer, info)

        with (
            patch.object(layerwise, "_layerwise_process", dry_process),
            patch.object(layerwise, "_finalize_attention_layer", dry_finalize),
            patch.object(layerwise, "_copy_and_restore_kernel_tensors", dry_copy),
        ):
            yield

    # ------------------------------------------------------------ which name goes where

    def _watch(self) -> None:
        from vllm.model_executor.model_loader.reload import layerwise

        self._unguarded = {id(each.tensor): each for each in compat.unguarded(self._model)}
        for layer in self._names:
            loads = layerwise.get_layerwise_info(layer)
            loads.loaded_weights = _Loads(lambda name, layer=layer: self._note(layer, name))

    def _noting(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            self._current = name
            yield name, tensor

    def _note(self, layer: nn.Module, parameter: str) -> None:
        names = self._sources.setdefault((layer, parameter), [])
        if self._current not in names:
            names.append(self._current)

    def _wrote(self, written: compat.Unguarded) -> None:
        self._note(*self._place_of(written))

    def _place_of(self, each: compat.Unguarded) -> tuple[nn.Module, str]:
        layer, _, name = each.name.rpartition(".")
        return self._model.get_submodule(layer), name

    # ------------------------------------------------------------ one layer after the other

    def _begin(self, layer: nn.Module, info: Any = None) -> None:
        """Before a layer is processed: what processing may write in place is kept."""
        own = (
            _registered(layer) if info is None else info.kernel_tensors[0] | info.kernel_tensors[1]
        )
        self._kept = {name: each.detach().clone() for name, each in own.items() if not each.is_meta}
        self._memories[layer].keep_values()
        self._probe, self._any = None, False

    def _compare(self, layer: nn.Module, own: Tensors, fresh: Tensors) -> None:
        """A layer's own tensors with those that processing has just made."""
        for name, tensor in fresh.items():
            held = own.get(name)
            if held is None:
                continue
            if id(held) in self._unguarded:
                held = self._unguarded[id(held)].value
            self._any = self._any or bool(tensor.numel())
            if not _same_bits(held, tensor):
                self._differs(layer, name)
        memory = self._memories[layer]
        for path, tensor in tensors(layer, self._names).items():
            former = memory.values.get(path)
            if former is None or _is_hidden(path):
                continue
            self._any = True
            if not _same_bits(former, tensor):
                self._differs(layer, path)
        self._probe = self._ask_kernel(layer)

    def _end(self, layer: nn.Module) -> None:
        """Put a layer back, and ask the kernel that it has."""
        fresh, any_compared = self._probe, self._any
        self._memories[layer].restore()
        for name, tensor in _registered(layer).items():
            if id(tensor) in self._unguarded:
                self._unguarded[id(tensor)].restore()
            elif name in self._kept and not tensor.is_meta:
                tensor.data.copy_(self._kept[name])
        if fresh is not None:
            held = self._ask_kernel(layer)
            if held is None or not _same_bits(held, fresh):
                self._differs(layer, "weight")
            elif fresh.isnan().any():  # it hides its neighbours
                self._found.unchecked.append(f"{self._name(layer, 'weight')}: holds NaN")
        if any_compared or fresh is not None:
            self._found.compared.update(*(self._of(layer)))

    def _compare_unguarded(self) -> None:
        """Those that no layer waited for."""
        for each in self._unguarded.values():
            sources = self._sources.get(self._place_of(each))
            if sources and not self._found.compared.issuperset(sources):
                self._found.compared.update(sources)
                if not _same_bits(each.value, each.tensor):
                    self._differs(*self._place_of(each))

    def _ask_kernel(self, layer: nn.Module) -> torch.Tensor | None:
        """What a layer makes of the identity matrix, if its kernel hides its weights."""
        hiding = [each for _, each in walk(layer, self._names) if hasattr(each, "handler_tensor")]
        if not hiding:
            return None
        method: Any = layer.quant_method
        identity = torch.eye(hiding[0].k, dtype=self._config.dtype)
        return torch.cat([method.apply(layer, rows) for rows in torch.split(identity, _ROWS)])

    # ------------------------------------------------------------ in words

    def _of(self, layer: nn.Module) -> list[list[str]]:
        return [names for (each, _), names in self._sources.items() if each is layer]

    def _name(self, layer: nn.Module, tensor: str) -> str:
        return f"{self._names[layer]}.{tensor}"

    def _differs(self, layer: nn.Module, tensor: str) -> None:
        """Named as the engine names it, and as the checkpoint names what it was made of."""
        made_of = self._sources.get((layer, tensor)) or [
            n for names in self._of(layer) for n in names
        ]
        said = made_of[:_NAMES] + [f"{len(made_of) - _NAMES} more"] * (len(made_of) > _NAMES)
        words = self._name(layer, tensor) + (f" (from {', '.join(said)})" if said else "")
        if words not in self._found.different:
            self._found.different.append(words)


class _Loads(list[Any]):
    """vLLM's list of what was loaded into a layer, which says so."""

    def __init__(self, note: Any) -> None:
        super().__init__()
        self._note = note

    def append(self, loaded: Any) -> None:
        self._note(loaded[0])
        super().append(loaded)


def _registered(layer: nn.Module) -> dict[str, torch.Tensor]:
    both = layer._parameters | layer._buffers
    return {name: tensor for name, tensor in both.items() if tensor is not None}


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    flat = [each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
    return torch.equal(*flat)


def _is_hidden(path: str) -> bool:
    """Whether a tensor is only the address of what a kernel keeps to itself."""
    return path.endswith("handler_tensor")
