"""Reports as pictures, legible in a document: light, labelled directly, not by colour alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weightsync.bench.measures import Cell, Report, Result, best, milliseconds_text

OURS, OTHERS, INK, FAINT = "#0072B2", "#D55E00", "#222222", "#999999"
"""Blue and vermilion, which the colour-blind tell apart; ours have filled marks as well."""


def draw(report: Report, folder: Path) -> list[Path]:
    """One picture for each place in the grid, as PNG.

    Args:
        folder: made if it is not there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for cell in report.cells:
        if any(result.turns for result in cell.results):
            path = folder / f"{_file_name(cell)}.png"
            _save(_dumbbells(cell, _machine(report)), path)
            drawn.append(path)
    return drawn


def _file_name(cell: Cell) -> str:
    counts = (cell.tensors, "tensor"), (cell.receivers, "receiver")
    words = [f"{count}-{word}{'s' * (count > 1)}" for count, word in counts]
    return f"bench-{cell.nbytes / 1e9:.3g}GB-{'-'.join(words)}"


def _machine(report: Report) -> str:
    return f"{report.about['cores']} cores, {report.about['date']}"


def _dumbbells(cell: Cell, machine: str) -> Any:
    """For each way a line from when the trainer goes on to when all receivers hold the version."""
    figure, axes = _canvas(1.1 + 0.26 * len(cell.results))
    results = best([result for result in cell.results if result.turns and not result.bound])
    bounds = best([result for result in cell.results if result.turns and result.bound])
    for row, result in enumerate(reversed(results)):
        _dumbbell(axes, cell, row, result)
    for row, result in enumerate(bounds):
        _bound(axes, len(results) + row * 0.55 - 0.3, result)
    failed = [result.way for result in cell.results if result.error and not result.bound]
    axes.set_xscale("log")
    _limits(axes, [*results, *bounds])
    axes.set_yticks(range(len(results)), [result.way for result in reversed(results)])
    for label, result in zip(axes.get_yticklabels(), reversed(results), strict=True):
        label.set_color(OURS if result.ours else INK)
        label.set_fontweight("bold" if result.ours else "normal")
    axes.set_ylim(-0.7, len(results) + 0.55 * len(bounds))
    title = f"{cell.title}: ms (log) until the trainer goes on (|), and until all hold the version"
    axes.set_title(title, loc="left", fontsize=10, color=INK, x=-0.3)
    notes = [machine, *([f"not shown: {', '.join(failed)}"] if failed else [])]
    figure.text(0.01, 0.01, "; ".join(notes), fontsize=7.5, color=FAINT)
    return figure


def _canvas(height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height), dpi=130, facecolor="white")
    axes = figure.add_axes((0.235, 0.6 / height, 0.73, 1 - 1.0 / height))
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(left=False, colors=INK, labelsize=9)
    axes.grid(axis="x", color="#eeeeee")
    axes.set_axisbelow(True)
    return figure, axes


def _dumbbell(axes: Any, cell: Cell, row: int, result: Result) -> None:
    colour = OURS if result.ours else OTHERS
    fill = colour if result.ours else "white"
    blocked, total = result.median("blocked") * 1e3, result.median("total") * 1e3
    axes.plot([blocked, total], [row, row], color=colour, linewidth=2, solid_capstyle="butt")
    axes.plot([blocked], [row], "|", color=colour, markersize=10, markeredgewidth=2)
    axes.plot([total], [row], "o", color=colour, markerfacecolor=fill, markersize=7)
    torn = f", torn {result.torn} of {result.reads}" if result.torn else ""
    took = milliseconds_text(result.median("total"))
    words = f"{took} ms, {cell.speed(result) / 1e9:.2g} GB/s{torn}"
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.2}
    _label(axes, words, (total, row), 8, fontsize=8.5, color=INK, bbox=box)


def _bound(axes: Any, height: float, result: Result) -> None:
    total = result.median("total") * 1e3
    axes.plot([total, total], [-0.7, height], color=FAINT, linewidth=1, dashes=(4, 3), zorder=0)
    words = f"{result.way}, {milliseconds_text(result.median('total'))} ms"
    _label(axes, words, (total, height), 3, fontsize=7.5, color=FAINT)


def _label(axes: Any, words: str, at: tuple[float, float], right: float, **look: Any) -> None:
    """Words so many points to the right of a place, in the middle of its height."""
    axes.annotate(words, at, (right, 0), textcoords="offset points", va="center", **look)


def _limits(axes: Any, results: Sequence[Result]) -> None:
    """Room for the labels at the right."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    least = min(min(result.median("blocked"), result.median("total")) for result in results) * 1e3
    most = max(result.median("total") for result in results) * 1e3
    axes.set_xlim(least / 1.3, most * (most / least) ** 0.4 * 1.5)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, facecolor="white")
