"""How every command answers: a console for people, JSON for scripts, and the exit codes.

Exit codes: 0 all is well; 1 the command ran and found something wrong; 2 it was called wrongly, or
could not be done (words on stderr, a line of JSON with ``--json``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console

from weightsync.errors import WeightSyncError

FOUND = 1
REFUSED = 2


def console() -> Console:
    """Of stdout: in colours on a terminal, plain text elsewhere."""
    return Console(highlight=False)


def emit(document: dict[str, Any]) -> None:
    """One JSON document on stdout."""
    typer.echo(json.dumps(document, indent=1, default=str))


@contextmanager
def refusals(as_json: bool = False) -> Iterator[None]:
    """Turn what the library or the system refuses into words and exit code 2."""
    try:
        yield
    except (WeightSyncError, OSError, ValueError) as error:
        if as_json:
            emit({"error": str(error)})
        else:
            Console(stderr=True, highlight=False).print(f"weightsync: {error}", markup=False)
        raise typer.Exit(REFUSED) from None
