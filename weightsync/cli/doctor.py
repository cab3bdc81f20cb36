"""``weightsync doctor``: whether this host can do what a run needs."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from weightsync.cli.output import FOUND, Json, console, emit, refusals
from weightsync.cli.sizes import parse_size

if TYPE_CHECKING:
    from weightsync.doctor import Finding, Subject

_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def doctor(
    path: Annotated[
        str, typer.Option(metavar="PATH", help="Where the run lies, or is going to.")
    ] = "/dev/shm",
    scheme: Annotated[
        str | None, typer.Option(metavar="URL", help="Look at what this scheme needs only.")
    ] = None,
    model_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Of the weights: is there room?")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The same, of a folder of safetensors files."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Look at what usually goes wrong on a host: memory, locks, limits, GPUs, vLLM, ports.

    Each finding is ok, a warning, a problem or not applicable, and has its remedy. No engine is
    started. Exit code 1: there is a problem.
    """
    from weightsync.doctor import examine

    with refusals(as_json):
        subject = _subject(path, scheme, model_size, model)
    found = examine(subject)
    if as_json:
        emit({"findings": [asdict(finding) for finding in found]})
    else:
        _print(found)
    raise typer.Exit(FOUND if any(each.state == "problem" for each in found) else 0)


def _subject(path: str, url: str | None, model_size: str | None, model: Path | None) -> Subject:
    from weightsync.doctor import Subject

    if model_size is not None and model is not None:
        raise ValueError("--model-size or --model, not both")
    nbytes = None if model_size is None else parse_size(model_size)
    if model is not None:
        nbytes = _size_of(model)
    if url is None:
        return Subject(os.path.abspath(path), None, nbytes)
    from weightsync.cli.target import scheme_of_url

    scheme = scheme_of_url(url)
    of_scheme = getattr(scheme, "path", path)
    return Subject(path if "://" in of_scheme else of_scheme, scheme, nbytes)


def _size_of(model: Path) -> int:
    """
    Raises:
        FileNotFoundError: there are no weights.
    """
    files = list(model.glob("*.safetensors")) if model.is_dir() else []
    if not files:
        raise FileNotFoundError(
            f"{model}: there are no safetensors files (--model-size says how many)"
        )
    return sum(file.stat().st_size for file in files)


def _print(found: list[Finding]) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in found:
        if finding.state != "not applicable":
            words = Text(finding.words)
            if finding.remedy:
                words.append(f"\n{finding.remedy}", style="italic")
            state = Text(finding.state, style=_STYLES[finding.state])
            table.add_row(Text(finding.check), state, words)
    out = console()
    out.print(table)
    idle = [f"{each.check} ({each.words})" for each in found if each.state == "not applicable"]
    if idle:
        out.print(Text(f"\nnot applicable: {'; '.join(idle)}", style="dim"))
    states = [finding.state for finding in found]
    problems, warnings = states.count("problem"), states.count("warning")
    out.print(f"\n{_count(problems, 'problem')}, {_count(warnings, 'warning')}")


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"
