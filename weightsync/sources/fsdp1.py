"""``FullyShardedDataParallel``: flat parameters, gathered unit by unit.

A unit's parameters lie one after the other in one flat tensor, of which each rank holds an equal
part. It is gathered here, into memory of our own: the trainer's state stays what it is, also when
a gather fails. ``_param_infos`` and the other names with an underscore are those of
``torch.distributed.fsdp._flat_param``, unchanged from torch 2.0 to 2.13.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weightsync.errors import SourceError
from weightsync.tree import Walk
from weightsync.weight import Piece, Weight


class Shelf:
    """Room for one gathered flat parameter, shared by all units of a model."""

    def __init__(self) -> None:
        self.unit: Unit | None = None
        self.whole: torch.Tensor | None = None
        self.member = -1
        """The last member of the unit that was read."""


class Unit:
    """The flat parameter of one FSDP unit."""

    def __init__(self, module: Any, handle: Any, shelf: Shelf) -> None:
        self._handle = handle
        self._shelf = shelf
        self._between = getattr(module, "_inter_node_pg", None)  # hybrid: who holds the same
        self.flat = handle.flat_param
        self.spread = bool(handle.uses_sharded_strategy) and handle.process_group.size() > 1
        begin = 0
        self.ranges: list[tuple[int, int]] = []
        padding = self.flat._is_padding_mask
        for numel, pads in zip(self.flat._numels_with_padding, padding, strict=True):
            if not pads:
                self.ranges.append((begin, begin + numel))
            begin += numel

    @property
    def shard(self) -> torch.Tensor:
        """This rank's part: of equal length on all ranks, padded at the end."""
        # Before its first forward pass a flat parameter is its shard.
        shard: torch.Tensor = getattr(self.flat, "_local_shard", self.flat)
        return shard.detach()

    @property
    def holders(self) -> tuple[int, ...]:
        """The ranks that hold the same part as this one, if there are others."""
        between = self._between
        return () if between is None else tuple(dist.get_process_group_ranks(between))

    def whole(self, member: int) -> torch.Tensor:
        """All of the flat parameter; kept while its members are read one after the other."""
        if not self.spread:  # rank 0 may read it alone, between members of one that is
            return self._gather()
        shelf = self._shelf
        whole = shelf.whole
        if whole is None or shelf.unit is not self or member <= shelf.member:
            shelf.whole = whole = None  # let go of the former one first
            whole = self._gather()
        last = member == len(self.ranges) - 1
        shelf.unit, shelf.whole, shelf.member = self, None if last else whole, member
        return whole

    def _gather(self) -> torch.Tensor:
        shard = self.shard.to(self._handle.device)
        if not self.spread:
            return shard
        group = self._handle.process_group
        whole = torch.empty(len(shard) * group.size(), dtype=shard.dtype, device=shard.device)
        # Newer releases of torch give it another name, and warn of the old one.
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        gather(whole, shard, group=group)
        return whole


class Flat(Weight):
    """One parameter of a unit."""

    def __init__(self, unit: Unit, member: int) -> None:
        self._unit, self._member = unit, member
        self.dtype = unit.flat.dtype
        self.shape = tuple(unit.flat._shapes[member])

    @property
    def identity(self) -> Hashable:
        return "flat parameter", id(self._unit), self._member

    @property
    def collective(self) -> bool:
        return self._unit.spread

    @property
    def among(self) -> frozenset[int] | None:
        return frozenset(dist.get_process_group_ranks(self._unit._handle.process_group))

    @torch.no_grad()
    def read(self) -> torch.Tensor:
        begin, end = self._unit.ranges[self._member]
        return self._unit.whole(self._member)[begin:end].view(self.shape)

    def pieces(self) -> list[Piece] | None:
        if not self.collective:
            return None
        shard, group = self._unit.shard, self._unit._handle.process_group
        first = len(shard) * group.rank()
        begin, end = self._unit.ranges[self._member]
        low, high = max(begin, first), min(end, first + len(shard))
        if low >= high:
            return []
        part, rank = shard[low - first : high - first], dist.get_rank()
        return [Piece(part, (end - begin,), (low - begin,), rank, self._unit.holders)]


def _require_current(handle: Any, prefix: str) -> None:
    """
    Raises:
        SourceError: an original parameter was replaced, and FSDP has not taken it over yet.
    """
    flat = handle.flat_param
    if not getattr(handle, "_use_orig_params", False):
        return
    gathered = handle.uses_sharded_strategy and not handle.is_sharded(flat)
    if gathered or getattr(handle, "_skipped_use_sharded_views", False):
        return  # the originals are views of what was gathered for a forward pass
    storage = flat.untyped_storage().data_ptr()
    for info, shard in zip(flat._param_infos, flat._shard_param_infos, strict=True):
        parameter = getattr(info.module, info.param_name, None)
        if not shard.in_shard or parameter is None:
            continue
        if parameter.untyped_storage().data_ptr() != storage:
            name = f"{prefix}{info.module_name and info.module_name + '.'}{info.param_name}"
            raise SourceError(
                f"tensor {name!r} cannot be sent: its data was replaced, which FSDP takes over in "
                "the next forward pass; copy_() into it instead"
            )


def visit(module: nn.Module, prefix: str, walk: Walk) -> None:
    """An FSDP unit, and the units inside."""
    wrapped: Any = module
    handle = wrapped._handle
    if handle is not None:
        unit = Unit(module, handle, walk.shared.setdefault("fsdp1", Shelf()))
        _require_current(handle, prefix)
        for member, info in enumerate(unit.flat._param_infos):
            walk.replace(info.module, info.param_name, Flat(unit, member))
        for shared in unit.flat._shared_param_infos:
            # The same parameter under another name.
            at = (shared.prim_param_name, shared.prim_module)
            member = next(
                number
                for number, info in enumerate(unit.flat._param_infos)
                if (info.param_name, info.module) == at
            )
            walk.replace(shared.module, shared.param_name, Flat(unit, member))
    walk.visit(wrapped._fsdp_wrapped_module, prefix)
