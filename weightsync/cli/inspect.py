"""``weightsync inspect``: what a run looks like from outside, once or as it changes."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weightsync.cli.output import FOUND, Json, console, emit, refusals
from weightsync.cli.target import Target

if TYPE_CHECKING:
    from weightsync.inspection import RunStatus

_EVERY = 0.5
"""Seconds between two looks."""

_GONE = "the run is gone"

_WRONG = ("dead", "failed", "unusable")


def inspect(
    target: Target,
    watch: Annotated[bool, typer.Option("--watch", help="Go on until Ctrl-C.")] = False,
    as_json: Json = False,
) -> None:
    """Show a run: its versions, its sender, and where its receivers stand.

    Exit code 1: something could not be read, a receiver is dead, failed or unusable, or the sender
    is dead and did not end by itself. With --watch --json there is one line for each change.
    """
    from weightsync.cli.target import inspect as look

    with refusals(as_json):
        status = look(target)
        if not watch:
            _show(status, as_json)
            raise typer.Exit(FOUND if _is_wrong(status) else 0)
        with suppress(KeyboardInterrupt):
            if as_json:
                _print_changes(target, status)
            else:
                _show_changes(target, status)


def _is_wrong(status: RunStatus) -> bool:
    killed = status.sender_alive is False and not status.sender_ended
    return killed or _has_trouble(status)


def _has_trouble(status: RunStatus) -> bool:
    members = any(map(_has_trouble, status.members))
    return bool(status.problems) or members or any(r.state in _WRONG for r in status.receivers)


def _show(status: RunStatus, as_json: bool) -> None:
    if as_json:
        emit(status.to_dict(time.time()))
    else:
        from weightsync.cli.run_view import view

        console().print(view(status, time.time()))


def _looks(target: str, first: RunStatus) -> Iterator[RunStatus | str]:
    """The run again and again, or words of why it cannot be seen just now."""
    from weightsync.cli.target import inspect as look
    from weightsync.errors import WeightSyncError

    yield first
    while True:
        time.sleep(_EVERY)
        try:
            yield look(target)
        except FileNotFoundError:
            yield _GONE
        except (OSError, WeightSyncError) as error:
            yield str(error)


def _changes(target: str, first: RunStatus) -> Iterator[RunStatus | str]:
    """The same, where it differs from the last look."""
    former: RunStatus | str | None = None
    for seen in _looks(target, first):
        if seen != former:
            yield seen
            former = seen


def _print_changes(target: str, first: RunStatus) -> None:
    for seen in _changes(target, first):
        if isinstance(seen, str):
            document: dict[str, Any] = {"path": target, "error": seen}
        else:
            document = seen.to_dict(time.time())
        typer.echo(json.dumps(document))


def _show_changes(target: str, first: RunStatus) -> None:
    """In a terminal: on a screen of its own, whose ages go on. Elsewhere: one after the other."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from weightsync.cli.run_view import view

    out, last = console(), first
    if not out.is_terminal:
        for seen in _changes(target, first):
            out.print(seen if isinstance(seen, str) else view(seen, time.time()), "")
        return
    frame = Group(view(first, time.time()))
    with suppress(KeyboardInterrupt), Live(console=out, screen=True, auto_refresh=False) as live:
        for seen in _looks(target, first):
            last = _last_seen(seen, last)
            above = [Text(seen, style="yellow"), Text()] if isinstance(seen, str) else []
            frame = Group(*above, view(last, time.time()))
            live.update(frame, refresh=True)
    out.print(frame)  # the screen of its own is closed, and what it showed gone


def _last_seen(seen: RunStatus | str, last: RunStatus) -> RunStatus:
    """What is shown of a run that may not be seen any more."""
    killed = last.sender_alive is False and last.sender and not last.sender_ended
    if seen == _GONE and not killed:  # a killed one's may be removed, by `clean`
        return dataclasses.replace(last, sender_alive=False, sender_ended=True)
    return last if isinstance(seen, str) else seen
