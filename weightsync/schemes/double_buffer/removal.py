"""Removing what is ours in a run's directory, and nothing else."""

from __future__ import annotations

import contextlib
import os

from weightsync.deadline import Deadline
from weightsync.errors import WeightSyncError
from weightsync.files import Directory, Lock
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


def remove_run(run: Directory) -> None:
    """Remove everything that is ours. Mappings of readers stay valid, names are free at once."""
    run.discard(layout.HEAD)
    for name in run.names():
        if layout.generation_number(name) is not None:
            with contextlib.suppress(FileNotFoundError, WeightSyncError):
                _empty_generation(run.subdirectory(name))
                run.remove_subdirectory(name)
        elif layout.is_temporary(name):
            run.discard(name)
    # A receiver may be writing its record at this very moment.
    Deadline(1.0).wait(lambda: _remove_records(run) or None)
    run.discard(layout.SENDER_LOCK)
    with contextlib.suppress(OSError):  # somebody else's files are in it
        os.rmdir(run.path)


def _remove_records(run: Directory) -> bool:
    """Whether none of ours are left."""
    try:
        records = run.subdirectory(layout.RECEIVERS)
    except (FileNotFoundError, WeightSyncError):
        return True
    for entry in records.names():
        if layout.receiver_of(entry) is not None:
            records.discard(entry)
    run.remove_subdirectory(layout.RECEIVERS)
    return not any(map(layout.receiver_of, records.names()))
