"""How far a long command has come: a bar on stderr, if that is a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

Advance = Callable[[int], None]
"""Called with the bytes that were done since it was called last."""


@contextmanager
def progress_of(what: str, nbytes: int) -> Iterator[Advance]:
    """A bar while the block runs; it is gone afterwards."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bars:
        bar = bars.add_task(what, total=nbytes)
        yield lambda done: bars.advance(bar, done)
