"""What this machine will give: a user's scheme, with weights of the shapes of a user's model."""

from __future__ import annotations

import os
from pathlib import Path

import weightsync as ws
from weightsync.bench.suite import Plan, needs
from weightsync.bench.turn import Length, Places
from weightsync.bench.ways import WAYS
from weightsync.bench.ways.scheme import Scheme, members
from weightsync.bench.weights import WeightSet
from weightsync.errors import NoRoomError, SchemeError
from weightsync.scheme import WeightSyncScheme


def plan_for(
    url: str, weights: WeightSet, receivers: int, rounds: int, length: Length, places: Places
) -> Plan:
    """A suite of two ways: the scheme, and the bound that it is compared with.

    Raises:
        SchemeError: the URL is none; its path is in use; or it is for GPUs.
        NoRoomError: there is too little memory. Nothing was allocated.
    """
    scheme = ws.scheme_from_url(url)
    for member in members(scheme):
        _require_unused(member)
    bound = _bound(members(scheme)[0])
    way = Scheme("your scheme", url.replace("{", "{{").replace("}", "}}"), bound)
    folder = _existing_parent(members(scheme)[0], places.shared)
    if words := needs(way, weights.nbytes, receivers).lacking(folder, places.disk):
        raise NoRoomError(f"{weights.title}, receivers: {receivers}: {words}")
    ways = [WAYS[bound], way]
    return Plan([(weights, receivers)], ways, rounds, length, places)


def _require_unused(scheme: WeightSyncScheme) -> None:
    if scheme.url_scheme == "cuda-ipc" or getattr(scheme, "backend", "gloo") == "nccl":
        raise SchemeError(
            f"{scheme.to_url()}: its weights are on GPUs, which benchmarks/gpu.py and "
            "benchmarks/multi_gpu.py measure; here all is in ordinary memory"
        )
    path = getattr(scheme, "path", None)
    if isinstance(path, str) and os.path.lexists(path):
        raise SchemeError(
            f"{path} is there already. A benchmark makes a run of its own, and would disturb what "
            "lies there: give a path that does not exist"
        )


def _bound(scheme: WeightSyncScheme) -> str:
    if isinstance(scheme, ws.NCCLScheme):
        return "plain socket"
    return "plain file" if isinstance(scheme, ws.DiskScheme) else "plain copy"


def _existing_parent(scheme: WeightSyncScheme, otherwise: str) -> str:
    """Where a scheme's buffers will lie, if that is a folder."""
    parent = Path(getattr(scheme, "path", otherwise)).parent
    return str(parent) if parent.is_dir() else otherwise
