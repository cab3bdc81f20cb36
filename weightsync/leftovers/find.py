"""Finding what was left at a path: in a run, or among other things in a directory."""

from __future__ import annotations

import os
from collections.abc import Iterator

from weightsync.errors import WeightSyncError
from weightsync.leftovers.folders import leftover_folder
from weightsync.leftovers.leftover import Leftover
from weightsync.leftovers.runs import leftover_run


def find(path: str, with_versions: bool = False) -> Iterator[Leftover]:
    """Everything of ours at a path, what is in use included, which says so.

    Args:
        path: a run, or a directory in which runs and other things of ours may lie, like /dev/shm.
        with_versions: also versions that stay on purpose when their sender ends (DiskScheme's).

    Raises:
        FileNotFoundError, NotADirectoryError, PermissionError: it cannot be listed.
    """
    names = sorted(os.listdir(path))
    own = _one(os.path.dirname(path), os.path.basename(path), with_versions)
    if own is not None:
        yield own
        return
    found = (_one(path, name, with_versions) for name in names)
    yield from (each for each in found if each is not None)


def _one(folder: str, name: str, with_versions: bool) -> Leftover | None:
    """What a name in a directory stands for; None if it is not ours, or just going."""
    path = os.path.join(folder, name)
    try:
        other = leftover_folder(folder, name)
        if other is not None:
            return other
        if os.path.islink(path) or not os.path.isdir(path):
            return None
        return leftover_run(path, with_versions)
    except (OSError, WeightSyncError):  # somebody else's, or a symlink, or gone meanwhile
        return None
