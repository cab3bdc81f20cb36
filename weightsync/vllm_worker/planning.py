"""Watches a dry reload of stand-ins, and finds the layers whose loading is nothing but copies.

A layer is planned if the copies that were seen turn every tensor it holds into what the reload
makes of it, bit for bit, and nothing else hangs on its weights. When in doubt it falls back.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from weightsync.errors import EngineError
from weightsync.manifest import Manifest
from weightsync.vllm_worker import compat
from weightsync.vllm_worker.belongings import is_method, numbers, walk
from weightsync.vllm_worker.dry_reload import (
    DryReload,
    Tensors,
    is_hidden,
    own_tensors,
    registered,
    same_bits,
)
from weightsync.vllm_worker.runs import Geometry, Runs
from weightsync.vllm_worker.tracing import (
    Copies,
    Lineage,
    Piece,
    Source,
    Sources,
    has_stand_in,
    stand_in,
    storage_of,
)

_MANY = 65536
"""Runs, above which they are not sorted to see whether they overlap."""

_CONSTANTS = (
    *("q_range", "k_range", "v_range", "_k_scale_cpu", "_v_scale_cpu"),
    *("_q_scale", "_k_scale", "_v_scale", "_prob_scale"),
)
"""What every attention layer holds; made of weights only if it is loaded with scales itself."""

_NAMES = 4
"""Tensors that are named of a layer that falls back."""


@dataclass(frozen=True, eq=False)
class ProvenCopy:
    """``out_of`` a tensor of the manifest, ``into`` the engine's ``tensor``."""

    layer: nn.Module
    name: str
    tensor: torch.Tensor
    into: Geometry
    source: Source
    out_of: Geometry
    runs: Runs

    @property
    def casts(self) -> bool:
        return self.tensor.dtype != self.source.dtype

    @property
    def what(self) -> tuple[Geometry, Source, Geometry]:
        return self.into, self.source, self.out_of


@dataclass(frozen=True)
class Outcome:
    """
    Attributes:
        copies: of the layers that are planned.
        fallback: the other layers that are loaded, or tied to such, and why.
        reloaded: what those are loaded from, in the stream's order.
        nbytes_reloaded: how much they are loaded with.
    """

    copies: list[ProvenCopy]
    fallback: dict[str, str]
    reloaded: tuple[str, ...]
    nbytes_reloaded: int


class Planner(DryReload):
    """To be used once: ``run``, then ``outcome``."""

    def __init__(self, model: nn.Module, model_config: Any, manifest: Manifest) -> None:
        super().__init__(model, model_config)
        self._manifest = manifest
        self._number = {spec.name: number for number, spec in enumerate(manifest.tensors)}
        self._device = next(iter(model.parameters())).device
        self._memory = {
            layer: {storage_of(each) for each in registered(layer).values() if each.numel()}
            for layer in self.names
        }
        self._numbers = {layer: numbers(layer, self.names) for layer in self.names}
        self._holders = Counter(place for each in self._memory.values() for place in each)
        self._sources = Sources()
        self._direct = Copies(self._sources, ())
        self._streamed: list[str] = []
        self._layer = _Looked()
        self._feeds: dict[nn.Module, set[str]] = {}
        self._loaded: dict[nn.Module, int] = {}
        self._proven: dict[nn.Module, dict[str, list[ProvenCopy]]] = {}
        self._suspects: dict[nn.Module, str] = {}
        self._why: dict[nn.Module, str] = {}

    def run(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        try:
            super().run(weights)
        finally:
            self._layer.end_replay()

    def outcome(self) -> Outcome:
        for layer in self._feeds:
            if layer in self._suspects:
                self._why.setdefault(layer, self._suspects[layer])
            elif not any(self._proven.get(layer, {}).values()):
                self._why.setdefault(layer, "nothing was seen of how it is loaded")
        self._spread()
        names = {name for layer in self._why for name in self._feeds.get(layer, ())}
        return Outcome(
            [
                copy
                for layer, tensors in self._proven.items()
                if layer not in self._why
                for copies in tensors.values()
                for copy in copies
            ],
            {self.names[layer]: why for layer, why in self._why.items()},
            tuple(name for name in self._streamed if name in names),
            sum(self._loaded.get(layer, 0) for layer in self._why),
        )

    def _spread(self) -> None:
        """What is loaded from the same tensors, or into the same memory, falls back together."""
        while True:
            names = {n: layer for layer in self._why for n in self._feeds.get(layer, ())}
            places = {place: layer for layer in self._why for place in self._memory[layer]}
            more: dict[nn.Module, str] = {}
            for layer in self._feeds.keys() - self._why.keys():
                for name in self._feeds[layer] & names.keys():
                    more[layer] = f"{name} is loaded into {self.names[names[name]]} too"
                for place in self._memory[layer] & places.keys():
                    more[layer] = f"shares memory with {self.names[places[place]]}"
            for layer, other in self._written_by_two():
                more[layer] = f"loaded into the same memory as {self.names[other]}"
            if not more:
                return
            self._why.update(more)

    def _written_by_two(self) -> Iterator[tuple[nn.Module, nn.Module]]:
        writer: dict[int, nn.Module] = {}
        for layer, tensors in self._proven.items():
            for copies in tensors.values():
                for copy in copies[:1]:
                    other = writer.setdefault(storage_of(copy.tensor), layer)
                    if other is not layer and layer not in self._why:
                        yield layer, other

    # ------------------------------------------------------------ what is loaded

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._direct = Copies(self._sources, [each.data for each in self.unguarded.values()])
        before = {layer: self._hanging(layer) for layer in self.names}
        with Lineage(self._sources, self._direct):
            compat.load(self.model, self._stand_ins(weights))
        self._require_accounted(before)

    def _stand_ins(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            number = self._number[self._manifest.aliases.get(name, name)]
            made = stand_in(tensor, self._device)
            self._sources.add(made, Source(number, name, made.dtype))
            self._streamed.append(name)
            yield name, made

    def loads(self, layer: nn.Module) -> list[Any]:
        return _Loads(self, layer)

    def note(self, layer: nn.Module, arguments: Mapping[str, Any]) -> None:
        """A loader of the layer was called."""
        given = [each for each in arguments.values() if isinstance(each, torch.Tensor)]
        names = frozenset[str]().union(*(self._sources.names(each) for each in given))
        self._feeds.setdefault(layer, set()).update(names or self._streamed[-1:])

    def begin_replay(self, layer: nn.Module) -> None:
        """The layer's loaders are about to be called again, for tensors that have memory now."""
        if self._layer.begin_replay(layer, self._sources):
            self._loaded[layer] = sum(each.nbytes for each in registered(layer).values())

    def end_replay(self) -> None:
        self._layer.end_replay()

    def _hanging(self, layer: nn.Module) -> tuple[dict[str, int], dict[str, float]]:
        held = {path: storage_of(tensor) for path, tensor in self.hung_on(layer).items()}
        return held, numbers(layer, self.names)

    def _require_accounted(self, before: Mapping[nn.Module, Any]) -> None:
        """
        Raises:
            EngineError: ``load_weights`` keeps something beside what the layers load.
        """
        for layer, former in before.items():
            if layer in self._loaded or is_method(layer):  # those are looked at with their layers
                continue
            filled = any(
                self._sources.names(each) and storage_of(each) not in self._holders
                for each in self.hung_on(layer).values()
            )
            if filled or self._hanging(layer) != former:
                name = self.names[layer] or type(layer).__name__
                raise EngineError(f"load_weights itself changes what {name} holds")

    # ------------------------------------------------------------ one layer after the other

    def begun(self, layer: nn.Module) -> None:
        self._layer = _Looked(layer)

    def processed(self, layer: nn.Module, info: Any) -> None:
        with self._falling_back(layer):
            self._require_nothing_derived(layer)
            self._prove(layer, info)

    def attended(self, layer: nn.Module, info: Any) -> None:
        """What it derives it has derived from live weights, not from those that came.

        Nothing of it would show; so with it falls back the part of the block that it stands in.
        """
        try:
            if info.load_numel:
                raise _FallsBack("loaded as attention layers are")
            self._require_nothing_to_derive(layer, registered(layer))
        except _FallsBack as why:
            for each in {layer, *layer.modules(), *_part_around(self.model, self.names[layer])}:
                self._suspects[each] = f"{self.names[layer]}: {why}"

    def tied(self, layer: nn.Module) -> None:
        with self._falling_back(layer):
            self._require_nothing_to_derive(layer)

    def finished(self) -> None:
        for each in self.unguarded.values():
            layer, name = self.place_of(each)
            self._note_direct(each, layer)
            if layer not in self._why:
                with self._falling_back(layer):
                    self._prove_direct(each, layer, name)

    @contextmanager
    def _falling_back(self, layer: nn.Module) -> Iterator[None]:
        try:
            yield
        except _FallsBack as why:
            self._why[layer] = str(why)

    # ------------------------------------------------------------ the proof

    def _prove(self, layer: nn.Module, info: Any) -> None:
        """
        Raises:
            _FallsBack: copies are not all that there is to loading the layer.
        """
        own = own_tensors(info)
        pieces = {name: self._pieces_of(name, fresh) for name, fresh in self._layer.fresh.items()}
        pieces = {name: seen for name, seen in pieces.items() if seen}
        for name in pieces:
            if name not in own or _Layout.of(own[name]) != self._layer.fresh[name].layout:
                raise _FallsBack(f"{name} is repacked")
        memory = [storage_of(each) for each in own.values() if each.numel()]
        if any(memory.count(storage_of(own[name])) > 1 for name in pieces):
            raise _FallsBack("parts of it share memory")
        proven = {name: _copies(layer, name, own[name], seen) for name, seen in pieces.items()}
        for copies in proven.values():
            _require_any_order(copies)
        wanted = {
            name: _written(self._held(live), pieces.get(name, ())) for name, live in own.items()
        }
        made = self.copied_back(layer, info)
        different = [name for name in own if not same_bits(wanted[name], made[name])]
        if different:
            raise _FallsBack(f"{_listed(different)}: the reload does more than to copy")
        self._proven[layer] = proven

    def _pieces_of(self, name: str, fresh: _Fresh) -> list[Piece]:
        """What was copied into a tensor of the layer."""
        seen: list[Piece] = []
        for copies in (self._direct, self._layer.copies):
            if fresh.storage in copies.strange:
                raise _FallsBack(f"{name} is {copies.strange[fresh.storage]}")
            seen += [each.moved(-fresh.begin) for each in copies.pieces.get(fresh.storage, ())]
        return seen

    def _held(self, live: torch.Tensor) -> torch.Tensor:
        """What one of the layer's own tensors held before."""
        return self.unguarded[id(live)].value if id(live) in self.unguarded else live

    def _note_direct(self, each: compat.Unguarded, layer: nn.Module) -> None:
        """
        Raises:
            EngineError: it is not known what a tensor was loaded from.
        """
        place = storage_of(each.data)
        names = self._direct.names.get(place, set())
        if names:
            self._feeds.setdefault(layer, set()).update(names)
        elif place in self._direct.strange:
            raise EngineError(f"it is not known what {each.name} is loaded from")

    def _prove_direct(self, each: compat.Unguarded, layer: nn.Module, name: str) -> None:
        """The same for a tensor that no layer waits for; it may have been proven with its layer."""
        place = storage_of(each.data)
        if place in self._direct.strange:
            raise _FallsBack(f"{name} is {self._direct.strange[place]}")
        begin = int(each.data.storage_offset())
        pieces = [piece.moved(-begin) for piece in self._direct.pieces.get(place, ())]
        copies = _copies(layer, name, each.tensor, pieces)
        known = self._proven.get(layer, {}).get(name, [])
        if [copy.what for copy in known] == [copy.what for copy in copies]:
            return
        _require_any_order(copies)
        if _Layout.of(each.tensor) != _Layout.of(each.value):
            raise _FallsBack(f"{name} is repacked")
        if not same_bits(_written(each.value, pieces), each.tensor):
            raise _FallsBack(f"{name}: the reload does more than to copy")
        self._proven.setdefault(layer, {})[name] = copies

    def _require_nothing_derived(self, layer: nn.Module) -> None:
        """
        Raises:
            _FallsBack: processing it changed more than its own parameters and buffers.
        """
        former, now = self.memories[layer].values, self.hung_on(layer)
        handlers = (hasattr(each, "handler_tensor") for _, each in walk(layer, self.names))
        if any(map(is_hidden, now)) or any(handlers):
            raise _FallsBack("its kernel hides its weights")
        changed = former.keys() ^ now.keys()
        changed |= {p for p in former.keys() & now.keys() if not same_bits(former[p], now[p])}
        if changed:
            raise _FallsBack(f"tensors are derived from it: {_listed(sorted(changed))}")
        counted = numbers(layer, self.names)
        if counted != self._numbers[layer]:
            different = {path for path, _ in counted.items() ^ self._numbers[layer].items()}
            raise _FallsBack(f"numbers are derived from it: {_listed(sorted(different))}")

    def _require_nothing_to_derive(self, layer: nn.Module, own: Tensors | None = None) -> None:
        """For a layer that was processed while it held the live weights.

        Args:
            own: those of its parameters and buffers that it may have derived.

        Raises:
            _FallsBack: it may have derived from weights what it holds, unless that is a view of
                what another layer is loaded with.
        """
        self._require_nothing_derived(layer)
        mine = self._memory[layer]
        derived = [
            path
            for path, each in {**self.hung_on(layer), **(own or {})}.items()
            if each.is_floating_point()
            and path not in _CONSTANTS
            and self._holders[storage_of(each)] <= (storage_of(each) in mine)
        ]
        if derived:
            raise _FallsBack(f"tensors may be derived: {_listed(derived)}")
        now = registered(layer)
        moved = [
            name
            for name in self.kept.keys() | now.keys()
            if name not in now
            or name not in self.kept
            or not same_bits(self.kept[name], now[name])
            or (now[name].numel() and storage_of(now[name]) not in self._memory[layer])
        ]
        if moved:
            raise _FallsBack(f"{_listed(moved)}: processed in place")


class _FallsBack(Exception):
    """A layer needs the reload; says why."""


@dataclass(frozen=True)
class _Layout:
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Layout:
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride())


@dataclass(frozen=True)
class _Fresh:
    """A tensor that loaders write, as it was before it was processed."""

    storage: int
    begin: int
    layout: _Layout

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Fresh:
        return cls(storage_of(tensor), int(tensor.storage_offset()), _Layout.of(tensor))


class _Looked:
    """The layer that is being looked at: its loaders are called once more, and watched."""

    def __init__(self, layer: nn.Module | None = None) -> None:
        self._awaited = layer
        self._replaying = False
        self.fresh: dict[str, _Fresh] = {}
        self.copies = Copies(Sources(), ())

    def begin_replay(self, layer: nn.Module, sources: Sources) -> bool:
        """Whether this is the time."""
        if layer is not self._awaited:
            return False
        self._awaited = None
        self.fresh = {name: _Fresh.of(each) for name, each in registered(layer).items()}
        self.copies = Copies(sources, registered(layer).values())
        self.copies.__enter__()  # type: ignore[no-untyped-call]
        self._replaying = True
        return True

    def end_replay(self) -> None:
        if self._replaying:
            self._replaying = False
            self.copies.__exit__(None, None, None)  # type: ignore[no-untyped-call]


class _Loads(list[Any]):
    """vLLM's list of what was loaded into a layer, which says when it is gone through."""

    def __init__(self, planner: Planner, layer: nn.Module) -> None:
        super().__init__()
        self._planner, self._layer = planner, layer

    def append(self, loaded: Any) -> None:
        self._planner.note(self._layer, loaded[1].arguments)
        super().append(loaded)

    def __iter__(self) -> Iterator[Any]:
        self._planner.begin_replay(self._layer)
        yield from super().__iter__()
        self._planner.end_replay()


def _copies(
    layer: nn.Module, name: str, tensor: torch.Tensor, pieces: list[Piece]
) -> list[ProvenCopy]:
    """Without those that a later one covers."""
    last = {piece.into: piece for piece in pieces}
    return [
        ProvenCopy(
            layer, name, tensor, into, piece.source, piece.out_of, Runs.of(into, piece.out_of)
        )
        for into, piece in last.items()
    ]


def _written(held: torch.Tensor, pieces: Iterable[Piece]) -> torch.Tensor:
    """A tensor as it was, and the copies done to it."""
    if not pieces:
        return held
    made = torch.empty_strided(held.shape, held.stride(), dtype=held.dtype, device=held.device)
    made.copy_(held.detach())
    for piece in pieces:
        piece.into.view(made).copy_(piece.values)
    return made


def _require_any_order(copies: list[ProvenCopy]) -> None:
    """
    Raises:
        _FallsBack: copies cannot be done with other values, or not in any order.
    """
    if not all(has_stand_in(copy.source.dtype) for copy in copies):
        raise _FallsBack(f"{copies[0].name} is loaded from integers or packed numbers")
    if len(copies) > 1 and _overlap(copies):
        raise _FallsBack(f"parts of {copies[0].name} are loaded twice")


def _overlap(copies: list[ProvenCopy]) -> bool:
    if sum(copy.runs.count for copy in copies) > _MANY:
        return _overlap_in_mask(copies)
    begin = np.concatenate([copy.runs.rows()[0] for copy in copies])
    length = np.concatenate([np.full(copy.runs.count, copy.runs.length) for copy in copies])
    order = np.argsort(begin)
    ends = (begin + length)[order]
    return bool((begin[order][1:] < ends[:-1]).any())


def _overlap_in_mask(copies: list[ProvenCopy]) -> bool:
    tensor = copies[0].tensor
    mask = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=torch.bool, device=tensor.device
    ).zero_()
    for copy in copies:
        copy.into.view(mask).fill_(True)
    return int(mask.sum()) < sum(math.prod(copy.into.size) for copy in copies)


def _listed(names: Iterable[str]) -> str:
    each = list(names)
    more = [f"{len(each) - _NAMES} more"] * (len(each) > _NAMES)
    return ", ".join(each[:_NAMES] + more)


def _part_around(model: nn.Module, path: str) -> set[nn.Module]:
    """All that stands in the same part of a block: ``layers.0.attn``, for ``layers.0.attn.mla``."""
    parts = path.split(".")
    blocks = [number for number, part in enumerate(parts) if part.isdigit()]
    end = min(blocks[0] + 2 if blocks else len(parts), len(parts) - 1)
    return set(model.get_submodule(".".join(parts[:end])).modules())
