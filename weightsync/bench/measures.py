"""What is measured, and what is made of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Figure = Literal["blocked", "applied", "total", "pause", "processor"]


@dataclass(frozen=True)
class Move:
    """One version on its way. Seconds.

    Attributes:
        cold: the first one of a turn: buffers, pages and connections are new.
        blocked: the trainer's call.
        applied: from the end of that call, the commit, until every receiver holds the version; 0
            if they did before.
        total: from the beginning of the call until every receiver holds the version.
        pause: for which the slowest receiver's engine would have to stand still.
        processor: of all processes together.
    """

    cold: bool
    blocked: float
    applied: float
    total: float
    pause: float
    processor: float


@dataclass(frozen=True)
class Taken:
    """What one turn of a way gave.

    Attributes:
        moves: the cold one and the warm ones.
        extra: bytes held beside the weights of trainer and receivers, at most; None: not looked at.
        reads: how often a receiver compared what it held, and of these ``torn``: what it held was
            not one version; and ``stale``: one version, but not one that it could have received.
            Timed versions are among them, and a race in which nobody waits.
    """

    moves: tuple[Move, ...]
    extra: int | None
    reads: int
    torn: int
    stale: int = 0


@dataclass(frozen=True)
class Result:
    """A way in one cell of the grid: its turns, or why there are none.

    Attributes:
        turns: one of each round.
        needed: bytes that it was expected to need, for trainer, receivers and its buffers.
        error: in the way's own words.
        skipped: it was not tried, for the reason in ``error``.
    """

    way: str
    about: str
    ours: bool
    bound: bool
    limit: str
    needed: int = 0
    turns: tuple[Taken, ...] = ()
    error: str | None = None
    skipped: bool = False

    @property
    def reads(self) -> int:
        return sum(turn.reads for turn in self.turns)

    @property
    def torn(self) -> int:
        return sum(turn.torn for turn in self.turns)

    @property
    def stale(self) -> int:
        return sum(turn.stale for turn in self.turns)

    @property
    def wrong(self) -> bool:
        """It failed, or it is ours and receivers did not hold what they should."""
        failed = self.error is not None and not self.skipped
        return failed or (self.ours and bool(self.torn or self.stale))

    @property
    def extra(self) -> int | None:
        """Bytes."""
        looked = [turn.extra for turn in self.turns if turn.extra is not None]
        return max(looked, default=None)

    def median(self, figure: Figure, cold: bool = False) -> float:
        """Seconds; over all rounds, of the warm versions or of the cold ones."""
        return statistics.median(
            value for turn in self.turns for value in values(turn, figure, cold)
        )

    def share(self, limit: Result | None) -> float | None:
        """Its speed as a part of a bound's: median of the ratios of the rounds that both did."""
        if limit is None or not self.turns or not limit.turns:
            return None
        return statistics.median(
            statistics.median(values(theirs, "total")) / statistics.median(values(own, "total"))
            for theirs, own in zip(limit.turns, self.turns, strict=False)
        )


def milliseconds_text(seconds: float) -> str:
    """Three digits or more, without a unit."""
    value = seconds * 1e3
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def timed(function: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def values(turn: Taken, figure: Figure, cold: bool = False) -> list[float]:
    return [getattr(move, figure) for move in turn.moves if move.cold == cold]


@dataclass(frozen=True)
class Cell:
    """One place in the grid."""

    title: str
    nbytes: int
    tensors: int
    receivers: int
    results: tuple[Result, ...]

    def result(self, way: str) -> Result | None:
        return next((result for result in self.results if result.way == way), None)

    def share(self, result: Result) -> float | None:
        return result.share(self.result(result.limit))

    def speed(self, result: Result) -> float:
        """Bytes a second, of each receiver, from call to applied."""
        return self.nbytes / result.median("total")


@dataclass(frozen=True)
class Report:
    """All that a run of the suite found, and on what."""

    about: dict[str, Any]
    cells: tuple[Cell, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON: seconds and bytes, as :class:`Move` and others say it."""
        return {"format": FORMAT, "units": UNITS, **asdict(self)}

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Report:
        """
        Raises:
            ValueError: it is none that :meth:`to_dict` made.
        """
        try:
            if document["format"] != FORMAT:
                raise ValueError(f"its format is {document['format']!r:.40}, not {FORMAT!r}")
            return cls(document["about"], tuple(map(_cell, document["cells"])))
        except (KeyError, TypeError) as error:
            raise ValueError(f"no report of weightsync bench: {error!r:.200}") from None


FORMAT = "weightsync bench 1"
UNITS = {
    "blocked": "seconds of the trainer's call",
    "applied": "seconds from the end of the call until every receiver holds the version",
    "total": "seconds from the beginning of the call until every receiver holds the version",
    "pause": "seconds for which the slowest receiver's engine would stand still",
    "processor": "seconds of all processes together",
    "needed": "bytes expected to be needed, for trainer, receivers and buffers",
    "extra": "bytes held at most beside the weights of trainer and receivers",
    "torn": "reads that were not one version, of so many reads",
    "stale": "reads that were one version, but another one than was sent",
}


def _cell(document: dict[str, Any]) -> Cell:
    return Cell(**{**document, "results": tuple(map(_result, document["results"]))})


def _result(document: dict[str, Any]) -> Result:
    return Result(**{**document, "turns": tuple(map(_taken, document["turns"]))})


def _taken(document: dict[str, Any]) -> Taken:
    return Taken(**{**document, "moves": tuple(Move(**move) for move in document["moves"])})


def best(results: Sequence[Result]) -> list[Result]:
    """Those that ran, the fastest first; then the others."""
    return sorted(results, key=lambda one: one.median("total") if one.turns else float("inf"))
