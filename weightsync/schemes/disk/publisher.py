"""The trainer's end on disk: writes a version beside the others, and announces it last."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from weightsync.chunks import Copier, Digests
from weightsync.deadline import Deadline
from weightsync.errors import NoRoomError, ProtocolError, VersionError, WeightSyncError
from weightsync.files import Directory
from weightsync.manifest import Manifest
from weightsync.report import ReceiverReport
from weightsync.run.ownership import Ownership
from weightsync.run.receivers import Receivers, RecordFiles
from weightsync.run.records import MAX_RECORD, addressees
from weightsync.run.removal import remove_temporaries
from weightsync.schemes.disk import names
from weightsync.schemes.disk.commit import Commit
from weightsync.schemes.disk.layout import Checkpoint
from weightsync.schemes.disk.retention import (
    discard_unfinished,
    remove_run,
    remove_version,
    retire,
    sweep,
    versions,
)
from weightsync.schemes.disk.version import write_version
from weightsync.source import WeightSource
from weightsync.transport import Crew, Published, Publisher
from weightsync.version import Version

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
        self._checkpoint: Checkpoint | None = None
        self._head: Commit | None = None
        self._head_digests: tuple[str, Digests] | None = None
        self._last: Version | None = None
        # Answers to an earlier attempt at the head's version, which do not count for this one.
        self._stale: Mapping[str, bytes] = {}
        self._copier = Copier(scheme.threads or max(_WRITES, Copier().threads))

    def open(self, deadline: Deadline, epoch: int | None = None) -> int:
        if not self._ownership.held:
            with self._ownership.taking(deadline) as run:
                self._take_over(run, epoch)
        elif epoch not in (None, self._ownership.epoch):
            self._ownership.begin(epoch)
        return self._ownership.epoch

    def _take_over(self, run: Directory, epoch: int | None) -> None:
        """Begin a new epoch, and remove what the former sender's death left."""
        self._head_digests = None
        self._head = _former_head(run)
        newest = max(versions(run), default=None)
        if self._head is not None:
            newest = max(self._head.version, newest or self._head.version)
        self._ownership.begin(epoch, newest)
        remove_temporaries(run)
        sweep(run, self._head.version if self._head else None)

    def prepare(self, manifest: Manifest, deadline: Deadline) -> None:
        run = self._ownership.directory()
        checkpoint = self._checkpoint_of(manifest)
        needed = checkpoint.layout.nbytes
        if run.free_bytes() < needed:
            # What goes after this version goes before it, if only then there is room.
            retire(run, max(1, self._scheme.keep - 1), self._head.version if self._head else None)
        free = run.free_bytes()
        if free < needed:
            raise NoRoomError(
                f"{run.path}: a version needs {needed:,} bytes, {free:,} are free (a smaller "
                "keep= or dtype=, or another file system?)"
            )

    def _checkpoint_of(self, manifest: Manifest) -> Checkpoint:
        known = self._checkpoint
        if known is None or known.layout.manifest.fingerprint != manifest.fingerprint:
            known = self._checkpoint = Checkpoint.plan(manifest, self._scheme.shard_bytes)
        return known

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
        self._ownership.require_newer(version, self._last)
        self._records.forget_signed_off()
        meant_for = addressees(receivers)
        inventory = weights.inventory()
        looked = time.perf_counter() - began
        self.prepare(inventory.manifest, deadline)
        run = self._ownership.directory()
        checkpoint = self._checkpoint_of(inventory.manifest)
        discard_unfinished(run, version)
        unfinished = run.subdirectory(names.unfinished_name(version), create=True)
        with ExitStack() as leftovers:
            leftovers.callback(discard_unfinished, run, version)
            written = write_version(
                unfinished, checkpoint, inventory, self._copier, self._scheme, deadline
            )
            commit = Commit(
                version,
                written.digest,
                checkpoint.layout.nbytes,
                meant_for,
                time.time(),
            )
            same = self._same_number(commit)
            changed = self._changed(checkpoint, written.digests)
            if not same:
                written.finish(commit)
                self._settle(run, commit)
            self._stale = self._records.raw() if version == self._last else {}
            self._announce(run, commit, same)
        self._head_digests = checkpoint.layout.manifest.fingerprint, written.digests
        self._retire(run)
        manifest = inventory.manifest
        extract = looked + written.extract
        return Published(
            manifest.payload,
            len(manifest.tensors),
            changed,
            extract,
            time.perf_counter() - began - extract,
        )

    def _settle(self, run: Directory, commit: Commit) -> None:
        """Give a finished version its name: from now on it can be read, but nobody knows of it."""
        if not remove_version(run, commit.version):  # of an attempt that was not announced
            raise WeightSyncError(f"{run.path}/{commit.directory} is in the way, and stays there")
        run.rename(names.unfinished_name(commit.version), commit.directory)
        if self._scheme.durable:
            run.sync()

    def _announce(self, run: Directory, commit: Commit, same: bool) -> None:
        if same:
            # Nothing but the addressees can differ: the same weights stay where they are.
            assert self._head is not None
            commit = replace(self._head, receivers=commit.receivers, time=commit.time)
        try:
            run.replace(names.HEAD, commit.to_json(), durable=self._scheme.durable)
            self._head, self._last = commit, commit.version
        except BaseException:
            # An interrupt may come just after the rename: what is there counts.
            self._head = _former_head(run)
            self._head_digests = None
            if self._head is None or self._head.version != commit.version:
                remove_version(run, commit.version)
            raise

    def _retire(self, run: Directory) -> None:
        assert self._head is not None
        try:
            retire(run, self._scheme.keep, self._head.version)
        except (OSError, WeightSyncError) as error:  # the version is published all the same
            log.warning("%s: old versions could not be removed: %s", run.path, error)

    def _same_number(self, commit: Commit) -> bool:
        """Whether this is the head's version once more, with the same weights."""
        if self._head is None or self._head.version != commit.version:
            return False
        if self._head.digest != commit.digest:
            raise VersionError(
                f"version {commit.version.number} was published before with other weights: "
                "receivers that hold it would never see these; use a newer number"
            )
        return True

    def _changed(self, checkpoint: Checkpoint, digests: Digests) -> int | None:
        manifest = checkpoint.layout.manifest
        if self._head_digests is None or self._head_digests[0] != manifest.fingerprint:
            return None
        changed = begin = 0
        for shard in checkpoint.layout.shards:
            geometry = shard.geometry
            its = slice(begin, begin + geometry.chunks)
            changed += geometry.changed(self._head_digests[1][its], digests[its])
            begin += geometry.chunks
        return changed

    # ---------------------------------------------------------------- receivers

    def receivers(self) -> list[ReceiverReport]:
        return self._receivers.reports()

    def wait_applied(
        self, version: Version, deadline: Deadline, receivers: Sequence[str] | None = None
    ) -> list[ReceiverReport]:
        return self._receivers.wait_applied(version, deadline, receivers, self._stale)

    def close(self) -> None:
        self._copier.close()
        self._ownership.release()


def _former_head(run: Directory) -> Commit | None:
    """The last commit of a former sender, readable until the first new one."""
    try:
        return Commit.from_json(run.read(names.HEAD, MAX_RECORD), names.HEAD)
    except FileNotFoundError:
        return None
    except ProtocolError:
        run.discard(names.HEAD)
        return None
