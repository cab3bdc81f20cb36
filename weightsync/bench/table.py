"""Reports for people: one table for each place in the grid."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from weightsync.bench.measures import Cell, Report, Result, best
from weightsync.bench.weights import size_text


@dataclass(frozen=True)
class Column:
    """``least``: columns of the terminal from which on it is shown."""

    title: str
    text: Callable[[Cell, Result], str]
    least: int = 0


def _milliseconds(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


COLUMNS = (
    Column("blocked", lambda cell, one: _milliseconds(one.median("blocked"))),
    Column("applied", lambda cell, one: _milliseconds(one.median("applied"))),
    Column("total", lambda cell, one: _milliseconds(one.median("total"))),
    Column("pause", lambda cell, one: _milliseconds(one.median("pause")), least=100),
    Column("cold", lambda cell, one: _milliseconds(one.median("total", cold=True)), least=100),
    Column("GB/s", lambda cell, one: f"{cell.speed(one) / 1e9:.2f}"),
    Column("limit", lambda cell, one: "bound" if one.bound else _percent(cell.share(one))),
    Column("CPU s", lambda cell, one: f"{one.median('processor'):.2f}"),
    Column("extra", lambda cell, one: _size(one.extra), least=90),
    Column("torn", lambda cell, one: f"{one.torn}/{one.reads}", least=80),
)

LEGEND = (
    "Medians of warm versions, in ms. blocked: the trainer's call; applied: from then until all "
    "receivers hold the version; total: both; pause: an engine stands still; cold: total of a "
    "first version; GB/s: of each receiver; limit: speed as a part of the bound's; CPU s: of all "
    "processes; extra: memory beside the weights; torn: reads that were not one version."
)


def _size(nbytes: int | None) -> str:
    return "" if nbytes is None else size_text(nbytes)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def rendered(report: Report, width: int) -> RenderableType:
    """All tables of a report, the legend, and what does not fit into so many columns."""
    shown = [column for column in COLUMNS if column.least <= width]
    left_out = [column.title for column in COLUMNS if column.least > width]
    about = report.about
    peers = ", ".join(f"{name} {version}" for name, version in about["peers"].items())
    parts: list[RenderableType] = [
        Text(f"{about['date']}, {about['cores']} cores, torch {about['torch']}; {peers}"),
        *(part for cell in report.cells for part in _cell(cell, shown)),
        Text(LEGEND, style="dim"),
    ]
    if left_out:
        names = ", ".join(left_out)
        parts.append(Text(f"Left out at {width} columns: {names}; --json has all.", style="dim"))
    return Group(*parts)


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
        if result.error:
            what = "not tried" if result.skipped else "failed"
            yield Text(
                f"  {result.way}: {what}: {result.error}", style="" if result.skipped else "red"
            )


def show(report: Report, console: Console) -> None:
    console.print(rendered(report, console.width))
