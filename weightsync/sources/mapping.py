"""Weights that lie in memory under names: a mapping, or a ``TensorDict``."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch
from torch import nn

from weightsync.errors import ManifestError, SourceError
from weightsync.manifest import Manifest
from weightsync.source import Inventory, SourceOptions, WeightSource, as_value, log
from weightsync.tensors import Addresses, Facts, plain_address
from weightsync.weight import Refusal, Unsendable, Value, Weight


class ResidentSource(WeightSource):
    """Tensors that exist anyway, or are made of such. ``entries`` lists them for every update.

    Tied weights are found by their storage: two names for the same elements in the same order
    are sent once, under the name that comes first, or that ``primary`` prefers.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._known: _Known | None = None

    def entries(self) -> tuple[list[str], list[Any]]:
        """All names and all values, tied ones under each of their names, names not yet final."""
        raise NotImplementedError

    def converted(self, values: dict[str, Value]) -> dict[str, Value]:
        """The values under the names that engines expect: split, joined or renamed."""
        return values

    def keeps(self, name: str) -> bool:
        """Whether a tensor is exempt from ``dtype`` by the model's own wish."""
        return False

    def primary(self, names: Sequence[str]) -> str:
        """Under which of its names a tied weight is sent."""
        return names[0]

    def extras(self) -> Mapping[str, bytes]:
        """The small files that lie beside the weights in a checkpoint."""
        return {}

    walked = False

    def manifest(self) -> Manifest:
        return self.inventory().manifest

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.inventory().tensors()

    def inventory(self) -> Inventory:
        names, values = self.entries()
        try:
            facts = Facts.of(values)
        except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError):
            facts = None  # something is no plain tensor: looked at anew for every update
        known = self._known
        if known is None or facts is None or known.names != names or known.facts != facts:
            known = self._known = self._look(names, values, facts)
        sent: list[Any] = [
            values[v] if type(v) is int else v.within(values) if type(v) is _View else v
            for v in known.values
        ]
        return Inventory(known.manifest, sent, known.addresses, extras=self.extras)

    def _look(self, names: list[str], values: list[Any], facts: Facts | None) -> _Known:
        place = _Places(values)
        manifest, sent = self._describe(names, values)
        addresses = [
            plain_address(value, spec.dtype) if isinstance(value, torch.Tensor) else 0
            for value, spec in zip(sent, manifest.tensors, strict=True)
        ]
        plain = all(isinstance(value, torch.Tensor) for value in sent)
        return _Known(
            names,
            facts if plain else None,
            manifest,
            list(map(place, sent)),
            np.array(addresses, dtype=np.int64),
        )

    def _describe(self, names: list[str], given: list[Any]) -> tuple[Manifest, list[Value]]:
        options = self._options
        values: dict[str, Value] = {}
        refused: list[str] = []
        for name, value in zip(names, given, strict=True):
            if not isinstance(name, str):
                raise SourceError(f"names are texts, not {type(name).__name__}: {name!r:.80}")
            if name in values:
                raise SourceError(f"two tensors would be called {name!r}")
            try:
                values[name] = as_value(name, value)
            except SourceError as error:
                refused.append(name)
                refusal = Refusal(str(error), not options.sends(name))
                if _has_shape(value):
                    values[name] = Unsendable(value.dtype, tuple(value.shape), refusal)
                else:
                    self._leave_out(refusal)
        values = self.converted(values)
        options.check_patterns([*values, *refused])
        chosen = {name: value for name, value in values.items() if options.sends(name)}
        if values and not chosen:
            raise SourceError("include= and exclude= leave nothing to send")
        values = chosen
        refusals = {name: v.refusal for name, v in values.items() if isinstance(v, Weight)}
        for refusal in dict.fromkeys(filter(None, refusals.values())):
            self._leave_out(refusal)
        values = {name: value for name, value in values.items() if not refusals.get(name)}
        sent: list[Value] = []
        aliases: dict[str, str] = {}
        entries: list[tuple[str, torch.dtype, Iterable[int]]] = []
        for tied in ties_of(values):
            main = self.primary(tied) if len(tied) > 1 else tied[0]
            value = values[main]
            final = options.final(main)
            for other in tied:
                if other != main:
                    alias = options.final(other)
                    if alias in aliases:
                        raise SourceError(f"two tensors would be called {alias!r}")
                    aliases[alias] = final
            dtype = value.dtype if self.keeps(main) else options.wire_dtype(main, value.dtype)
            entries.append((final, dtype, value.shape))
            sent.append(value)
        try:
            return Manifest.build(entries, aliases), sent
        except ManifestError as error:
            raise SourceError(str(error)) from None

    def _leave_out(self, refusal: Refusal) -> None:
        """
        Raises:
            SourceError: under ``strict``, unless the user does not want it.
        """
        if not refusal.excluded:
            if self._options.strict:
                raise SourceError(refusal.reason)
            log.warning("left out (strict=False): %s", refusal.reason)


@dataclass(frozen=True)
class _Known:
    """What was found out about values, for as long as they have the same names and facts.

    ``values`` has the number of a tensor among the entries instead of the tensor itself, which
    another one of the same facts may have replaced, and parts of tensors in the same way: whoever
    moves its weights elsewhere between two updates gets the memory back.
    """

    names: list[str]
    facts: Facts | None
    manifest: Manifest
    values: list[int | _View | Value]
    addresses: Addresses


class _View(NamedTuple):
    """Elements of one of the entries, by its number; ``offset`` is from its first element."""

    number: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def within(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        whole = values[self.number].detach()
        return whole.as_strided(self.shape, self.stride, whole.storage_offset() + self.offset)


class _Places:
    """Says where among the entries a value lies."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = values
        self._numbers = {id(value): number for number, value in enumerate(values)}
        self._owners: dict[tuple[int, torch.dtype], int] = {}
        for number, value in enumerate(values):
            if type(value) in (torch.Tensor, nn.Parameter) and value.layout is torch.strided:
                self._owners.setdefault(_storage(value), number)

    def __call__(self, value: Value) -> int | _View | Value:
        number = self._numbers.get(id(value))
        if number is not None or type(value) is not torch.Tensor:
            return value if number is None else number
        number = self._owners.get(_storage(value))
        if number is None or value.is_conj() or value.is_neg():
            return value
        offset = value.storage_offset() - self._values[number].storage_offset()
        return _View(number, tuple(value.shape), value.stride(), offset)


def _storage(tensor: torch.Tensor) -> tuple[int, torch.dtype]:
    return tensor.untyped_storage()._cdata, tensor.dtype


def ties_of(values: Mapping[str, Value]) -> list[list[str]]:
    """The names, those of one tensor together, in the order of each tensor's first name."""
    groups: dict[Hashable, list[str]] = {}
    for name, value in values.items():
        if isinstance(value, Weight):
            same: Hashable | None = value.identity
        else:
            same = identity_of(value)
        groups.setdefault(("alone", name) if same is None else same, []).append(name)
    return list(groups.values())


def _has_shape(value: object) -> TypeGuard[torch.Tensor]:
    if not isinstance(value, torch.Tensor) or value.is_nested:
        return False
    return not torch.nn.parameter.is_lazy(value)


def identity_of(tensor: torch.Tensor) -> Hashable | None:
    """Equal for tensors that are the same elements in the same order; None if there are none."""
    if tensor.numel() == 0:
        return None
    bits = tensor.is_conj(), tensor.is_neg()
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device, bits


class MappingSource(ResidentSource):
    """A mapping of names to tensors. The names are the user's own."""

    def __init__(self, weights: Mapping[str, torch.Tensor], options: SourceOptions) -> None:
        super().__init__(options)
        self._weights = weights
        adapted = [name for name in weights if isinstance(name, str) and ".base_layer." in name]
        if adapted:
            log.warning(
                "the mapping has names of a PEFT model (%r, ...): nothing is merged, and no engine "
                "knows them; to send merged values pass the model itself",
                adapted[0],
            )

    def entries(self) -> tuple[list[str], list[Any]]:
        return list(self._weights.keys()), list(self._weights.values())


def accepts(weights: Any) -> bool:
    return isinstance(weights, Mapping)


class TensorDictSource(ResidentSource):
    """A ``TensorDict``; nested names are joined with dots."""

    def __init__(self, weights: Any, options: SourceOptions) -> None:
        super().__init__(options)
        self._weights = weights

    def entries(self) -> tuple[list[str], list[Any]]:
        leaves = list(self._weights.items(True, True))
        names = [key if isinstance(key, str) else ".".join(key) for key, _ in leaves]
        return names, [value for _, value in leaves]


def accepts_tensordict(weights: Any) -> bool:
    # Whoever holds a TensorDict has imported tensordict; nobody else pays for importing it.
    module = sys.modules.get("tensordict")
    return module is not None and isinstance(weights, module.TensorDictBase)


def tensordict_source(weights: Any, options: SourceOptions) -> WeightSource:
    return TensorDictSource(weights, options)
