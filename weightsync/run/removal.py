"""Removing what is ours in a run's directory, and nothing else."""

from __future__ import annotations

import contextlib
import os

from weightsync.deadline import Deadline
from weightsync.files import Directory
from weightsync.run.receivers import remove_records
from weightsync.run.records import SENDER_LOCK, is_temporary


def remove_temporaries(run: Directory) -> None:
    """Remove the half-written small files of dead processes."""
    for name in run.names():
        if is_temporary(name):
            run.discard(name)


def remove_rest(run: Directory) -> None:
    """Remove a run whose weights are gone already; its lock last."""
    remove_temporaries(run)
    # A receiver may be writing its record at this very moment.
    Deadline(1.0).wait(lambda: remove_records(run) or None)
    run.discard(SENDER_LOCK)
    with contextlib.suppress(OSError):  # somebody else's files are in it
        os.rmdir(run.path)
