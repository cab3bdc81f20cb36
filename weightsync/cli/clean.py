"""``weightsync clean``: what dead processes have left behind, listed or removed."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.padding import Padding
from rich.text import Text

from weightsync.cli.output import FOUND, Json, console, emit, harmless, refusals, seconds_words
from weightsync.errors import SchemeError
from weightsync.words import size

if TYPE_CHECKING:
    from weightsync.leftovers import Leftover
    from weightsync.scheme import WeightSyncScheme

_MEMORY = "/dev/shm"


def clean(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PATH|URL]...",
            help="Runs, or directories in which runs may lie. [/dev/shm]",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove them.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only list them, which is the default.")
    ] = False,
    kept: Annotated[
        bool, typer.Option("--kept", help="Also versions that DiskScheme keeps on purpose.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List what dead senders and killed processes have left; with --yes, remove it.

    What a living process uses stays, and so does whatever is not ours. Of runs on disks only what
    never became a version is removed, unless --kept is given.

    Exit code 1: something was to be removed, and could not be.
    """
    from weightsync.leftovers import find

    with refusals(as_json):
        if yes and dry_run:
            raise ValueError("--yes removes, --dry-run does not: one of them")
        paths = [path for target in targets or [_MEMORY] for path in _paths(target)]
        found = [leftover for path in paths for leftover in find(path, kept)]
    left = {each.path: each.remove() for each in found if each.kept is None} if yes else {}
    entries = [_entry(each, yes, left.get(each.path)) for each in found]
    if as_json:
        emit({"removed": yes, "leftovers": entries})
    else:
        _print(entries, yes)
    raise typer.Exit(FOUND if any(left.values()) else 0)


def _paths(target: str) -> list[str]:
    """
    Raises:
        SchemeError: a scheme that leaves nothing in directories. WeightSyncError: a symlink.
    """
    if "://" in target:
        from weightsync.cli.target import scheme_of_url

        return _paths_of(scheme_of_url(target))
    path = os.path.abspath(target)
    if os.path.islink(path) and path != _MEMORY:
        raise SchemeError(f"{path} is a symlink, which is not followed")
    return [path]


def _paths_of(scheme: WeightSyncScheme) -> list[str]:
    from weightsync.schemes.fallback import FallbackScheme

    if isinstance(scheme, FallbackScheme):
        return [path for each in scheme.schemes if _has_path(each) for path in _paths_of(each)]
    if not _has_path(scheme):
        raise SchemeError(f"{scheme.shown()}: it leaves nothing in a directory of this host")
    return [scheme.path]  # type: ignore[attr-defined]


def _has_path(scheme: WeightSyncScheme) -> bool:
    return scheme.run_kind is not None and not getattr(scheme, "is_remote", False)


def _entry(leftover: Leftover, yes: bool, failed: str | None) -> dict[str, Any]:
    kept = leftover.kept or failed
    return {
        "path": leftover.path,
        "what": leftover.what,
        "nbytes": leftover.nbytes,
        "seconds": max(0.0, time.time() - leftover.time),
        "kept": kept,
        "removed": yes and kept is None,
    }


def _print(entries: list[dict[str, Any]], yes: bool) -> None:
    going = [entry for entry in entries if entry["kept"] is None]
    staying = [entry for entry in entries if entry["kept"] is not None]
    _list("removed:" if yes else "would be removed (--yes removes):", going, "what")
    _list("stays:", staying, "kept")
    if going:
        total = sum(entry["nbytes"] for entry in going)
        places = "places" if len(going) > 1 else "place"
        console().print(f"{size(total)} in {len(going)} {places}")
    elif not entries:
        console().print("nothing of ours is there")


def _list(title: str, entries: list[dict[str, Any]], words: str) -> None:
    """A path has a line of its own, which is not broken: it may be copied from there."""
    out = console()
    if entries:
        out.print(title)
    for entry in entries:
        out.print(Text(f"  {entry['path']}"), soft_wrap=True)
        age = f"{seconds_words(entry['seconds'])} old"
        details = Text(f"{size(entry['nbytes'])}, {age}: {harmless(entry[words])}", style="dim")
        out.print(Padding(details, (0, 0, 0, 4)))
