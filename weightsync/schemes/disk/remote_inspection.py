"""What a run in an object store looks like from outside.

Who is alive is known by beats, so a first look takes until it has seen one, or missed it. What was
seen is remembered, for the looks that follow.
"""

from __future__ import annotations

import time
from functools import lru_cache
from typing import TYPE_CHECKING

from weightsync.deadline import Deadline
from weightsync.errors import ProtocolError, WeightSyncError
from weightsync.inspection import RunStatus, SlotStatus
from weightsync.run.look import sender_words
from weightsync.run.records import MAX_RECORD
from weightsync.schemes.disk import names
from weightsync.schemes.disk.commit import Commit
from weightsync.schemes.disk.layout import Layout
from weightsync.schemes.disk.presence import Sign, Watch, read_sign
from weightsync.schemes.disk.remote import SENDER, RecordObjects, store_versions
from weightsync.schemes.disk.store import Store
from weightsync.version import Version

if TYPE_CHECKING:
    from weightsync.schemes.disk import DiskScheme

_POLL = 0.1
"""Seconds between two looks at an object: a store may ask money for each."""


def inspect_store(scheme: DiskScheme) -> RunStatus:
    """
    Raises:
        FileNotFoundError: nothing is there. WeightSyncError: the store has an error, its own words.
    """
    return _looker(scheme.path, scheme.patience).look()


@lru_cache(maxsize=16)
def _looker(url: str, patience: float) -> _Looker:
    return _Looker(url, patience)


class _Looker:
    """Looks at one run again and again."""

    def __init__(self, url: str, patience: float) -> None:
        self._store = Store(url)
        self._patience = patience
        self._watch = Watch(patience)
        self._records = RecordObjects(self._store, patience)
        self._sizes: dict[Version, int] = {}
        self._newest: tuple[str, int, int] = ("", 0, 0)

    def look(self) -> RunStatus:
        deadline = Deadline(max(self._patience, 30.0))
        problems: list[str] = []
        sign = self._sign(problems, deadline)
        head = self._head(problems, deadline)
        versions = store_versions(self._store, deadline)
        if sign is None and head is None and not versions and not problems:
            raise FileNotFoundError(f"{self._store.where}: there is no run")
        alive, sign = self._alive(sign, deadline)
        return RunStatus(
            "disk",
            self._store.where,
            head.version if head else None,
            alive,
            sender_words(sign.words) if sign else "",
            head.time if head else None,
            *(self._size(head, problems, deadline) if head else (0, 0)),
            tuple(self._slot(version, deadline) for version in versions),
            tuple(r.report for r in self._records.read() if not r.signed_off),
            tuple(problems),
            ("who reads a version: an object store has no locks",),
            sender_ended=sign is not None and sign.ended,
        )

    def _sign(self, problems: list[str], deadline: Deadline) -> Sign | None:
        try:
            return read_sign(self._store, SENDER, deadline)
        except ProtocolError as error:
            problems.append(str(error))
            return None

    def _alive(self, sign: Sign | None, deadline: Deadline) -> tuple[bool, Sign | None]:
        """Whether the sender beats, and its last sign; waits until that is known."""
        alive = False if sign is None else self._watch.alive(SENDER, sign)
        self._records.read()  # their beats begin to count now, too
        while alive is None:
            time.sleep(_POLL)
            sign = self._sign([], deadline)
            alive = sign is not None and self._watch.alive(SENDER, sign)
            if deadline.expired and alive is None:
                return False, sign
        return alive, sign

    def _head(self, problems: list[str], deadline: Deadline) -> Commit | None:
        try:
            data = self._store.read(names.HEAD, MAX_RECORD, deadline)
            return Commit.from_json(data, f"{self._store.where}/{names.HEAD}")
        except FileNotFoundError:
            pass
        except ProtocolError as error:
            problems.append(str(error))
        return None

    def _size(self, head: Commit, problems: list[str], deadline: Deadline) -> tuple[int, int]:
        """Tensors of a version and their bytes. Read once for each."""
        if self._newest[0] != head.directory:
            name = f"{head.directory}/{names.LAYOUT}"
            try:
                data = self._store.read(name, names.MAX_LAYOUT, deadline)
                layout = Layout.from_json(data, f"{self._store.where}/{name}")
            except (FileNotFoundError, WeightSyncError) as error:
                problems.append(str(error))
                return 0, 0
            manifest = layout.manifest
            self._newest = head.directory, len(manifest.tensors), manifest.payload
        return self._newest[1:]

    def _slot(self, version: Version, deadline: Deadline) -> SlotStatus:
        """A version; whole if its record is there, which comes last and goes first."""
        folder = names.version_name(version)
        if version not in self._sizes:
            try:
                data = self._store.read(f"{folder}/{names.RECORD}", MAX_RECORD, deadline)
                self._sizes[version] = Commit.from_json(data, folder).nbytes
            except (FileNotFoundError, ProtocolError):
                return SlotStatus(folder, None, None, "written", None)
        return SlotStatus(folder, None, version, "free", self._sizes[version])
