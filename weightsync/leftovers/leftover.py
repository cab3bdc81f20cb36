"""One thing that was left behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Leftover:
    """
    Attributes:
        path: where it is. what: what it is, in a few words.
        nbytes: that it occupies. time: when it was last changed, in seconds since 1970.
        kept: why it is not removed; None: it may be.
        remove: removes it, after looking once more, under locks, whether it may. Returns why not;
            None: it is gone.
    """

    path: str
    what: str
    nbytes: int
    time: float
    kept: str | None
    remove: Callable[[], str | None]


def occupied(path: str) -> tuple[int, float]:
    """Bytes below a path, and when something there was last changed. Follows no symlinks."""
    status = os.lstat(path)
    nbytes, newest = status.st_blocks * 512, status.st_mtime
    for folder, _, files in os.walk(path, onerror=lambda error: None):
        for name in files:
            try:
                status = os.lstat(f"{folder}/{name}")
            except FileNotFoundError:
                continue
            nbytes += status.st_blocks * 512
            newest = max(newest, status.st_mtime)
    return nbytes, newest
