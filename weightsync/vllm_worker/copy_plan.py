"""Which bytes of a version go where in a model of vLLM's: found out once, proven, and then used in
the place of the reload, which costs far more than the copies that it ends in.

A dry reload of stand-ins for the weights is watched. A layer is planned only if the copies that
were seen, and nothing else, turn every tensor it holds into what the reload makes of it, bit for
bit. All others fall back to the reload, and it is said why: weights that are repacked, quantised,
computed, or that something else is derived from. When in doubt a layer falls back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import nn

from weightsync.errors import EngineError
from weightsync.manifest import Manifest
from weightsync.tensors import Addresses, Facts
from weightsync.vllm_worker.planning import Outcome, Planner
from weightsync.vllm_worker.runs import Geometry

_IS_META = attrgetter("is_meta")

_SHORTEST = 64
"""Bytes of a run, below which it is not worth a row of its own."""


@dataclass(frozen=True)
class Conversion:
    """A copy that casts, or whose runs are many and short.

    Attributes:
        tensor: its name in the manifest. number: its index there.
        out_of: what of it is copied.
        into: where to, a view of the engine's tensor.
    """

    tensor: str
    number: int
    out_of: Geometry
    into: torch.Tensor

    def apply(self, tensor: torch.Tensor) -> None:
        """
        Args:
            tensor: contiguous, of the manifest's dtype and shape; on any device.
        """
        self.into.copy_(self.out_of.view(tensor))


@dataclass(frozen=True, eq=False)
class CopyPlan:
    """What an update consists of; one per model and manifest.

    Attributes:
        fingerprint: of the manifest.
        tensor, offset, into, length: int64, one entry per row: ``length`` bytes, from ``offset``
            on in the manifest's tensor number ``tensor``, go to the address ``into``. Ascending
            in ``into``; rows do not overlap.
        conversions: the copies that are no copies of bytes.
        fallback: layers that need the reload, and why.
        reloaded: the names that those are loaded from, aliases too.
        nbytes: how many are written by rows and conversions.
        share: which part that is, from 0 to 1, of the bytes that an update writes.
    """

    fingerprint: str
    tensor: Addresses
    offset: Addresses
    into: Addresses
    length: Addresses
    conversions: tuple[Conversion, ...]
    fallback: Mapping[str, str]
    reloaded: tuple[str, ...]
    nbytes: int
    share: float
    _sizes: Addresses
    _model: nn.Module
    _links: tuple[tuple[nn.Module, str, nn.Module], ...]
    _places: tuple[tuple[nn.Module, str], ...]
    _facts: Facts

    def holds(self, model: nn.Module) -> bool:
        """Whether every tensor that is written is still where and what it was."""
        # Asked at every update, between two steps: so the way to each layer is followed, and not
        # all of the model walked.
        linked = (parent._modules.get(name) is layer for parent, name, layer in self._links)
        if model is not self._model or not all(linked):
            return False
        now = []
        for layer, name in self._places:
            parameter = layer._parameters.get(name)
            tensor = layer._buffers.get(name) if parameter is None else parameter
            if tensor is None:
                return False
            now.append(tensor)
        # Parameters of vLLM's are a class whose every attribute is asked for in Python otherwise.
        with torch._C.DisableTorchFunctionSubclass():
            return not any(map(_IS_META, now)) and Facts.of(now) == self._facts

    def needed(self) -> tuple[Addresses, Addresses, Addresses]:
        """The bytes that rows and conversions read: numbers of tensors, offsets, lengths.

        Sorted, and merged where they touch.
        """
        whole = np.array(sorted({each.number for each in self.conversions}), dtype=np.int64)
        tensor = np.concatenate([self.tensor, whole])
        begin = np.concatenate([self.offset, np.zeros_like(whole)])
        end = begin + np.concatenate([self.length, self._sizes[whole]])
        order = np.lexsort((begin, tensor))
        tensor, begin, end = tensor[order], begin[order], end[order]
        # Tensors apart, so that the furthest end so far is that of the same tensor.
        apart = tensor * (int(self._sizes.max(initial=0)) + 1)
        furthest = np.maximum.accumulate(end + apart)
        first = np.ones(len(tensor), dtype=bool)
        first[1:] = (begin + apart)[1:] > furthest[:-1]
        first[1:] |= tensor[1:] != tensor[:-1]
        last = np.append(first[1:], True)[: len(first)]
        return tensor[first], begin[first], (furthest - apart)[last] - begin[first]


def make(
    model: nn.Module,
    model_config: Any,
    manifest: Manifest,
    stream: Iterable[tuple[str, torch.Tensor]],
) -> CopyPlan:
    """Find out how a model is loaded. Between two steps of it, and nothing of it changes.

    Args:
        model: as an ordinary reload left it. Padding that a reload has yet to fill with zeros
            makes a layer fall back.
        stream: what an update would load, complete. Only shapes and dtypes matter, but for
            integers.

    Raises:
        EngineError: the model does not load weights like these, or not in a way that can be
            watched. The reload is what remains.
    """
    try:
        planner = Planner(model, model_config, manifest)
        planner.run(stream)
        return _written_down(model, manifest, planner.outcome())
    except Exception as error:
        words = f"{type(error).__name__}: {error!s:.500}"
        raise EngineError(f"no copy plan of this model: {words}") from error


def _written_down(model: nn.Module, manifest: Manifest, outcome: Outcome) -> CopyPlan:
    conversions: list[Conversion] = []
    rows: list[tuple[Addresses, ...]] = []
    for copy in outcome.copies:
        size = copy.tensor.dtype.itemsize
        many = copy.runs.count > 1 and copy.runs.length * size < _SHORTEST
        if copy.casts or many:
            name = manifest.tensors[copy.source.number].name
            into = copy.into.view(copy.tensor)
            conversions.append(Conversion(name, copy.source.number, copy.out_of, into))
        else:
            into_begin, begin = copy.runs.rows()
            rows.append(
                (
                    np.full_like(begin, copy.source.number),
                    begin * size,
                    into_begin * size + copy.tensor.data_ptr(),
                    np.full_like(begin, copy.runs.length * size),
                )
            )
    tensor, offset, into_all, length = _merged(rows)
    nbytes = int(length.sum()) + sum(each.into.nbytes for each in conversions)
    places = {(copy.layer, copy.name): copy.tensor for copy in outcome.copies}
    return CopyPlan(
        manifest.fingerprint,
        tensor,
        offset,
        into_all,
        length,
        tuple(conversions),
        dict(outcome.fallback),
        outcome.reloaded,
        nbytes,
        nbytes / max(1, nbytes + outcome.nbytes_reloaded),
        np.array([spec.nbytes for spec in manifest.tensors], dtype=np.int64),
        model,
        tuple(_links(model, {layer for layer, _ in places})),
        tuple(places),
        Facts.of(list(places.values())),
    )


def _links(
    model: nn.Module, layers: Collection[nn.Module]
) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """The steps from a model to some of its layers, each as parent, name and child, once."""
    found = dict(model.named_modules())
    wanted = [path for path, layer in found.items() if layer in layers and path]
    on_the_way: set[str] = set()
    for path in wanted:
        while path and path not in on_the_way:
            on_the_way.add(path)
            path = path.rpartition(".")[0]
    for path in sorted(on_the_way):
        parent, _, name = path.rpartition(".")
        yield found[parent], name, found[path]


def _merged(rows: list[tuple[Addresses, ...]]) -> tuple[Addresses, ...]:
    """Sorted by destination, and neighbours there that are neighbours in one tensor made one."""
    if not rows:
        return tuple(np.zeros(0, dtype=np.int64) for _ in range(4))
    tensor, offset, into, length = (np.concatenate(column) for column in zip(*rows, strict=True))
    order = np.argsort(into, kind="stable")
    tensor, offset, into, length = (each[order] for each in (tensor, offset, into, length))
    first = np.ones(len(into), dtype=bool)
    first[1:] = (
        (tensor[1:] != tensor[:-1])
        | (into[1:] != into[:-1] + length[:-1])
        | (offset[1:] != offset[:-1] + length[:-1])
    )
    at = np.flatnonzero(first)
    return tensor[at], offset[at], into[at], np.add.reduceat(length, at)
