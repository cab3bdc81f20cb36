"""How every command answers: a console for people, JSON for scripts, and the exit codes.

Exit codes: 0 all is well; 1 the command ran and found something wrong; 2 it was called wrongly, or
could not be done (words on stderr, a line of JSON with ``--json``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console

from weightsync.errors import WeightSyncError

FOUND = 1
REFUSED = 2

Json = Annotated[bool, typer.Option("--json", help="Answer with JSON, for scripts.")]


def console() -> Console:
    """Of stdout: in colours on a terminal, plain text elsewhere."""
    return Console(highlight=False)


def harmless(text: str) -> str:
    """What another process wrote, for a terminal: nothing in it moves the cursor or worse."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def seconds_words(seconds: float) -> str:
    """``0.4 s``, ``12 s``, ``5 min``, ``3 h``, ``12 days``."""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    for unit, one, most in (("s", 1, 120), ("min", 60, 120), ("h", 3600, 48)):
        if seconds < one * most:
            return f"{seconds / one:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"


def tensors_words(count: int) -> str:
    return f"{count:,} tensor{'' if count == 1 else 's'}"


def emit(document: dict[str, Any]) -> None:
    """One JSON document on stdout."""
    typer.echo(json.dumps(document, indent=1, default=str))


@contextmanager
def refusals(as_json: bool = False) -> Iterator[None]:
    """Turn what the library or the system refuses into words and exit code 2."""
    try:
        yield
    except BrokenPipeError:
        raise  # whoever read has heard enough
    except (WeightSyncError, OSError, ValueError) as error:
        if as_json:
            emit({"error": _words(error)})
        else:
            words = harmless(f"weightsync: {_words(error)}")
            Console(stderr=True, highlight=False).print(words, markup=False, soft_wrap=True)
        raise typer.Exit(REFUSED) from None


def _words(error: Exception) -> str:
    """Of the system's errors without their numbers."""
    if isinstance(error, FileNotFoundError) and error.filename:
        return f"{error.filename}: there is nothing"
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)
