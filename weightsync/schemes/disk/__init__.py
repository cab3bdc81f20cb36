"""Versions as directories in Hugging Face layout, on any file system that both ends share.

The fallback that always works: any engine, also one that knows nothing of this library, loads
such a directory. The format and the protocol are in docs/architecture.md.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import Any, ClassVar
from urllib.parse import unquote

from weightsync.errors import SchemeError
from weightsync.files import Directory
from weightsync.inspection import RunStatus
from weightsync.run.path import run_path
from weightsync.run.records import MAX_RECORD
from weightsync.scheme import WeightSyncScheme, register_scheme, require_int
from weightsync.schemes.disk import names
from weightsync.schemes.disk.commit import Commit
from weightsync.schemes.disk.inspection import VersionRuns
from weightsync.schemes.disk.publisher import DiskPublisher
from weightsync.schemes.disk.subscriber import DiskSubscriber
from weightsync.transport import Publisher, Subscriber
from weightsync.version import Version
from weightsync.words import without_secrets

__all__ = ["DiskScheme"]

_MIB = 1 << 20
_REMOTE = re.compile(r"[a-z][a-z0-9+.-]*://[^?#\0]+[^?#\0/]")


@register_scheme
@dataclass(frozen=True)
class DiskScheme(WeightSyncScheme):
    """Weights as files of a shared file system. URL: ``disk:///mnt/shared/run42?keep=3``.

    Attributes:
        path: a directory of this run's own, made by the sender; its parent exists. Or the URL of
            a place in an object store (``s3://bucket/run42``, whatever fsspec knows).
        keep: how many versions stay, the newest included. One that somebody reads stays longer.
        shard_bytes: a file of weights holds no more, unless one tensor does.
        durable: a version is on the disk before it is announced: it survives a power failure.
        verify: readers compare every byte with its digest before it is used.
        keep_files: the versions stay when the sender ends. Otherwise they are removed, but for
            those that somebody reads.
        reader_path: where receivers find the directory, if the mount point differs there.
        direct: write past the page cache. None: where it is faster, which is for large files that
            are to be durable. Readers on the trainer's own host then read from the disk, once.
        threads: for copies, digests and writes; by default one for each core, at most 8.
        cache: where each host keeps versions of an object store, its sender's included: a
            directory of this run's own. None: in the temporary directory, ``TMPDIR``.
        patience: seconds after which an end that shows no life in an object store is held for
            dead. (On file systems locks tell at once.)
    """

    url_scheme: ClassVar[str] = "disk"
    run_kind: ClassVar[VersionRuns] = VersionRuns()

    path: str
    keep: int = 3
    shard_bytes: int = 5_000_000_000
    durable: bool = True
    verify: bool = True
    keep_files: bool = True
    reader_path: str | None = None
    direct: bool | None = None
    threads: int | None = None
    cache: str | None = None
    patience: float = 10.0

    def __post_init__(self) -> None:
        if not self.is_remote:
            object.__setattr__(self, "path", run_path("path", self.path))
        elif _REMOTE.fullmatch(self.path) is None:
            shown = without_secrets(repr(self.path))
            raise SchemeError(f"path={shown:.200}: a path, or a URL like s3://bucket/run42")
        if self.reader_path is not None:
            object.__setattr__(self, "reader_path", run_path("reader_path", self.reader_path))
        if self.cache is not None:
            object.__setattr__(self, "cache", run_path("cache", self.cache))
        if type(self.patience) not in (int, float) or not 0.1 <= self.patience < math.inf:
            raise SchemeError(f"patience={self.patience!r}: seconds, at least 0.1")
        require_int("keep", self.keep)
        require_int("shard_bytes", self.shard_bytes, _MIB)
        for name in ("durable", "verify", "keep_files"):
            if type(getattr(self, name)) is not bool:
                raise SchemeError(f"{name}={getattr(self, name)!r}: True or False")
        if self.direct is not None and type(self.direct) is not bool:
            raise SchemeError(f"direct={self.direct!r}: True, False or None")
        if self.threads is not None:
            require_int("threads", self.threads)

    def __repr__(self) -> str:
        told = ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in fields(self))
        return without_secrets(f"{type(self).__name__}({told})")  # of an object store's URL

    @property
    def is_remote(self) -> bool:
        """Whether it is an object store's URL, not a path."""
        return isinstance(self.path, str) and "://" in self.path

    def create_publisher(self) -> Publisher:
        if self.is_remote:
            from weightsync.schemes.disk.remote import RemotePublisher

            return RemotePublisher(self)
        return DiskPublisher(self)

    def create_subscriber(self, receiver: str | None = None) -> Subscriber:
        if self.is_remote:
            from weightsync.schemes.disk.remote import RemoteSubscriber

            return RemoteSubscriber(self, receiver)
        return DiskSubscriber(self, receiver)

    def inspect(self) -> RunStatus:
        """What is in the run's directory, or in the store, now; changes nothing.

        A first look at a store takes until a beat of the sender was seen, or ``patience`` is over.

        Raises:
            FileNotFoundError: there is no such run. WeightSyncError: the store's own words.
        """
        if self.is_remote:
            from weightsync.schemes.disk.remote_inspection import inspect_store

            return inspect_store(self)
        return self.run_kind.inspect(Directory.open(self.reader_path or self.path))

    def newest(self) -> Version | None:
        """The newest version there is, whether or not its sender is alive; None before the first.

        Raises:
            ProtocolError: ``HEAD`` is malformed.
        """
        path = self.reader_path or self.path
        if self.is_remote:
            from weightsync.schemes.disk.remote import newest

            return newest(self)
        try:
            data = Directory.open(path).read(names.HEAD, MAX_RECORD)
        except FileNotFoundError:
            return None
        return Commit.from_json(data, f"{path}/{names.HEAD}").version

    def directory(self, version: Version) -> str:
        """Where a version lies while it is kept: a directory for ``from_pretrained``, or a URL."""
        return f"{self.reader_path or self.path}/{names.version_name(version)}"

    def writes_direct(self, nbytes: int) -> bool:
        """Whether a file of that many bytes is written past the page cache."""
        return self.durable and nbytes >= 16 * _MIB if self.direct is None else self.direct

    def address(self) -> tuple[str, str]:
        return "", self.path

    @classmethod
    def from_address(cls, host: str, path: str, options: dict[str, Any]) -> DiskScheme:
        if unquote(host).endswith(":"):  # a whole URL: disk://s3://bucket/run42
            return cls(f"{unquote(host)}{path}", **options)
        if host:
            raise SchemeError(
                f"disk://{host}{path}: a path has three slashes, disk:///{host}{path}"
            )
        return cls(path, **options)
