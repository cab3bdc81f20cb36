"""Folders and files that a killed process has left, outside of runs."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from functools import partial

from weightsync.checkpoint import LOCK as EXPORT_LOCK
from weightsync.checkpoint import UNFINISHED, discard_unfinished
from weightsync.doctor.storage import EXAMINED, EXAMINED_FILE
from weightsync.engines.vllm.adapter_files import PREFIX as ADAPTER
from weightsync.engines.vllm.adapter_files import remove_if_left
from weightsync.errors import WeightSyncError
from weightsync.files import Directory
from weightsync.leftovers.leftover import Leftover, occupied
from weightsync.run.look import lease_state
from weightsync.vllm_worker.adapters import LOCK_NAME

_EXPORT = re.compile(rf"{re.escape(UNFINISHED)}[0-9a-f]{{16}}\Z", re.ASCII)
_ADAPTER = re.compile(rf"{re.escape(ADAPTER)}[a-z0-9_]{{8}}\Z", re.ASCII)
_PROOF = re.compile(r"weightsync-proof-[0-9a-f]{16,64}\Z", re.ASCII)
_EXAMINED = re.compile(rf"{re.escape(EXAMINED)}[a-z0-9_]{{8}}\Z", re.ASCII)

_SHORT = 600.0
"""Seconds. What is made to be removed in the next moment, and is older than that, was left."""


def leftover_folder(folder: str, name: str) -> Leftover | None:
    """What a name stands for, if it is one that this library gives, and the thing is our user's."""
    path = os.path.join(folder, name)
    if _EXPORT.match(name):
        return _locked(path, "unfinished export", EXPORT_LOCK, discard_unfinished)
    if _ADAPTER.match(name):
        return _locked(path, "files of an adapter", LOCK_NAME, remove_if_left)
    if _PROOF.match(name):
        return _brief(path, "a proof for choose()", os.path.isfile, os.unlink)
    if _EXAMINED.match(name):
        return _brief(path, "a folder of doctor's", os.path.isdir, _remove_examined)
    return None


def _locked(path: str, what: str, lock: str, remove: Callable[[str], None]) -> Leftover | None:
    """A folder in which a living process holds a lock."""
    directory = Directory.open(path)
    nbytes, changed = occupied(path)
    kept = None
    if directory.status(lock) is None:
        kept = "nobody can tell whether it is used: it has no lock"
    elif lease_state(directory, lock) != "free":
        kept = "a living process uses it"
    return Leftover(path, what, nbytes, changed, kept, partial(_remove_folder, path, remove))


def _remove_folder(path: str, remove: Callable[[str], None]) -> str | None:
    try:
        remove(path)
    except FileNotFoundError:
        pass  # somebody else removes it
    except (OSError, WeightSyncError) as error:
        return str(error)
    return "a living process uses it" if os.path.lexists(path) else None


def _brief(
    path: str, what: str, fits: Callable[[str], bool], remove: Callable[[str], None]
) -> Leftover | None:
    """What no lock is held on, since it is there for a moment."""
    status = os.lstat(path)
    if status.st_uid != os.geteuid() or os.path.islink(path) or not fits(path):
        return None
    young = time.time() - status.st_mtime < _SHORT
    kept = "it may be in use just now" if young else None
    nbytes, changed = occupied(path)
    return Leftover(path, what, nbytes, changed, kept, partial(_remove_brief, path, remove))


def _remove_brief(path: str, remove: Callable[[str], None]) -> str | None:
    try:
        remove(path)
    except FileNotFoundError:
        pass
    except (OSError, WeightSyncError) as error:
        return str(error)
    return None


def _remove_examined(path: str) -> None:
    Directory.open(path).discard(EXAMINED_FILE)
    os.rmdir(path)
