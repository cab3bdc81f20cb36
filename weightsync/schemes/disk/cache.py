"""Versions of an object store on this host's disk: each is fetched once, for all its processes.

A cache is a directory of versions, like a run's. Who holds the lock in an unfinished one fills it;
the others wait for it.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import partial

import xxhash

from weightsync.chunks import Copier
from weightsync.deadline import Deadline
from weightsync.errors import DeadlineError, ProtocolError, VersionGoneError, WeightSyncError
from weightsync.files import Directory, Lock
from weightsync.run.records import MAX_RECORD
from weightsync.schemes.disk import names
from weightsync.schemes.disk.commit import Commit
from weightsync.schemes.disk.layout import Layout
from weightsync.schemes.disk.publisher import require_room
from weightsync.schemes.disk.retention import discard_unfinished, retire, sweep_unfinished
from weightsync.schemes.disk.snapshot import DiskSnapshot
from weightsync.schemes.disk.store import Store
from weightsync.schemes.disk.subscriber import VersionReader
from weightsync.version import Version


def cache_directory(path: str | None, url: str) -> Directory:
    """The cache of a URL: at a path, or in this user's part of the temporary directory."""
    if path is None:
        base = f"{tempfile.gettempdir()}/weightsync-{os.geteuid()}"
        Directory.open(base, create=True)
        path = f"{base}/{xxhash.xxh3_64_hexdigest(url.encode())}"
    return Directory.open(path, create=True)


def tidy(cache: Directory, newest: Version) -> None:
    """Remove all but the newest version, what others lease or fill excepted."""
    sweep_unfinished(cache)
    retire(cache, 1, newest)


class Filling:
    """An unfinished version that is this process's to fill, under an exclusive lock."""

    def __init__(
        self, cache: Directory, version: Version, directory: Directory, lock: Lock
    ) -> None:
        self.directory = directory
        self._cache = cache
        self._version = version
        self._lock = lock

    @classmethod
    def begin(cls, cache: Directory, version: Version) -> Filling | None:
        """None: another process is at it."""
        try:
            directory = cache.subdirectory(names.unfinished_name(version), create=True)
            lock = Lock(directory, names.LEASE, create=True)
        except FileNotFoundError:  # another one has just given up
            return None
        if lock.try_exclusive() and lock.exists:
            for name in filter(names.is_version_file, directory.names()):
                if name != names.LEASE:  # of one that died
                    directory.discard(name)
            return cls(cache, version, directory, lock)
        lock.release()
        return None

    def finish(self) -> Lock:
        """Give the version its name. Returns a lease on it."""
        # Shared before anybody can find it, so that nobody can remove it in between.
        self._lock.try_shared()
        unfinished, name = names.unfinished_name(self._version), names.version_name(self._version)
        try:
            self._cache.rename(unfinished, name)
        except OSError as error:
            raise WeightSyncError(f"{self._cache.path}/{name}: {error.strerror}") from None
        return self._lock

    def give_up(self) -> None:
        self._lock.release()
        discard_unfinished(self._cache, self._version)


class Cache:
    """The readers' side: leases versions, and fetches what is not there."""

    def __init__(self, store: Store, path: str | None, copier: Copier, verified: bool) -> None:
        self._store = store
        self._directory = cache_directory(path, store.url)
        self._reader = VersionReader(copier, verified)

    def snapshot(self, version: Version, deadline: Deadline) -> DiskSnapshot:
        """
        Raises:
            VersionGoneError: the store has it no more. DeadlineError: it was not fetched in time.
        """

        def attempt() -> DiskSnapshot | None:
            try:
                return self._reader.snapshot(self._directory, version)
            except VersionGoneError:
                pass
            filling = Filling.begin(self._directory, version)
            if filling is None:
                return None
            try:
                if self._directory.status(names.version_name(version)) is not None:
                    filling.give_up()  # it has come, or is just going, in between
                    return None
                self._fetch(filling.directory, version, deadline)
                lease = filling.finish()
            except BaseException:
                filling.give_up()
                raise
            tidy(self._directory, version)
            return self._reader.leased(self._directory, version, lease)

        found = deadline.wait(attempt)
        if found is None:
            raise DeadlineError(
                f"{self._store.where}: version {version} was not fetched into "
                f"{self._directory.path} within {deadline.seconds:.1f} s"
            )
        return found

    def _fetch(self, into: Directory, version: Version, deadline: Deadline) -> None:
        """Download a version, its record last."""
        folder = names.version_name(version)
        where = f"{self._store.where}/{folder}"
        try:
            record = self._store.read(f"{folder}/{names.RECORD}", MAX_RECORD, deadline)
            if Commit.from_json(record, f"{where}/{names.RECORD}").version != version:
                raise ProtocolError(f"{where}/{names.RECORD} is of another version")
            data = self._store.read(f"{folder}/{names.LAYOUT}", names.MAX_LAYOUT, deadline)
            layout = Layout.from_json(data, f"{where}/{names.LAYOUT}")
            require_room(into, layout.nbytes)
            files = [shard.name for shard in layout.shards]
            there = self._store.names(folder, deadline)
            files += [n for n in there if names.is_extra(n) or n in (names.INDEX, names.DIGESTS)]
            transfer_all(
                [
                    partial(
                        self._store.download, f"{folder}/{name}", f"{into.path}/{name}", deadline
                    )
                    for name in files
                ]
            )
        except FileNotFoundError:
            raise VersionGoneError(
                f"{self._store.where} no longer holds version {version}"
            ) from None
        into.replace(names.LAYOUT, data)
        into.replace(names.RECORD, record)

    def close(self) -> None:
        self._reader.close()


def transfer_all(work: Sequence[Callable[[], None]]) -> None:
    """Do some transfers at the same time; the first error counts, once all have ended."""
    errors: list[BaseException] = []

    def run(one: Callable[[], None]) -> None:
        try:
            one()
        except BaseException as error:
            errors.append(error)

    waiting = list(reversed(work))
    while waiting:
        group = [waiting.pop() for _ in range(min(8, len(waiting)))]
        threads = [threading.Thread(target=run, args=(one,), daemon=True) for one in group]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()  # each has its deadline
        if errors:
            raise errors[0]
