"""Plain tensors as an engine: an ``nn.Module`` of this process, or a mapping of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from weightsync.deadline import Deadline
from weightsync.engine import Engine, Fit, Update, Verification
from weightsync.errors import EngineError, MismatchError
from weightsync.manifest import Manifest, ParamSpec, describe
from weightsync.options import require_truth
from weightsync.sources.transformers import checkpoint_of
from weightsync.tensors import Facts
from weightsync.transport import Targets
from weightsync.tree import inside, state_of
from weightsync.weight import Weight
from weightsync.words import a_kind


@dataclass(frozen=True)
class _Plan:
    """Where a version's tensors go, for as long as manifest, names and facts stay the same.

    ``whole`` are written as they are, ``rows`` as far as both have rows (``pad``). ``shared`` are
    pairs of names that are one tensor here and two in the manifest, ``overlapping`` tensors that
    share memory with another one.
    """

    manifest: Manifest
    names: list[str]
    facts: Facts | None
    fit: Fit
    whole: Targets
    rows: dict[str, torch.Tensor]
    shared: list[tuple[str, str]]
    overlapping: list[str]


class ModuleEngine(Engine):
    """Writes into a module's parameters and persistent buffers, in place.

    Addresses, ties, views, ``requires_grad`` and attributes stay as they are. Names are those of
    the module without its wrappers; a transformers model also takes those of its checkpoint, into
    the parts of its own tensors that they name (an expert of a packed tensor).

    Args:
        target: the module, or the mapping.
        strict: refuse an update unless the names sent and the names here are the same. With
            False, what both have is updated and the rest listed in the report.
        pad: let the first dimension differ (resized or padded vocabularies): as many rows as both
            have are copied, the others stay as they were.
        cast: let dtypes differ; values are converted as ``copy_`` does.
    """

    def __init__(
        self,
        target: nn.Module | Mapping[str, torch.Tensor],
        *,
        strict: bool = True,
        pad: bool = False,
        cast: bool = False,
    ) -> None:
        require_truth(strict=strict, pad=pad, cast=cast)
        self._target = target
        self._strict = strict
        self._pad = pad
        self._cast = cast
        self._known: _Plan | None = None
        self._checked: _Plan | None = None

    @property
    def target(self) -> Any:
        return self._target

    def check(self, manifest: Manifest) -> Fit:
        self._checked = self._plan(manifest)
        return self._checked.fit

    def stage(self, update: Update, deadline: Deadline) -> None:
        snapshot = update.snapshot
        for one, other in self._checked.shared if self._checked else ():
            if not _same_bytes(snapshot.tensor(one), snapshot.tensor(other)):
                raise MismatchError(
                    f"{one!r} and {other!r} are one tensor here, but two that differ were sent; "
                    "nothing was changed"
                )

    def apply(self, update: Update, deadline: Deadline) -> None:
        manifest = update.snapshot.manifest
        plan, self._checked = self._checked, None
        if plan is None or plan.manifest is not manifest:  # a rollback
            plan = self._plan(manifest)
        if plan.rows:
            update.snapshot.verify(list(plan.rows))
        update.snapshot.copy_into(plan.whole)
        for name, tensor in plan.rows.items():
            sent = update.snapshot.tensor(name)
            count = min(len(tensor), len(sent))
            tensor.data[:count].copy_(sent[:count])
        for name in plan.overlapping:
            tensor = plan.whole.tensors[name]
            if not _same_bytes(tensor, update.snapshot.tensor(name).to(tensor.dtype)):
                raise EngineError(
                    f"{name!r} shares memory with another tensor here, and what was sent for the "
                    "two does not agree"
                )

    def verify(self, update: Update) -> Verification:
        plan = self._plan(update.snapshot.manifest)
        different = [
            name
            for name, tensor in plan.whole.tensors.items()
            if not _same_bytes(tensor, update.snapshot.tensor(name).to(tensor.dtype))
        ]
        for name, tensor in plan.rows.items():
            sent = update.snapshot.tensor(name)
            count = min(len(tensor), len(sent))
            if not _same_bytes(tensor[:count], sent[:count].to(tensor.dtype)):
                different.append(name)
        checked = len(plan.whole.tensors) + len(plan.rows)
        return Verification(update.version, checked, tuple(different))

    def _plan(self, manifest: Manifest) -> _Plan:
        """Where each tensor goes. Made anew when the manifest or the tensors changed."""
        held = self._tensors()
        names = list(held)
        try:
            facts = Facts.of(list(held.values()))
        except (RuntimeError, ValueError):
            facts = None  # something has no memory: it is refused by name below
        known = self._known
        if (
            known is None
            or facts is None
            or known.manifest is not manifest
            or known.names != names
            or known.facts != facts
        ):
            for name, tensor in held.items():
                _require_memory(name, tensor)
            own = self._named(held, manifest)
            fit, chosen = self._fit(own, manifest)
            whole: dict[str, torch.Tensor] = {}
            rows: dict[str, torch.Tensor] = {}
            for name in chosen:
                same = manifest.spec(name).shape == tuple(own[name].shape)
                (whole if same else rows)[name] = own[name]
            shared = _shared(own, manifest, chosen)
            overlapping = _overlapping(whole)
            if isinstance(self._target, nn.Module):
                _require_own(self._target, own)
            targets = Targets(manifest, whole)
            known = _Plan(manifest, names, facts, fit, targets, rows, shared, overlapping)
            self._known = known
        return known

    def _fit(self, own: Mapping[str, torch.Tensor], manifest: Manifest) -> tuple[Fit, list[str]]:
        """What is missing or unexpected, and the names to write.

        Raises:
            MismatchError: this cannot be, or must not be under ``strict``.
        """
        chosen = self._choose(own, manifest)
        taken = set(chosen)
        written = {_storage_key(own[name]) for name in chosen}
        missing = tuple(
            name
            for name, tensor in own.items()
            if name not in taken and (tensor.numel() == 0 or _storage_key(tensor) not in written)
        )
        found = {manifest.aliases.get(name, name) for name in chosen}
        unexpected = tuple(spec.name for spec in manifest.tensors if spec.name not in found)
        different: dict[str, tuple[str, str]] = {}
        for name in chosen:
            spec = manifest.spec(name)
            if self._misfit(spec, own[name]):
                different[name] = str(spec), describe(own[name].dtype, own[name].shape)
        nothing = bool(manifest.tensors) and not chosen
        if different or nothing or (self._strict and (missing or unexpected)):
            listed = self._strict or nothing
            raise MismatchError(
                _complain(missing if listed else (), unexpected, different, listed, nothing),
                missing=missing,
                unexpected=unexpected,
                different=different,
            )
        return Fit(missing, unexpected), chosen

    def _tensors(self) -> dict[str, torch.Tensor]:
        target = self._target
        found = state_of(target) if isinstance(target, nn.Module) else dict(target)
        for kind in set(map(type, found.values())):
            if not issubclass(kind, torch.Tensor):
                name = next(name for name, value in found.items() if type(value) is kind)
                if issubclass(kind, Weight):
                    raise EngineError(
                        f"{name!r} is sharded, packed or has an adapter here, so that there is no "
                        "tensor to write it into: let a plain model receive"
                    )
                raise EngineError(f"{name!r} is {a_kind(found[name])}, not a tensor")
        return found

    def _named(
        self, held: dict[str, torch.Tensor], manifest: Manifest
    ) -> Mapping[str, torch.Tensor]:
        """The tensors under the names that were sent: a checkpoint's, or the module's own.

        Raises:
            EngineError: a checkpoint's tensor is no part of the module's memory.
        """
        target = self._target
        layout = checkpoint_of(inside(target)) if isinstance(target, nn.Module) else None
        if layout is None:
            return held
        parts = layout.convert(dict(held))
        if parts.keys() == held.keys():
            return held
        sent = set(manifest.names())
        if len(sent & held.keys()) > len(sent & parts.keys()):
            return held
        computed = [name for name, part in parts.items() if not isinstance(part, torch.Tensor)]
        if computed:
            raise EngineError(
                f"{_some(tuple(computed))}: the checkpoint's tensor is computed from this "
                "module's, so that it cannot be written in place; send the model's own names, as "
                "a mapping (model.state_dict())"
            )
        return {name: part for name, part in parts.items() if isinstance(part, torch.Tensor)}

    @staticmethod
    def _choose(own: Mapping[str, torch.Tensor], manifest: Manifest) -> list[str]:
        """The names to write: everything both have, but a tensor tied on both sides only once."""
        chosen: list[str] = []
        done: set[Any] = set()
        for name in manifest.names():
            if name in own:
                key = manifest.aliases.get(name, name), _storage_key(own[name])
                if key not in done:
                    done.add(key)
                    chosen.append(name)
        return chosen

    def _misfit(self, spec: ParamSpec, tensor: torch.Tensor) -> bool:
        if spec.dtype != tensor.dtype and not self._cast:
            return True
        if spec.shape == tuple(tensor.shape):
            return False
        same_rows = bool(spec.shape) and spec.shape[1:] == tuple(tensor.shape[1:])
        return not (self._pad and same_rows and tensor.dim() > 0)


def accepts(target: Any) -> bool:
    return isinstance(target, (nn.Module, Mapping))


def _storage_key(tensor: torch.Tensor) -> Any:
    bits = tensor.is_conj(), tensor.is_neg()
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device, bits


def _require_memory(name: str, tensor: torch.Tensor) -> None:
    """Refuse what cannot be written to, before anything is.

    Raises:
        EngineError: with the name and the reason.
    """
    if is_lazy(tensor) or tensor.is_meta or tensor.layout is not torch.strided:
        raise EngineError(
            f"{name!r} has no dense memory to write to: it is lazy, sparse or on the meta device"
        )
    dimensions = zip(tensor.shape, tensor.stride(), strict=True)
    if any(size > 1 and stride == 0 for size, stride in dimensions):
        raise EngineError(f"{name!r} is expanded: several of its elements are one in memory")


def _shared(
    own: Mapping[str, torch.Tensor], manifest: Manifest, chosen: list[str]
) -> list[tuple[str, str]]:
    """Pairs of names that are one tensor here, and two in the manifest."""
    first: dict[Any, str] = {}
    pairs = []
    for name in chosen:
        if own[name].numel():
            other = first.setdefault(_storage_key(own[name]), name)
            if manifest.spec(other) is not manifest.spec(name):
                pairs.append((other, name))
    return pairs


def _overlapping(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Tensors that share some of their memory with another one, without being the same."""
    ranges = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + _extent(tensor), str(tensor.device), name)
        for name, tensor in tensors.items()
        if tensor.numel()
    )
    found: set[str] = set()
    end, owner = 0, ""
    for begin, until, _, name in ranges:
        if begin < end and _storage_key(tensors[owner]) != _storage_key(tensors[name]):
            found |= {owner, name}
        if until > end:
            end, owner = until, name
    return sorted(found)


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last one."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (sum((size - 1) * stride for size, stride in steps) + 1) * tensor.element_size()


def _require_own(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """
    Raises:
        EngineError: ``state_dict`` gave a copy, so that writing into it would change nothing.
    """
    held = [*module.parameters(), *module.buffers()]
    memory = {tensor.untyped_storage().data_ptr() for tensor in held if tensor.numel()}
    for name, tensor in tensors.items():
        if tensor.numel() and tensor.untyped_storage().data_ptr() not in memory:
            raise EngineError(
                f"the module's state_dict gives a copy of {name!r}, not the tensor itself: writing "
                "into it would change nothing"
            )


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal bit for bit: NaN payloads and the sign of zero count."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    as_bytes = []
    for tensor in (one.detach().cpu(), other.detach().cpu()):
        # int1 to int7 have no copy kernel, which strided ones need; their bytes have.
        flat = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
        as_bytes.append(flat.contiguous().reshape(-1).view(torch.uint8))
    return torch.equal(*as_bytes)


def _complain(
    missing: tuple[str, ...],
    unexpected: tuple[str, ...],
    different: dict[str, tuple[str, str]],
    strict: bool,
    nothing: bool,
) -> str:
    parts = []
    if different:
        pairs = [f"{n!r}: sent {s}, here {h}" for n, (s, h) in list(different.items())[:8]]
        parts.append(
            f"{len(different)} tensors differ in shape or dtype ({'; '.join(pairs)}); dtype= on "
            "the sender or cast=True here converts, pad=True lets the number of rows differ"
        )
    if missing:
        parts.append(f"{len(missing)} tensors here were not sent: {_some(missing)}")
    if unexpected and strict:
        parts.append(f"{len(unexpected)} tensors sent are not here: {_some(unexpected)}")
    if nothing:
        parts.append("No name is on both sides: rename= on the sender maps them")
    elif strict and not different:
        parts.append("strict=False updates what both sides have")
    return "the weights sent do not fit this model; nothing was changed. " + ". ".join(parts)


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
