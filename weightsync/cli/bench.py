"""``weightsync bench``: the suite, or what this machine will give to one scheme and one model."""

from __future__ import annotations

import json
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from weightsync.cli.output import FOUND, console, emit, refusals

if TYPE_CHECKING:
    from weightsync.bench.measures import Report
    from weightsync.bench.suite import Plan
    from weightsync.bench.turn import Length, Places
    from weightsync.bench.way import Way

_SIZES, _TENSORS, _RECEIVERS = "0.1,1,4", "10,300,20000", "1,2,4"
_QUICK = "0.01", "10", "1"
_STDOUT = Path("-")


def bench(
    scheme: Annotated[str | None, typer.Option(help="URL of a scheme to try here.")] = None,
    model: Annotated[
        Path | None, typer.Option(help="A config.json, or a checkpoint's folder: its shapes.")
    ] = None,
    suite: Annotated[bool, typer.Option("--suite", help="Every way, in a grid of sizes.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A grid of one small size.")] = False,
    ways: Annotated[str | None, typer.Option(help="Names of ways, by commas.")] = None,
    sizes: Annotated[str | None, typer.Option(help=f"GB, by commas; {_SIZES}.")] = None,
    tensors: Annotated[str | None, typer.Option(help=f"Counts; {_TENSORS}.")] = None,
    receivers: Annotated[str | None, typer.Option(help=f"Counts; {_RECEIVERS}.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each way.")] = 3,
    warm: Annotated[
        int, typer.Option(min=1, help="Timed versions of a turn, from the third on.")
    ] = 2,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for each step.")] = 120.0,
    directory: Annotated[
        Path | None, typer.Option(help="On the disk to measure; the temporary directory.")
    ] = None,
    to_json: Annotated[
        Path | None,
        typer.Option("--json", help="All figures into a file; - is stdout, without tables."),
    ] = None,
    plots: Annotated[Path | None, typer.Option(help="Draw pictures into a folder.")] = None,
    show: Annotated[Path | None, typer.Option(help="A file of --json once more.")] = None,
) -> None:
    """Measure: what updates cost on this machine, by our schemes and by others' ways.

    With --scheme: your scheme, with weights of your model's shapes (or --sizes, --tensors).

    With --suite: every way that runs here, side by side. GPUs: `make bench-gpu` of the repository.

    Exit code 1: a way failed, or what receivers held of a scheme of ours was torn or stale.
    """
    with refusals(as_json=to_json == _STDOUT):
        _require_packages(plots)
        from weightsync.bench.measures import Report
        from weightsync.bench.turn import Length, Places

        if show is not None:
            report = Report.from_dict(json.loads(show.read_text()))
        else:
            if scheme is not None and not suite:
                _require_one(model, ways, quick, sizes, tensors, receivers)
            grid = _grid(sizes, tensors, receivers, quick, whole=suite)
            places = Places(disk=str(directory or tempfile.gettempdir()))
            plan = _plan(
                What(scheme, model, suite, ways), grid, rounds, Length(warm, True, timeout), places
            )
            report = _run(plan)
        _write(report, to_json, plots)
        if scheme is not None and to_json != _STDOUT:
            console().print(_needed(report))
    if any(result.wrong for cell in report.cells for result in cell.results):
        raise typer.Exit(FOUND)


def _require_packages(plots: Path | None) -> None:
    """Before anything is measured, which takes long."""
    import importlib.util

    wanted = ["psutil", *(["matplotlib"] if plots else [])]
    lacking = [name for name in wanted if importlib.util.find_spec(name) is None]
    if lacking:
        raise ValueError(f"{' and '.join(lacking)} needed: pip install 'weightsync[bench]'")


def _require_one(
    model: Path | None,
    ways: str | None,
    quick: bool,
    sizes: str | None,
    tensors: str | None,
    receivers: str | None,
) -> None:
    """A scheme is measured in one place of the grid; an option that had no effect is refused."""
    if ways is not None:
        raise ValueError("--ways goes with --suite; --scheme has its own bound beside it")
    if model is not None and (quick or sizes or tensors):
        raise ValueError("--model has its own sizes and tensors: no --sizes, --tensors or --quick")
    for text, what in (
        (sizes, "size"),
        (tensors, "count of tensors"),
        (receivers, "count of receivers"),
    ):
        if text and "," in text:
            raise ValueError(f"--scheme takes one {what}, not {text}; lists are for --suite")


@dataclass(frozen=True)
class What:
    """What is to be measured, as the options say it."""

    scheme: str | None
    model: Path | None
    suite: bool
    ways: str | None


Grid = tuple[list[float], list[int], list[int]]


def _grid(
    sizes: str | None, tensors: str | None, receivers: str | None, quick: bool, whole: bool
) -> Grid:
    usual = _QUICK if quick else (_SIZES, _TENSORS, _RECEIVERS) if whole else ("1", "300", "1")
    return (
        _numbers("sizes", sizes or usual[0], float),
        _numbers("tensors", tensors or usual[1], int),
        _numbers("receivers", receivers or usual[2], int),
    )


N = TypeVar("N", int, float)


def _numbers(option: str, text: str, kind: type[N]) -> list[N]:
    try:
        numbers = [kind(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < float("inf") for number in numbers):
        raise ValueError(f"--{option} {text}: numbers above 0 were expected, by commas")
    return numbers


def _plan(what: What, grid: Grid, rounds: int, length: Length, places: Places) -> Plan:
    from weightsync.bench.here import plan_for
    from weightsync.bench.model import weights_of
    from weightsync.bench.suite import Plan
    from weightsync.bench.weights import uniform

    if bool(what.scheme) == what.suite:
        raise ValueError("either --scheme URL (with --model), or --suite")
    if what.suite and what.model is not None:
        raise ValueError("--model goes with --scheme; a suite has --sizes and --tensors")
    sizes, tensors, receivers = grid
    sets = [uniform(count, int(size * 1e9)) for size in sizes for count in tensors]
    if what.scheme:
        weights = weights_of(what.model) if what.model else sets[0]
        return plan_for(what.scheme, weights, receivers[0], rounds, length, places)
    cells = [(weights, count) for weights in sets for count in receivers]
    return Plan(cells, _chosen(what.ways), rounds, length, places)


def _chosen(names: str | None) -> list[Way]:
    """The ways of these names, and the bounds that they are compared with."""
    from weightsync.bench.ways import WAYS

    if names is None:
        return list(WAYS.values())
    wanted = [name.strip() for name in names.split(",")]
    unknown = [name for name in wanted if name not in WAYS]
    if unknown:
        raise ValueError(f"no way is called {unknown[0]!r}; there are: {', '.join(WAYS)}")
    limits = {WAYS[name].limit for name in wanted}
    return [way for name, way in WAYS.items() if name in wanted or name in limits]


def _run(plan: Plan) -> Report:
    from weightsync.bench.suite import run_suite

    with _interruptible(), _progress(plan.turns) as done:
        return run_suite(plan, done)


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM as Ctrl-C: what was begun is taken down."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _progress(turns: int) -> Iterator[Callable[[str], object]]:
    """A bar on stderr, if that is a terminal."""
    stderr = Console(stderr=True)
    columns = (
        BarColumn(20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as bar:
        task = bar.add_task("", total=turns)
        began = 0

        def done(what: str) -> None:
            nonlocal began
            bar.update(task, completed=began, description=what)
            began += 1

        yield done


def _needed(report: Report) -> str:
    from weightsync.bench.weights import size_text

    result = report.cells[0].results[-1]
    return f"needed in memory: {size_text(result.needed)}, for trainer, receivers and buffers"


def _write(report: Report, to_json: Path | None, plots: Path | None) -> None:
    from weightsync.bench.plots import draw
    from weightsync.bench.table import show

    drawn = draw(report, plots) if plots else []
    if to_json == _STDOUT:
        emit(report.to_dict())
        return
    if to_json is not None:
        to_json.write_text(json.dumps(report.to_dict(), indent=1))
    show(report, console())
    for path in drawn:
        console().print(f"drawn: {path}", markup=False)
    if report.about.get("gpus"):
        console().print("GPUs: `make bench-gpu` and `make bench-multi-gpu` of the repository")
