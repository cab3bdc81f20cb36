"""What benchmarks of transports share: sets of weights, interleaved rounds, and the report.

A machine's speed drifts. So ways that are compared take turns in every round, and what is reported
is the median of each round's ratio.
"""

from __future__ import annotations

import json
import os
import statistics
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date

import torch
from rich.console import Console
from rich.table import Table

from weightsync.bench.measures import timed as timed

MB = 1 << 20


@dataclass(frozen=True)
class Shape:
    """``count`` float32 tensors of ``nbytes`` bytes each."""

    title: str
    count: int
    nbytes: int

    @property
    def total(self) -> int:
        return self.count * self.nbytes

    def weights(self, make: Callable[[int], torch.Tensor] = torch.randn) -> dict[str, torch.Tensor]:
        return {
            f"layers.{n // 10}.part{n % 10}.weight": make(self.nbytes // 4)
            for n in range(self.count)
        }


SHAPES = [
    Shape("300 tensors, 1.26 GB", 300, 4 * MB),
    Shape("20,000 tensors, 0.33 GB", 20_000, 16 << 10),
]


@dataclass(frozen=True)
class Group:
    """Ways to do the same with the same bytes.

    Attributes:
        ours: the way that is compared with the others.
        seconds: of each way, one entry for each round.
    """

    title: str
    nbytes: int
    ours: str
    seconds: dict[str, list[float]]

    def speed(self, way: str, other: str) -> float:
        """How many times as fast as another way."""
        pairs = zip(self.seconds[other], self.seconds[way], strict=True)
        return statistics.median(theirs / its for theirs, its in pairs)


def in_turns(
    groups: Sequence[dict[str, Callable[[], float]]], rounds: int, warm_up: int = 2
) -> list[dict[str, list[float]]]:
    """Do every way once in each round, each group's in an order that differs from round to round.

    Args:
        groups: one after the other; their ways return seconds.

    Returns:
        For each group the seconds of its ways, the first rounds left out.
    """
    seconds: list[dict[str, list[float]]] = [{way: [] for way in group} for group in groups]
    for number in range(warm_up + rounds):
        for group, its_seconds in zip(groups, seconds, strict=True):
            names = list(group)
            first = number % len(names)
            for way in names[first:] + names[:first]:
                its_seconds[way].append(group[way]())
    return [{way: took[warm_up:] for way, took in group.items()} for group in seconds]


def parser(description: str, rounds: int) -> ArgumentParser:
    made = ArgumentParser(description=description)
    made.add_argument("--rounds", type=int, default=rounds)
    made.add_argument("--json", metavar="FILE", help="write the figures to a file as well")
    return made


def report(title: str, groups: Sequence[Group], file: str | None) -> None:
    """A table of all ways, our speed against each other way in words, and the figures as JSON."""
    about = {
        "date": str(date.today()),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
    }
    table = Table(title=f"{title}; {about['cores']} cores, torch {about['torch']}, {about['date']}")
    table.add_column("what")
    table.add_column("way")
    for column in ("ms", "GB/s", "of the first"):
        table.add_column(column, justify="right")
    for group in groups:
        first = next(iter(group.seconds))
        for way, took in group.seconds.items():
            middle = statistics.median(took)
            table.add_row(
                group.title,
                way,
                f"{middle * 1e3:.1f}",
                f"{group.nbytes / middle / 1e9:.2f}",
                f"{group.speed(way, first):.2f}",
            )
        table.add_section()
    console = Console(width=None if Console().is_terminal else 130)
    console.print(table)
    for group in groups:
        for way in group.seconds:
            if way != group.ours:
                speed = group.speed(group.ours, way)
                console.print(f"{group.title}: {group.ours} at {speed:.2f} of the speed of {way}")
    if file:
        with open(file, "w") as out:
            json.dump({**about, "groups": [asdict(group) for group in groups]}, out, indent=1)
