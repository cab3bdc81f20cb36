"""The files that vLLM reads adapters from: directories of our own, in memory if there is room.

vLLM reads them not only once: an adapter that fell out of its cache (another one took the place,
the base was updated) is read again in the middle of the next step, and a file that is not there
then ends the engine process. So a directory stays for as long as a request may use it: the worker
that loaded from it holds a lock of its own on it.

What a killed process leaves is removed by the next one: its lock died with it.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import weakref

from safetensors.torch import save_file

from weightsync.errors import EngineError, NoRoomError, WeightSyncError
from weightsync.files import Directory, Lock
from weightsync.sources.adapter import CONFIG_NAME
from weightsync.transport import Snapshot
from weightsync.vllm_worker.adapters import LOCK_NAME

PREFIX = "weightsync-adapter-"
_TENSORS_NAME = "adapter_model.safetensors"
_CURRENT = "current"
_NAMES = (_TENSORS_NAME, CONFIG_NAME, _CURRENT, LOCK_NAME)


class _Own:
    """A directory that this process made, and that is removed with ``remove`` or its owner.

    Args:
        place: the directory to make it in.
        owner: the object it is there for; also removed at the end of the process.
        stays: unless a worker still holds it, which may outlive this process.
    """

    def __init__(self, place: str, owner: object, stays: bool) -> None:
        while True:
            try:
                self.path = tempfile.mkdtemp(prefix=PREFIX, dir=place)
            except OSError as error:
                raise EngineError(f"{place}: {error.strerror or error}") from None
            self._lock = Lock(Directory.open(self.path), LOCK_NAME, create=True)
            self.remove = weakref.finalize(
                owner, _remove, self.path, self._lock, os.getpid(), stays
            )
            if self._lock.try_shared():  # else somebody took it for a leftover
                break


class Folder:
    """One version's files.

    Args:
        nbytes: how much is going to be written.
        directory: where to make it; None for the first of the usual places with enough room.

    Raises:
        NoRoomError: there is too little room for so many bytes.
        EngineError: it cannot be made there.
    """

    def __init__(
        self, nbytes: int, owner: object, directory: str | None = None, stays: bool = False
    ) -> None:
        places = _places(directory)
        place = next((p for p in places if _free_bytes(p) >= 2 * nbytes), None)
        if place is None:
            raise NoRoomError(f"{', '.join(places)}: an adapter needs {nbytes:,} bytes")
        own = _Own(place, owner, stays)
        self.path = own.path
        self.remove = own.remove

    def write(self, snapshot: Snapshot, config: bytes) -> None:
        """
        Raises:
            EngineError: the files cannot be written.
        """
        manifest = snapshot.manifest
        tensors = {n: snapshot.tensor(n) for n in manifest.by_name if n != CONFIG_NAME}
        # A tied tensor is written under each of its names; the format knows no ties.
        tensors.update({name: snapshot.tensor(name).clone() for name in manifest.aliases})
        try:
            save_file(tensors, os.path.join(self.path, _TENSORS_NAME))
            with open(os.path.join(self.path, CONFIG_NAME), "wb") as file:
                file.write(config)
        except Exception as error:
            raise EngineError(f"{self.path}: the adapter was not written: {error}") from error


class Link:
    """A path that stays, and leads to the files of one version after the other."""

    def __init__(self, owner: object, directory: str | None = None, stays: bool = False) -> None:
        own = _Own(_places(directory)[0], owner, stays)
        self.directory = own.path
        self.path = os.path.join(own.path, _CURRENT)
        self.remove = own.remove

    def lead_to(self, folder: Folder) -> None:
        """From now on, at once for whoever opens the path."""
        new = f"{self.path}.new"
        os.symlink(folder.path, new)
        os.replace(new, self.path)


def remove_leftovers(directory: str | None = None) -> None:
    """Remove what killed processes of this user left, and no worker still reads."""
    for place in _places(directory):
        with contextlib.suppress(OSError):
            for name in os.listdir(place):
                if name.startswith(PREFIX):
                    remove_if_left(os.path.join(place, name))


def remove_if_left(path: str) -> None:
    """Remove one such directory, if it is ours and no living process holds it."""
    with contextlib.suppress(OSError, WeightSyncError):
        lock = Lock(Directory.open(path), LOCK_NAME)
        if lock.try_exclusive():
            _remove(path, lock, os.getpid(), stays=False)
        lock.release()


def _places(directory: str | None) -> list[str]:
    if directory is not None:
        return [directory]
    return [place for place in ("/dev/shm", tempfile.gettempdir()) if os.path.isdir(place)]


def _free_bytes(place: str) -> int:
    try:
        status = os.statvfs(place)
    except OSError as error:
        raise EngineError(f"{place}: {error.strerror}") from None
    return status.f_bavail * status.f_frsize


def _remove(path: str, lock: Lock, process: int, stays: bool) -> None:
    if os.getpid() != process:  # a forked child ends; the directory is its parent's
        return
    if not stays or lock.try_exclusive():
        with contextlib.suppress(OSError, WeightSyncError):
            directory = Directory.open(path)
            for name in _NAMES:
                directory.discard(name)
            os.rmdir(path)
    lock.release()
