"""Compares what a model in vLLM holds with a version, bit for bit, and changes nothing.

A reload without its end: each layer is loaded and processed as in an update, and where vLLM would
copy the outcome into the layer's own tensors, the two are compared and the layer is put back. So
fused, sharded, repacked, tied and quantised weights are compared in the form that kernels read.

A kernel that keeps the weights where nobody can look (oneDNN's) is asked what it makes of the
identity matrix: all bits but the sign of a zero, on which no result depends.

Not compared is what no version holds: rotary tables, expert maps, default scales.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from weightsync.vllm_worker import compat
from weightsync.vllm_worker.belongings import walk
from weightsync.vllm_worker.dry_reload import (
    DryReload,
    Tensors,
    is_hidden,
    own_tensors,
    registered,
    same_bits,
)

_ROWS = 256
"""Rows of the identity matrix that a kernel is asked at a time."""

_NAMES = 6
"""Checkpoint names that are said of one tensor of the engine's."""


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
    comparison = _Comparison(model, model_config)
    comparison.run(weights)
    return comparison.found


class _Comparison(DryReload):
    def __init__(self, model: nn.Module, model_config: Any) -> None:
        super().__init__(model, model_config)
        self._sources: dict[tuple[nn.Module, str], list[str]] = {}
        self._current = ""
        self._probe: torch.Tensor | None = None
        self._any = False
        self.found = Findings()

    # ------------------------------------------------------------ which name goes where

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        compat.load(self.model, self._noting(weights), self._wrote)

    def loads(self, layer: nn.Module) -> list[Any]:
        return _Loads(lambda name: self._note(layer, name))

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
        self._note(*self.place_of(written))

    # ------------------------------------------------------------ one layer after the other

    def begun(self, layer: nn.Module) -> None:
        self._probe, self._any = None, False

    def processed(self, layer: nn.Module, info: Any) -> None:
        self._compare(layer, own_tensors(info))

    def attended(self, layer: nn.Module, info: Any) -> None:
        self._compare(layer, self.kept)

    def tied(self, layer: nn.Module) -> None:
        self._compare(layer, self.kept)

    def _compare(self, layer: nn.Module, own: Tensors) -> None:
        """A layer's own tensors with those that processing has just made."""
        for name, tensor in registered(layer).items():
            held = own.get(name)
            if held is None:
                continue
            if id(held) in self.unguarded:
                held = self.unguarded[id(held)].value
            self._any = self._any or bool(tensor.numel())
            if not same_bits(held, tensor):
                self._differs(layer, name)
        memory = self.memories[layer]
        for path, tensor in self.hung_on(layer).items():
            former = memory.values.get(path)
            if former is None or is_hidden(path):
                continue
            self._any = True
            if not same_bits(former, tensor):
                self._differs(layer, path)
        self._probe = self._ask_kernel(layer)

    def put_back(self, layer: nn.Module) -> None:
        """Ask the kernel that the layer has."""
        fresh = self._probe
        if fresh is not None:
            held = self._ask_kernel(layer)
            if held is None or not same_bits(held, fresh):
                self._differs(layer, "weight")
            elif fresh.isnan().any():  # it hides its neighbours
                self.found.unchecked.append(f"{self._name(layer, 'weight')}: holds NaN")
        if self._any or fresh is not None:
            self.found.compared.update(*(self._of(layer)))

    def finished(self) -> None:
        """Unguarded tensors that no layer waited for."""
        for each in self.unguarded.values():
            sources = self._sources.get(self.place_of(each))
            if sources and not self.found.compared.issuperset(sources):
                self.found.compared.update(sources)
                if not same_bits(each.value, each.tensor):
                    self._differs(*self.place_of(each))

    def _ask_kernel(self, layer: nn.Module) -> torch.Tensor | None:
        """What a layer makes of the identity matrix, if its kernel hides its weights."""
        hiding = [each for _, each in walk(layer, self.names) if hasattr(each, "handler_tensor")]
        if not hiding:
            return None
        method: Any = layer.quant_method
        identity = torch.eye(hiding[0].k, dtype=self.config.dtype)
        return torch.cat([method.apply(layer, rows) for rows in torch.split(identity, _ROWS)])

    # ------------------------------------------------------------ in words

    def _of(self, layer: nn.Module) -> list[list[str]]:
        return [names for (each, _), names in self._sources.items() if each is layer]

    def _name(self, layer: nn.Module, tensor: str) -> str:
        return f"{self.names[layer]}.{tensor}"

    def _differs(self, layer: nn.Module, tensor: str) -> None:
        """Named as the engine names it, and as the checkpoint names what it was made of."""
        made_of = self._sources.get((layer, tensor)) or [
            n for names in self._of(layer) for n in names
        ]
        said = made_of[:_NAMES] + [f"{len(made_of) - _NAMES} more"] * (len(made_of) > _NAMES)
        words = self._name(layer, tensor) + (f" (from {', '.join(said)})" if said else "")
        if words not in self.found.different:
            self.found.different.append(words)


class _Loads(list[Any]):
    """vLLM's list of what was loaded into a layer, which says so."""

    def __init__(self, note: Any) -> None:
        super().__init__()
        self._note = note

    def append(self, loaded: Any) -> None:
        self._note(loaded[0])
        super().append(loaded)
