"""The grid: every way at every size, in interleaved rounds."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date

import torch

import weightsync
from weightsync.bench.measures import Cell, Report, Result, Taken
from weightsync.bench.memory import Needs, available
from weightsync.bench.turn import Length, Places, WayError, prepare, take_turn
from weightsync.bench.way import Way
from weightsync.bench.weights import WeightSet, size_text

PEERS = ("torchrl", "tensordict", "safetensors", "ray", "torchstore", "vllm", "numpy", "psutil")


@dataclass(frozen=True)
class Plan:
    """What a suite does.

    Attributes:
        cells: sets of weights, and for each the number of receivers.
        ways: names of bounds must be among them for ratios to be there.
    """

    cells: Sequence[tuple[WeightSet, int]]
    ways: Sequence[Way]
    rounds: int = 3
    length: Length = field(default_factory=Length)
    places: Places = field(default_factory=Places)

    @property
    def turns(self) -> int:
        return len(self.cells) * len(self.ways) * self.rounds


def run_suite(plan: Plan, done: Callable[[str], object] = lambda what: None) -> Report:
    """
    Args:
        done: called before each turn with what is about to be done, and once more at the end.
    """
    prepare(plan.ways)
    about = _about(plan)
    cells = [_run_cell(plan, weights, receivers, done) for weights, receivers in plan.cells]
    done("")
    return Report(about, tuple(cells))


def _run_cell(
    plan: Plan, weights: WeightSet, receivers: int, done: Callable[[str], object]
) -> Cell:
    title = f"{weights.title}, {receivers} receiver{'s' * (receivers > 1)}"
    results = {way.name: _blank(way, weights, receivers, plan.places) for way in plan.ways}
    for number in range(plan.rounds):
        # Another order in each round: nobody always comes after the same one.
        for way in [*plan.ways[number % len(plan.ways) :], *plan.ways[: number % len(plan.ways)]]:
            done(f"{title}: {way.name}")
            result = results[way.name]
            if result.error is None:
                length = replace(plan.length, probe=plan.length.probe and number == 0)
                taken = _try(way, weights, receivers, length, plan.places)
                results[way.name] = (
                    replace(result, error=taken)
                    if isinstance(taken, str)
                    else replace(result, turns=(*result.turns, taken))
                )
    return Cell(title, weights.nbytes, len(weights.specs), receivers, tuple(results.values()))


def _blank(way: Way, weights: WeightSet, receivers: int, places: Places) -> Result:
    needed = needs(way, weights.nbytes, receivers)
    result = Result(way.name, way.about, way.ours, way.bound, way.limit, needed.memory)
    missing = way.missing() or needed.lacking(places.shared, places.disk)
    return replace(result, error=missing, skipped=True) if missing else result


def needs(way: Way, nbytes: int, receivers: int) -> Needs:
    """For the weights of trainer and receivers, and the way's own buffers."""
    return Needs((1 + receivers) * nbytes) + way.needs(nbytes, receivers)


def _try(
    way: Way, weights: WeightSet, receivers: int, length: Length, places: Places
) -> Taken | str:
    """What a turn gave, or its words."""
    try:
        return take_turn(way, weights, receivers, length, places)
    except WayError as error:
        return str(error)


def _about(plan: Plan) -> dict[str, object]:
    versions = {}
    for peer in PEERS:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[peer] = importlib.metadata.version(peer)
    return {
        "date": str(date.today()),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": torch.cuda.device_count(),
        "load before": round(os.getloadavg()[0], 1),
        "memory free": size_text(available()),
        "python": platform.python_version(),
        "weightsync": weightsync.__version__,
        "torch": torch.__version__,
        "peers": versions,
        "rounds": plan.rounds,
        "warm versions of a round": plan.length.warm,
    }
