"""Reports for people: one table for each place in the grid."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from weightsync.bench.measures import Cell, Figure, Report, Result, best, milliseconds_text
from weightsync.bench.weights import size_text


@dataclass(frozen=True)
class Column:
    """
    Attributes:
        meaning: for the legend.
        least: columns of the terminal from which on it is shown.
    """

    title: str
    text: Callable[[Cell, Result], str]
    meaning: str
    least: int = 0


def _time(figure: Figure, meaning: str, cold: bool = False, least: int = 0) -> Column:
    """A median in milliseconds."""
    title = "cold" if cold else figure
    return Column(
        title, lambda cell, one: milliseconds_text(one.median(figure, cold)), meaning, least
    )


def _limit(cell: Cell, result: Result) -> str:
    """Bounds differ from row to row: a part of a file's speed may be more than all of it."""
    share = cell.share(result)
    if result.bound or share is None:
        return "bound" * result.bound
    return f"{share:.0%} {result.limit.removeprefix('plain ')}"


def _size(nbytes: int | None) -> str:
    return "" if nbytes is None else size_text(nbytes)


COLUMNS = (
    _time("blocked", "the trainer's call"),
    _time("applied", "from then until all receivers hold the version"),
    _time("total", "both"),
    _time("pause", "an engine stands still"),
    _time("total", "total of a first version", cold=True, least=110),
    Column("GB/s", lambda cell, one: f"{cell.speed(one) / 1e9:.2f}", "of each receiver"),
    Column("limit", _limit, "speed as a part of a plain copy's, file's or socket's"),
    Column("CPU s", lambda cell, one: f"{one.median('processor'):.2f}", "of all processes", 110),
    Column("extra", lambda cell, one: _size(one.extra), "memory beside the weights", 110),
    Column(
        "torn", lambda cell, one: f"{one.torn}/{one.reads}", "reads that were not one version", 80
    ),
)


def rendered(report: Report, width: int) -> RenderableType:
    """All tables of a report, the legend, and what does not fit into so many columns."""
    shown = [column for column in COLUMNS if column.least <= width]
    left_out = [column.title for column in COLUMNS if column.least > width]
    about = report.about
    peers = ", ".join(f"{name} {version}" for name, version in about["peers"].items())
    parts: list[RenderableType] = [
        Text(f"{about['date']}, {about['cores']} cores, torch {about['torch']}; {peers}"),
        *(part for cell in report.cells for part in _cell(cell, shown)),
        Text(_legend(shown), style="dim"),
    ]
    if left_out:
        names = ", ".join(left_out)
        parts.append(Text(f"Left out at {width} columns: {names}; --json has all.", style="dim"))
    return Group(*parts)


def _legend(columns: list[Column]) -> str:
    meanings = "; ".join(f"{column.title}: {column.meaning}" for column in columns)
    return f"Medians of warm versions (from the third on), in ms. {meanings}."


def _cell(cell: Cell, columns: list[Column]) -> Iterator[RenderableType]:
    table = Table(title=cell.title, title_justify="left", title_style="bold", padding=(0, 0, 0, 1))
    table.add_column("way", overflow="fold")
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    for result in best(cell.results):
        if result.turns:
            style = "bold" if result.ours else "dim" if result.bound else ""
            figures = [column.text(cell, result) for column in columns]
            table.add_row(result.way, *figures, style=style)
    yield table if table.row_count else Text(cell.title, style="bold")
    for result in cell.results:
        if result.stale:
            yield Text(
                f"  {result.way}: {result.stale} of {result.reads} reads were stale: whole, but "
                "another version than was sent",
                style="red",
            )
        if result.error:
            what = "not tried" if result.skipped else "failed"
            yield Text(
                f"  {result.way}: {what}: {result.error}", style="" if result.skipped else "red"
            )


def show(report: Report, console: Console) -> None:
    console.print(rendered(report, console.width))
