"""Where a run lies."""

from __future__ import annotations

import os

from weightsync.errors import SchemeError


def run_path(option: str, value: object) -> str:
    """The path of a run's directory, in one spelling, as an option of a scheme gives it.

    Raises:
        SchemeError: it is none; names the option.
    """
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str) or not path.startswith("/") or "\0" in path:
        raise SchemeError(f"{option}={value!r}: an absolute path was expected")
    path = os.path.normpath(path)
    if path == "/" or path.startswith("//"):
        raise SchemeError(f"{option}={value!r}: a directory of the run's own was expected")
    return path
