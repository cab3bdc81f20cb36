"""What a command is pointed at: a scheme's URL, an object store's, or the path of a run."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Annotated

import typer

from weightsync.errors import SchemeError

if TYPE_CHECKING:
    from weightsync.inspection import RunStatus
    from weightsync.scheme import WeightSyncScheme

Target = Annotated[
    str, typer.Argument(metavar="PATH|URL", help="A run's directory, or the URL of its scheme.")
]


def scheme_at(target: str) -> WeightSyncScheme | None:
    """The scheme of a run; None: a run lies there that nothing was published in yet.

    Raises:
        SchemeError: it is no URL of a scheme, or no run lies at the path.
        FileNotFoundError: there is nothing at the path.
        WeightSyncError: it is a symlink, or belongs to somebody else.
    """
    if "://" in target:
        return scheme_of_url(target)
    from weightsync.files import Directory

    path = os.path.abspath(target)
    run = Directory.open(path)
    from weightsync.scheme import known_schemes  # and torch, which takes seconds

    for cls in known_schemes():
        if cls.run_kind is not None and cls.run_kind.recognises(run):
            return cls.from_address("", path, {})
    if looks_empty(run.names()):
        return None
    raise SchemeError(
        f"{path} is not the directory of a run (a version's own lies inside of it; other schemes "
        "are named by their URL, like nccl://host:port)"
    )


def require_scheme(target: str) -> WeightSyncScheme:
    """As :func:`scheme_at`, where a version is needed."""
    scheme = scheme_at(target)
    if scheme is None:
        raise SchemeError(f"{target}: nothing was published there yet")
    return scheme


def inspect(target: str) -> RunStatus:
    """What a run looks like now.

    Raises:
        as :func:`scheme_at`, and as the scheme's ``inspect``.
    """
    scheme = scheme_at(target)
    if scheme is not None:
        return scheme.inspect()
    from weightsync.files import Directory
    from weightsync.run.look import Look

    return Look(Directory.open(os.path.abspath(target))).status("unknown", None)


def looks_empty(names: list[str]) -> bool:
    """Whether a directory holds what is in every run, and nothing else."""
    from weightsync.run.records import RECEIVERS, SENDER_LOCK, is_temporary

    ours = (SENDER_LOCK, RECEIVERS)
    return SENDER_LOCK in names and all(name in ours or is_temporary(name) for name in names)


def scheme_of_url(url: str) -> WeightSyncScheme:
    """The scheme of its own URL, or of that of an object store: ``s3://bucket/run42``.

    Raises:
        SchemeError: it is neither.
    """
    from weightsync.scheme import known_schemes, scheme_from_url

    name = url.partition("://")[0]
    known = any(cls.url_scheme == name for cls in known_schemes())
    return scheme_from_url(url if known or name not in _stores() else f"disk://{url}")


def _stores() -> list[str]:
    """The kinds of object stores that can be named here."""
    try:
        fsspec = importlib.import_module("fsspec")
    except ImportError:
        return []
    return list(fsspec.available_protocols())
