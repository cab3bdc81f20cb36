"""Removing generations, and whole runs."""

from __future__ import annotations

import contextlib

from weightsync.errors import WeightSyncError
from weightsync.files import Directory, Lock
from weightsync.run.removal import remove_rest
from weightsync.schemes.double_buffer import layout


def remove_generation(run: Directory, name: str) -> None:
    """Remove a generation's files, if no process leases one of its slots."""
    try:
        generation = run.subdirectory(name)
    except (FileNotFoundError, WeightSyncError):
        return
    locks = [Lock(generation, entry) for entry in generation.names() if entry.endswith(".lock")]
    if all(lock.try_exclusive() for lock in locks):
        _empty_generation(generation)
        run.remove_subdirectory(name)
    for lock in locks:
        lock.release()


def _empty_generation(generation: Directory) -> None:
    names = [entry for entry in generation.names() if layout.is_generation_file(entry)]
    # Records first: without one nobody looks for the bytes.
    for entry in sorted(names, key=lambda entry: not entry.endswith(".json")):
        generation.remove(entry)


def remove_unread(run: Directory) -> None:
    """Remove everything that is ours, but generations of which somebody reads a slot."""
    run.discard(layout.HEAD)
    generations = [name for name in run.names() if layout.generation_number(name) is not None]
    for name in generations:
        remove_generation(run, name)
    if all(run.status(name) is None for name in generations):
        remove_rest(run)


def remove_run(run: Directory) -> None:
    """Remove everything that is ours. Mappings of readers stay valid, names are free at once."""
    run.discard(layout.HEAD)
    for name in run.names():
        if layout.generation_number(name) is not None:
            with contextlib.suppress(FileNotFoundError, WeightSyncError):
                _empty_generation(run.subdirectory(name))
                run.remove_subdirectory(name)
    remove_rest(run)
