"""What this machine will give: a user's scheme, with weights of the shapes of a user's model."""

from __future__ import annotations

import os
from dataclasses import replace
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
        SchemeError: the URL is none; its path is in use, or has no parent; or it is for GPUs.
        NoRoomError: there is too little memory. Nothing was allocated.
    """
    scheme = ws.scheme_from_url(url)
    for member in members(scheme):
        _require_unused(member)
    bound = _bound(members(scheme)[0])
    way = Scheme("your scheme", _url_for_turns(scheme), bound, _folders(scheme))
    folder = _existing_parent(members(scheme)[0], places.shared)
    if words := needs(way, weights.nbytes, receivers).lacking(folder, places.disk):
        raise NoRoomError(f"{weights.title}, receivers: {receivers}: {words}")
    ways = [WAYS[bound], way]
    return Plan([(weights, receivers)], ways, rounds, length, places)


def _require_unused(scheme: WeightSyncScheme) -> None:
    if scheme.url_scheme == "cuda-ipc" or getattr(scheme, "backend", "gloo") == "nccl":
        raise SchemeError(
            f"{scheme.shown()}: its weights are on GPUs, which `make bench-gpu` and "
            "`make bench-multi-gpu` of the repository measure; here all is in ordinary memory"
        )
    for path in _paths(scheme):
        if os.path.lexists(path):
            raise SchemeError(
                f"{path} is there already. A benchmark makes runs of its own, and would disturb "
                "what lies there: give a path that does not exist"
            )
        if not Path(path).parent.is_dir():
            raise SchemeError(f"{path}: {Path(path).parent} is no folder, in which it is made")


def _paths(scheme: WeightSyncScheme) -> list[str]:
    """Folders of this machine that are to be a run's own, as a scheme's options name them."""
    named = [getattr(scheme, "cache", None)]
    if not _is_remote(scheme):
        named.append(getattr(scheme, "path", None))
    return [path for path in named if isinstance(path, str)]


def _is_remote(scheme: WeightSyncScheme) -> bool:
    return isinstance(scheme, ws.DiskScheme) and scheme.is_remote


def _folders(scheme: WeightSyncScheme) -> tuple[str, ...]:
    return tuple(dict.fromkeys(path for member in members(scheme) for path in _paths(member)))


def _url_for_turns(scheme: WeightSyncScheme) -> str:
    """The scheme with a run of its own for each turn, below the place that it names.

    A run that outlives its sender would give the next turn's receivers its newest version. What
    the scheme chose when it was made, a free port, is the same in all processes.
    """
    placed = [_below(member) for member in members(scheme)]
    whole = replace(scheme, schemes=placed) if isinstance(scheme, ws.FallbackScheme) else placed[0]
    url = whole.to_url().replace("{", "{{").replace("}", "}}")
    return url.replace("%7Bturn%7D", "{turn}").replace("%2F%7Bdisk%7D", "{disk}")


def _below(scheme: WeightSyncScheme) -> WeightSyncScheme:
    if isinstance(scheme, ws.DiskScheme) and scheme.is_remote:
        # Nobody removes a prefix of an object store but the sender that wrote there.
        cache = f"{scheme.cache or '/{disk}'}/cache"
        return replace(scheme, path=f"{scheme.path}/{{turn}}", cache=cache, keep_files=False)
    named = {name: getattr(scheme, name, None) for name in ("path", "reader_path", "cache")}
    below = {name: f"{path}/run" for name, path in named.items() if isinstance(path, str)}
    return replace(scheme, **below) if below else scheme  # type: ignore[type-var]


def _bound(scheme: WeightSyncScheme) -> str:
    if isinstance(scheme, ws.NCCLScheme):
        return "plain socket"
    return "plain file" if isinstance(scheme, ws.DiskScheme) else "plain copy"


def _existing_parent(scheme: WeightSyncScheme, otherwise: str) -> str:
    """Where a scheme's buffers will lie, if that is a folder."""
    parent = Path(getattr(scheme, "path", otherwise)).parent
    return str(parent) if parent.is_dir() else otherwise
