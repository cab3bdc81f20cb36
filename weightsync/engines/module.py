"""Plain tensors as an engine: an ``nn.Module`` of this process, or a mapping of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from weightsync.deadline import Deadline
from weightsync.engine import Engine, Fit, Update, Verification
from weightsync.errors import EngineError, MismatchError
from weightsync.manifest import Manifest, ParamSpec, describe
from weightsync.transport import Snapshot

_EXTRA = "_extra_state"


class ModuleEngine(Engine):
    """Writes into a module's parameters and persistent buffers, in place.

    Addresses, ties, views, ``requires_grad`` and attributes stay as they are. Names are those of
    ``state_dict``.

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
        self._target = target
        self._strict = strict
        self._pad = pad
        self._cast = cast

    @property
    def target(self) -> Any:
        return self._target

    def check(self, manifest: Manifest) -> Fit:
        own = self._tensors()
        chosen = self._choose(own, manifest)
        written = {_storage_key(own[name]) for name in chosen}
        missing = tuple(
            name
            for name, tensor in own.items()
            if name not in chosen and (tensor.numel() == 0 or _storage_key(tensor) not in written)
        )
        alias_of = {manifest.aliases.get(name, name) for name in chosen}
        unexpected = tuple(spec.name for spec in manifest.tensors if spec.name not in alias_of)
        different: dict[str, tuple[str, str]] = {}
        for name in chosen:
            spec = manifest.spec(name)
            reason = self._misfit(spec, own[name])
            if reason:
                different[name] = str(spec), describe(own[name].dtype, own[name].shape)
        if different or (self._strict and (missing or unexpected)):
            raise MismatchError(
                _complain(missing if self._strict else (), unexpected, different, self._strict),
                missing=missing,
                unexpected=unexpected,
                different=different,
            )
        return Fit(missing, unexpected)

    def apply(self, update: Update, deadline: Deadline) -> None:
        whole, rows = self._plan(update.snapshot)
        if rows:
            update.snapshot.verify(list(rows))
        update.snapshot.copy_into(whole)
        for name, tensor in rows.items():
            sent = update.snapshot.tensor(name)
            count = min(len(tensor), len(sent))
            tensor.data[:count].copy_(sent[:count])

    def verify(self, update: Update) -> Verification:
        whole, rows = self._plan(update.snapshot)
        different = [
            name
            for name, tensor in whole.items()
            if not _same_bytes(tensor, update.snapshot.tensor(name).to(tensor.dtype))
        ]
        for name, tensor in rows.items():
            sent = update.snapshot.tensor(name)
            count = min(len(tensor), len(sent))
            if not _same_bytes(tensor[:count], sent[:count].to(tensor.dtype)):
                different.append(name)
        return Verification(update.version, len(whole) + len(rows), tuple(different))

    def _tensors(self) -> dict[str, torch.Tensor]:
        if isinstance(self._target, nn.Module):
            found = self._target.state_dict(keep_vars=True)
        else:
            found = dict(self._target)
        tensors = {}
        for name, value in found.items():
            if isinstance(value, torch.Tensor):
                tensors[name] = value
            elif name.rpartition(".")[2] != _EXTRA:
                raise EngineError(f"{name!r} is a {type(value).__name__}, not a tensor")
        return tensors

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

    def _plan(self, snapshot: Snapshot) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The tensors to write whole, and those to write by rows."""
        own = self._tensors()
        whole: dict[str, torch.Tensor] = {}
        rows: dict[str, torch.Tensor] = {}
        for name in self._choose(own, snapshot.manifest):
            same = snapshot.manifest.spec(name).shape == tuple(own[name].shape)
            (whole if same else rows)[name] = own[name]
        return whole, rows


def accepts(target: Any) -> bool:
    return isinstance(target, (nn.Module, Mapping))


def _storage_key(tensor: torch.Tensor) -> Any:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal bit for bit: NaN payloads and the sign of zero count."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    as_bytes = [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*as_bytes)


def _complain(
    missing: tuple[str, ...],
    unexpected: tuple[str, ...],
    different: dict[str, tuple[str, str]],
    strict: bool,
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
    if strict and not different:
        parts.append("strict=False updates what both sides have")
    return "the weights sent do not fit this model; nothing was changed. " + ". ".join(parts)


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
