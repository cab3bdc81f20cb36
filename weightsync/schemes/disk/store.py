"""An object store, by any URL that fsspec knows: whole objects under names, and nothing else."""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
from collections.abc import Callable
from typing import Any, TypeVar

from weightsync.deadline import Deadline, call_with_deadline
from weightsync.errors import ProtocolError, SchemeError, WeightSyncError
from weightsync.words import without_secrets

T = TypeVar("T")


class Store:
    """The objects below a URL. Names are relative to it, with ``/`` between their parts.

    Every call has a deadline, and fails with an error of ours that has the store's own words.

    Attributes:
        where: the URL as errors have it: without user and password.
    """

    def __init__(self, url: str) -> None:
        self.url, self.where = url, without_secrets(url)
        self._files, self._base = _file_system(url)
        # What is not replaced as a whole is written under another name first.
        self._renames = "file" in _protocols(self._files)

    def _call(
        self, what: str, function: Callable[[], T], deadline: Deadline, may_miss: bool = False
    ) -> T:
        """
        Args:
            may_miss: a FileNotFoundError says what it says: there is no such object.
        """
        try:
            return call_with_deadline(function, deadline, f"{self.where}: {what}")
        except WeightSyncError:
            raise
        except Exception as error:  # each store has errors of its own
            if may_miss and isinstance(error, FileNotFoundError):
                raise
            kind = type(error).__name__
            raise WeightSyncError(f"{self.where}: {what}: {kind}: {error!s:.500}") from error

    def _path(self, name: str) -> str:
        return f"{self._base}/{name}"

    def read(self, name: str, limit: int, deadline: Deadline) -> bytes:
        """
        Raises:
            FileNotFoundError: there is no such object. ProtocolError: it is longer than ``limit``.
        """
        path = self._path(name)
        data: bytes = self._call(
            f"reading {name}",
            lambda: self._files.cat_file(path, start=0, end=limit + 1),
            deadline,
            may_miss=True,
        )
        if len(data) > limit:
            raise ProtocolError(f"{self.where}/{name} is longer than {limit} bytes")
        return bytes(data)

    def write(self, name: str, data: bytes, deadline: Deadline) -> None:
        """Replace an object as a whole."""

        def put() -> None:
            if not self._renames:
                self._files.pipe_file(self._path(name), data)
                return
            folder, _, last = name.rpartition("/")
            temporary = self._path(f"{folder}/.{last}.{secrets.token_hex(4)}.tmp")
            self._files.makedirs(self._path(folder), exist_ok=True)
            self._files.pipe_file(temporary, data)
            self._files.mv(temporary, self._path(name))

        self._call(f"writing {name}", put, deadline)

    def upload(self, file: str, name: str, deadline: Deadline) -> None:
        def put() -> None:
            path = self._path(name)
            if self._renames:
                self._files.makedirs(os.path.dirname(path), exist_ok=True)
            self._files.put_file(file, path)

        self._call(f"writing {name}", put, deadline)

    def download(self, name: str, file: str, deadline: Deadline) -> None:
        """
        Raises:
            FileNotFoundError: there is no such object.
        """
        path = self._path(name)
        self._call(
            f"reading {name}", lambda: self._files.get_file(path, file), deadline, may_miss=True
        )

    def names(self, folder: str, deadline: Deadline) -> list[str]:
        """The last parts of the names in a folder; none if there is no such folder."""

        def listed() -> list[str]:
            self._files.invalidate_cache()
            with contextlib.suppress(FileNotFoundError):
                found = self._files.ls(self._path(folder).rstrip("/"), detail=False)
                return [str(path).rstrip("/").rpartition("/")[2] for path in found]
            return []

        return self._call(f"listing {folder or '.'}", listed, deadline)

    def remove(self, name: str, deadline: Deadline) -> None:
        """Remove an object, if it is there."""

        def rm() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._files.rm_file(self._path(name))

        self._call(f"removing {name}", rm, deadline)

    def remove_folder(self, folder: str, deadline: Deadline) -> None:
        """Remove a folder if it is empty, in stores that have such things."""

        def rmdir() -> None:
            with contextlib.suppress(OSError, NotImplementedError):
                self._files.rmdir(self._path(folder).rstrip("/"))

        self._call(f"removing {folder}", rmdir, deadline)


def _file_system(url: str) -> tuple[Any, str]:
    try:
        fsspec = importlib.import_module("fsspec")
    except ImportError:
        raise SchemeError(
            f"{without_secrets(url)}: URLs need fsspec (pip install fsspec)"
        ) from None
    try:
        files, base = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise SchemeError(f"{without_secrets(url)}: {error}") from None
    return files, str(base).rstrip("/")


def _protocols(files: Any) -> tuple[str, ...]:
    protocol = files.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)
