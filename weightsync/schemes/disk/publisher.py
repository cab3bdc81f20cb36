"""The trainer's end on disk: writes a version beside the others, and announces it last."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from weightsync.chunks import Copier
from weightsync.deadline import Deadline
from weightsync.errors import NoRoomError, ProtocolError, WeightSyncError
from weightsync.files import Directory
from weightsync.manifest import Manifest
from weightsync.report import ReceiverReport
from weightsync.run.ownership import Ownership
from weightsync.run.receivers import Receivers, RecordFiles
from weightsync.run.records import MAX_RECORD, addressees
from weightsync.run.removal import remove_temporaries
from weightsync.schemes.disk import names
from weightsync.schemes.disk.commit import Commit
from weightsync.schemes.disk.history import History
from weightsync.schemes.disk.retention import (
    discard_unfinished,
    is_whole,
    remove_run,
    remove_version,
    retire,
    sweep,
    versions,
)
from weightsync.schemes.disk.version import Written, write_version
from weightsync.source import WeightSource
from weightsync.transport import Crew, Published, Publisher
from weightsync.version import Version
from weightsync.words import one_line

if TYPE_CHECKING:
    from weightsync.schemes.disk import DiskScheme

_WRITES = 4
"""Under way at one time, at least: a disk is slow with one, and waiting threads are cheap."""

log = logging.getLogger("weightsync")


class DiskPublisher(Publisher):
    """See :class:`~weightsync.transport.Publisher`; the protocol is in docs/architecture.md."""

    def __init__(self, scheme: DiskScheme) -> None:
        self._scheme = scheme
        # What these refer to leads not back to this object: it could not be let go.
        self._ownership = ownership = Ownership(
            scheme.path, None if scheme.keep_files else remove_run
        )
        self._records = RecordFiles(ownership.directory)
        self._receivers = Receivers(self._records, lambda: ownership.epoch)
        self._history = History(scheme.shard_bytes)
        self._copier = write_copier(scheme.threads)

    def open(self, deadline: Deadline, epoch: int | None = None) -> int:
        if not self._ownership.held:
            with self._ownership.taking(deadline) as run:
                self._take_over(run, epoch)
        elif epoch not in (None, self._ownership.epoch):
            self._ownership.begin(epoch)
        return self._ownership.epoch

    def _take_over(self, run: Directory, epoch: int | None) -> None:
        """Begin a new epoch, and remove what the former sender's death left."""
        self._history.found(_head_of(run))
        head = self._history.version
        newest = max([*versions(run), *([head] if head else [])], default=None)
        self._ownership.begin(epoch, newest)
        remove_temporaries(run)
        sweep(run, head)
        if self._scheme.durable:
            run.sync_name()

    def prepare(self, manifest: Manifest, deadline: Deadline) -> None:
        run = self._ownership.directory()
        needed = self._history.checkpoint(manifest).layout.nbytes
        if run.free_bytes() < needed:
            # What goes after this version goes before it, if only then there is room.
            retire(run, max(1, self._scheme.keep - 1), self._history.version)
        require_room(run, needed)

    # ---------------------------------------------------------------- publishing

    def publish(
        self,
        version: Version,
        weights: WeightSource,
        deadline: Deadline,
        receivers: Sequence[str] | None = None,
        crew: Crew | None = None,
    ) -> Published:
        began = time.perf_counter()
        history = self._history
        self._ownership.require_newer(version, history.last)
        self._records.forget_signed_off()
        meant_for = addressees(receivers)
        inventory = weights.inventory()
        manifest = inventory.manifest
        looked = time.perf_counter() - began
        self.prepare(manifest, deadline)
        run = self._ownership.directory()
        checkpoint = history.checkpoint(manifest)
        discard_unfinished(run, version)
        with ExitStack() as leftovers:
            leftovers.callback(discard_unfinished, run, version)
            unfinished = run.subdirectory(names.unfinished_name(version), create=True)
            written = write_version(
                unfinished, checkpoint, inventory, self._copier, self._scheme, deadline
            )
            layout = checkpoint.layout
            commit = Commit(version, written.digest, layout.nbytes, meant_for, time.time())
            if history.repeats(commit) and is_whole(run, version):  # they stay where they are
                commit = history.addressed_anew(commit)
            else:
                self._settle(run, commit, written)
            changed = history.changed(layout, written.digests)
            history.stale = self._records.raw() if version == history.last else {}
            self._announce(run, commit)
        history.announced(commit, layout, written.digests)
        self._retire(run)
        extract = looked + written.extract
        seconds = time.perf_counter() - began - extract
        return Published(manifest.payload, len(manifest.tensors), changed, extract, seconds)

    def _settle(self, run: Directory, commit: Commit, written: Written) -> None:
        """Finish a version and give it its name: it can be read, but nobody knows of it."""
        written.finish(commit)
        if not remove_version(run, commit.version):  # of an attempt that was not announced
            raise WeightSyncError(f"{run.path}/{commit.directory} is in the way, and stays there")
        run.rename(names.unfinished_name(commit.version), commit.directory)
        if run.status(commit.directory) is None:
            raise WeightSyncError(
                f"{run.path}/{names.unfinished_name(commit.version)} was removed while the version "
                "was being written"
            )
        if self._scheme.durable:
            run.sync()

    def _announce(self, run: Directory, commit: Commit) -> None:
        try:
            run.replace(names.HEAD, commit.to_json(), durable=self._scheme.durable)
        except BaseException:
            # An interrupt may come just after the rename: what is there counts.
            with suppress(OSError, WeightSyncError):  # then it is as it was, as far as is known
                self._history.found(_head_of(run))
            if self._history.version != commit.version:
                remove_version(run, commit.version)
            raise

    def _retire(self, run: Directory) -> None:
        try:
            retire(run, self._scheme.keep, self._history.version)
        except (OSError, WeightSyncError) as error:  # the version is published all the same
            log.warning("%s: old versions could not be removed: %s", run.path, one_line(error))

    # ---------------------------------------------------------------- receivers

    def receivers(self) -> list[ReceiverReport]:
        return self._receivers.reports()

    def wait_applied(
        self, version: Version, deadline: Deadline, receivers: Sequence[str] | None = None
    ) -> list[ReceiverReport]:
        return self._receivers.wait_applied(version, deadline, receivers, self._history.stale)

    def close(self) -> None:
        self._copier.close()
        self._ownership.release()


def write_copier(threads: int | None) -> Copier:
    """Threads that write, gather and digest."""
    return Copier(threads or max(_WRITES, Copier().threads))


def require_room(directory: Directory, needed: int) -> None:
    """
    Raises:
        NoRoomError: fewer than ``needed`` bytes are free.
    """
    free = directory.free_bytes()
    if free < needed:
        raise NoRoomError(
            f"{directory.path}: a version needs {needed:,} bytes, {free:,} are free (a smaller "
            "keep= or dtype=, or another file system?)"
        )


def _head_of(run: Directory) -> Commit | None:
    """What is announced; a head that nobody understands is removed."""
    try:
        return Commit.from_json(run.read(names.HEAD, MAX_RECORD), names.HEAD)
    except FileNotFoundError:
        return None
    except ProtocolError:
        run.discard(names.HEAD)
        return None
