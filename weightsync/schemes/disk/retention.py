"""Which versions stay, and how the others go: never one that somebody reads."""

from __future__ import annotations

import contextlib

from weightsync.errors import ProtocolError, WeightSyncError
from weightsync.files import Directory, Lock
from weightsync.run.removal import remove_rest
from weightsync.schemes.disk import names
from weightsync.version import Version


def versions(run: Directory) -> list[Version]:
    """The versions in a run's directory, oldest first, whole or being removed."""
    found = map(names.version_of, run.names())
    return sorted(version for version in found if version is not None)


def retire(run: Directory, keep: int, head: Version | None) -> None:
    """Remove all but the newest, oldest first. The head stays, and what is leased stays for now."""
    for version in versions(run)[:-keep]:
        if version != head:
            remove_version(run, version)


def sweep(run: Directory, head: Version | None) -> None:
    """Remove what dead senders left: halves of versions, and versions that were never announced."""
    sweep_unfinished(run)
    for version in versions(run):
        if _is_half(run, version) or (head is not None and version > head):
            remove_version(run, version)


def sweep_unfinished(run: Directory) -> None:
    """Remove halves of versions; one that somebody is at is locked, and stays."""
    for name in run.names():
        if names.is_unfinished(name):
            _remove(run, name)


def is_whole(run: Directory, version: Version) -> bool:
    """Whether a version is there, as far as its record tells."""
    try:
        directory = run.subdirectory(names.version_name(version))
    except (FileNotFoundError, WeightSyncError):
        return False
    return directory.status(names.RECORD) is not None


def _is_half(run: Directory, version: Version) -> bool:
    """Whether its removal was begun, and not ended."""
    try:
        return run.subdirectory(names.version_name(version)).status(names.RECORD) is None
    except (FileNotFoundError, WeightSyncError):
        return False


def remove_version(run: Directory, version: Version) -> bool:
    """Remove a version unless somebody reads it. Whether it is gone."""
    return _remove(run, names.version_name(version))


def discard_unfinished(run: Directory, version: Version) -> None:
    """Remove what was written of a version that is not to be."""
    _remove(run, names.unfinished_name(version))


def _remove(run: Directory, name: str) -> bool:
    try:
        directory = run.subdirectory(name)
    except FileNotFoundError:
        return True
    except WeightSyncError:  # not a directory, and not ours
        return False
    try:
        lease = Lock(directory, names.LEASE)
    except FileNotFoundError:
        lease = None
    except ProtocolError:  # a directory has the name: nobody can lease this version
        lease = None
    if lease is not None and not lease.try_exclusive():
        lease.release()
        return False
    try:
        _empty(directory)
    finally:
        if lease is not None:
            lease.release()
    run.remove_subdirectory(name)
    return run.status(name) is None


def _empty(directory: Directory) -> None:
    ours = [name for name in directory.names() if names.is_version_file(name)]
    # The record first: without it there is no version. The lease last: until then it is ours.
    ours.sort(key=lambda name: (name != names.RECORD, name == names.LEASE))
    for name in ours:
        directory.discard(name)


def remove_run(run: Directory) -> None:
    """Remove everything that is ours, but versions that somebody reads."""
    run.discard(names.HEAD)
    for name in run.names():
        if names.is_unfinished(name) or names.version_of(name) is not None:
            with contextlib.suppress(OSError, WeightSyncError):
                _remove(run, name)
    remove_rest(run)
