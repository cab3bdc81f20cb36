"""DTensors: FSDP2 (``fully_shard``) and tensor parallelism."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weightsync.errors import SourceError
from weightsync.source import unsendable
from weightsync.tree import Walk
from weightsync.weight import Piece, Weight


class Sharded(Weight):
    """The whole tensor of which a DTensor holds this rank's part."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        self.dtype = tensor.dtype
        self.shape = tuple(tensor.shape)

    @property
    def identity(self) -> Hashable:
        # By the storage's own address: a rank may hold no element of a tensor, all ranks must
        # find the same ties.
        local = self._tensor._local_tensor
        storage = local.untyped_storage()._cdata, local.storage_offset(), local.stride()
        return "dtensor", storage, self.shape, self.dtype, self._tensor.placements

    @property
    def collective(self) -> bool:
        return _is_spread(self._tensor.device_mesh, self._tensor.placements)

    @property
    def among(self) -> frozenset[int] | None:
        mesh, placements = self._tensor.device_mesh, self._tensor.placements
        return _among(mesh, placements, tuple(mesh.get_coordinate()))

    @torch.no_grad()
    def read(self) -> torch.Tensor:
        tensor = self._tensor.detach()
        device = tensor.device_mesh.device_type
        if tensor.device.type != device:  # offloaded: collectives run where the mesh lives
            tensor = tensor.to(device)
        whole: torch.Tensor = tensor.full_tensor()
        return whole

    def pieces(self) -> list[Piece] | None:
        mesh, placements = self._tensor.device_mesh, self._tensor.placements
        if not self.collective:
            return None
        block = _block(self.shape, mesh, placements, tuple(mesh.get_coordinate()))
        if block is None:
            return None
        local = self._tensor._local_tensor.detach()
        if local.numel() == 0:
            return []
        shape, offsets, holders = block
        if shape != tuple(local.shape):
            raise SourceError(f"this rank holds {list(local.shape)} of it, not {list(shape)}")
        return [Piece(local, self.shape, offsets, dist.get_rank(), holders)]


@lru_cache(maxsize=4096)
def _is_spread(mesh: Any, placements: Any) -> bool:
    return mesh.size() > 1 and not all(placement.is_replicate() for placement in placements)


@lru_cache(maxsize=4096)
def _among(mesh: Any, placements: Any, coordinates: tuple[int, ...]) -> frozenset[int]:
    """The ranks that hold other parts than this one, and this one."""
    where = zip(coordinates, placements, strict=True)
    index = tuple(c if p.is_replicate() else slice(None) for c, p in where)
    return frozenset(mesh.mesh[index].flatten().tolist())


@lru_cache(maxsize=4096)
def _block(
    whole: tuple[int, ...], mesh: Any, placements: Any, coordinates: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None:
    """Shape, offsets and holders of what this rank holds of a tensor; None if it is no block."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not all(p.is_replicate() or _is_block(p) for p in placements):
        return None
    holders = _holders(mesh, placements, coordinates)
    if holders is None:
        return None
    shape, offsets = compute_local_shape_and_global_offset(whole, mesh, placements)
    return tuple(shape), tuple(offsets), holders


def _holders(mesh: Any, placements: Any, coordinates: tuple[int, ...]) -> tuple[int, ...] | None:
    """The ranks that hold the same as this one; None if torch does not say what each holds."""
    ranks = mesh.mesh
    for dimension in range(ranks.dim()):
        # torch's groups are in ascending order, by which it cuts and joins; the offsets that it
        # tells are by the mesh's own order.
        if ranks.size(dimension) > 1 and bool((ranks.diff(dim=dimension) <= 0).any()):
            return None
    where = zip(coordinates, placements, strict=True)
    index = tuple(slice(None) if p.is_replicate() else c for c, p in where)
    return tuple(ranks[index].flatten().tolist())


def _is_block(placement: Any) -> bool:
    """Whether what a rank holds is one block, of which torch says where it begins."""
    # _StridedShard (a dimension cut by FSDP2 and by tensor parallelism) is a block too, but
    # torch says where only in some releases: it is gathered.
    return bool(placement.is_shard()) and type(placement).__name__ == "Shard"


def weight_of(tensor: torch.Tensor) -> Weight | None:
    """The whole tensor of which a DTensor holds this rank's part; None if it is none.

    Raises:
        SourceError: this process is no rank of its mesh.
    """
    if not hasattr(tensor, "full_tensor"):
        return None
    if not hasattr(tensor, "placements"):
        raise SourceError("it is sharded over ranks in a way that is not known here; gather it")
    if tensor.device_mesh.get_coordinate() is None:  # type: ignore[attr-defined]
        raise SourceError("it is a DTensor over ranks that this process is none of")
    local = tensor._local_tensor  # type: ignore[attr-defined]
    if type(local).__name__ != "AsyncCollectiveTensor":
        reason = unsendable(local)
        if reason:
            raise SourceError(f"{reason} (of this rank's part)")
    return Sharded(tensor)


def visit_fsdp2(module: nn.Module, prefix: str, walk: Walk) -> None:
    """A module to which ``fully_shard`` was applied."""
    # Not by its name, which torch also gives to the class that it makes of a plain nn.Module.
    mixin: Any = next(base for base in type(module).__mro__ if "reshard" in vars(base))
    # As state_dict does: what a forward pass gathered may be older than the shards.
    module.reshard()  # type: ignore[operator]
    walk.visit(module, prefix, beyond=mixin)
