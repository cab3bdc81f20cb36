"""The trainer's end of the double buffer: writes a free slot, then commits it by a rename."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from weightsync.chunks import Copier, Digests
from weightsync.deadline import Deadline
from weightsync.download import Downloads
from weightsync.errors import (
    DeadlineError,
    ProtocolError,
    VersionError,
    WeightSyncError,
)
from weightsync.files import Directory, Lock
from weightsync.manifest import Manifest
from weightsync.report import ReceiverReport
from weightsync.run.ownership import Ownership
from weightsync.run.receivers import Receivers, RecordFiles
from weightsync.run.records import MAX_RECORD, addressees
from weightsync.run.removal import remove_temporaries
from weightsync.schemes.double_buffer import layout
from weightsync.schemes.double_buffer.generation import Filling, Generation
from weightsync.schemes.double_buffer.layout import Commit
from weightsync.schemes.double_buffer.removal import remove_generation, remove_run
from weightsync.schemes.double_buffer.rows import (
    RowWriter,
    adopt,
    require_all,
    ticket_of,
    write_rows,
)
from weightsync.schemes.double_buffer.slot import require_room, slot_size
from weightsync.source import Inventory, WeightSource
from weightsync.transport import Crew, Published, Publisher
from weightsync.version import Version
from weightsync.words import one_line

log = logging.getLogger("weightsync")

if TYPE_CHECKING:
    from weightsync.schemes.double_buffer import DoubleBufferScheme


class DoubleBufferPublisher(Publisher):
    """See :class:`~weightsync.transport.Publisher`; the protocol is in docs/architecture.md."""

    takes_rows = True

    def __init__(self, scheme: DoubleBufferScheme) -> None:
        self._scheme = scheme
        # What these refer to leads not back to this object: it could not be let go.
        self._ownership = ownership = Ownership(
            scheme.path, None if scheme.keep_files else remove_run
        )
        self._records = RecordFiles(self._ownership.directory)
        self._receivers = Receivers(self._records, lambda: ownership.epoch)
        self._generation: Generation | None = None
        self._head: Commit | None = None
        self._head_digests: Digests | None = None
        self._last: Version | None = None
        # Answers to an earlier attempt at the head's version, which do not count for this one.
        self._stale: dict[str, bytes] = {}
        self._copier = Copier(scheme.threads)
        self._downloads = Downloads()
        self._rows = RowWriter(scheme.path, self._copier, self._downloads)

    # ---------------------------------------------------------------- owning the run

    def open(self, deadline: Deadline, epoch: int | None = None) -> int:
        if not self._ownership.held:
            with self._ownership.taking(deadline) as run:
                self._take_over(run, epoch)
        elif epoch not in (None, self._ownership.epoch):
            self._ownership.begin(epoch)
        return self._ownership.epoch

    def _take_over(self, run: Directory, epoch: int | None) -> None:
        """Begin a new epoch, and remove what the former sender's death left."""
        self._generation = None
        self._head_digests = None
        self._head = self._former_head(run)
        self._ownership.begin(epoch, _at(self._head))
        remove_temporaries(run)
        self._drop_generations(run)

    @staticmethod
    def _former_head(run: Directory) -> Commit | None:
        """The last commit of a former sender, readable until the first new one."""
        try:
            return Commit.from_json(run.read(layout.HEAD, MAX_RECORD), layout.HEAD)
        except FileNotFoundError:
            return None
        except ProtocolError:
            run.remove(layout.HEAD)
            return None

    def _drop_generations(self, run: Directory) -> None:
        """Remove every generation but the current one and the head's, unless somebody reads it."""
        keep = {self._generation.name} if self._generation else set()
        if self._head:
            keep.add(self._head.generation)
        for name in run.names():
            if layout.generation_number(name) is not None and name not in keep:
                remove_generation(run, name)

    # ---------------------------------------------------------------- room for a manifest

    def prepare(self, manifest: Manifest, deadline: Deadline) -> None:
        run = self._ownership.directory()
        current = self._generation
        if current is not None and _same(current.manifest, manifest):
            return
        reused = self._reusable(run, manifest)
        name = reused or layout.generation_name(
            max((layout.generation_number(n) or 0 for n in run.names()), default=0) + 1
        )
        if reused is None and current is None and self._head is not None and not self._leased(run):
            # Left by a dead sender with another model, and nobody reads it: room for the new one.
            run.remove(layout.HEAD)
            self._head = None
            self._drop_generations(run)
        if reused is None:
            require_room(run, self._scheme.slots * slot_size(manifest))
        directory = run.subdirectory(name, create=True)
        remove_temporaries(directory)
        try:
            generation = Generation(directory, name, manifest, self._scheme.slots)
            if not reused:
                directory.replace(layout.MANIFEST, manifest.to_json())
        except BaseException:
            if not reused:
                del directory
                remove_generation(run, name)
            raise
        self._generation = generation
        self._head_digests = None

    def _reusable(self, run: Directory, manifest: Manifest) -> str | None:
        """A generation that a dead sender left for the same manifest: its pages are warm."""
        wanted = {layout.slot_bytes(slot) for slot in range(self._scheme.slots)}
        for name in run.names():
            if layout.generation_number(name) is None:
                continue
            try:
                generation = run.subdirectory(name)
                names = generation.names()
                slots = {entry for entry in names if entry.endswith(".bin")}
                if layout.CREW in names:
                    continue  # a rank of the dead trainer may still be writing there
                data = generation.read(layout.MANIFEST, layout.MAX_MANIFEST)
                if slots == wanted and _same(Manifest.from_json(data), manifest):
                    return name
            except (OSError, WeightSyncError):
                continue
        return None

    @staticmethod
    def _leased(run: Directory) -> bool:
        """Whether a live process reads any slot of any generation."""
        for name in run.names():
            if layout.generation_number(name) is None:
                continue
            generation = run.subdirectory(name)
            for entry in generation.names():
                if entry.endswith(".lock"):
                    lock = Lock(generation, entry)
                    free = lock.try_exclusive()
                    lock.release()
                    if not free:
                        return True
        return False

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
        manifest = inventory.manifest
        looked = time.perf_counter() - began
        self.prepare(manifest, deadline)
        generation = self._generation
        assert generation is not None
        nbytes = manifest.payload
        count = len(manifest.tensors)
        slot = self._free_slot(generation, deadline)
        if slot is None:
            return Published(nbytes, count, None, looked, 0.0, skipped=True)
        progress = generation.progress[slot]
        whole = False
        try:
            generation.directory.remove(layout.slot_record(slot))
            attempt = progress.begin(version)
            filling = Filling(generation, slot, inventory, self._copier, self._downloads)
            streamed = self._fill(generation, slot, filling, inventory, deadline, crew)
            digests = filling.writer.digests()
            commit = Commit(
                version,
                generation.name,
                slot,
                layout.digest_of(manifest, digests),
                manifest.nbytes,
                meant_for,
                time.time(),
                attempt,
            )
            same = self._same_number(commit)
            if not same:
                progress.wrote(manifest.nbytes)
                generation.directory.replace(
                    layout.slot_digests(slot), digests.astype("<u8").tobytes()
                )
                generation.directory.replace(layout.slot_record(slot), commit.to_json())
                whole = True
        finally:
            if not whole:
                progress.give_up()
            # Free before it becomes the head, so that the first reader finds it so.
            generation.locks[slot].unlock()
        changed = self._changed(generation, digests)
        run = self._ownership.directory()
        self._stale = self._records.raw() if version == self._last else {}
        if same:
            # Nothing but the addressees can differ: the same weights stay where they are.
            assert self._head is not None
            commit = replace(self._head, receivers=commit.receivers, time=commit.time)
        else:
            self._head_digests = digests
        try:
            run.replace(layout.HEAD, commit.to_json())
            self._head = commit
            self._last = commit.version
        except BaseException:
            # An interrupt may come just after the rename: what is there counts.
            self._head = self._former_head(run)
            self._head_digests = None
            if self._head is None or self._head.version != commit.version:
                generation.directory.remove(layout.slot_record(slot))
                progress.give_up()
            raise
        try:
            self._drop_generations(run)
        except (OSError, WeightSyncError) as error:  # the version is published all the same
            log.warning("%s: old buffers could not be removed: %s", run.path, one_line(error))
        extract = looked + streamed
        transfer = time.perf_counter() - began - extract
        notes = self._downloads.notes()
        return Published(nbytes, count, changed, extract, transfer, notes=notes)

    def _fill(
        self,
        generation: Generation,
        slot: int,
        filling: Filling,
        inventory: Inventory,
        deadline: Deadline,
        crew: Crew | None,
    ) -> float:
        """Write all bytes of a version, with the help of the other ranks if there are any.

        Returns:
            The seconds the source took.
        """
        if crew is None:
            filling.write_resident()
            return filling.write_stream(deadline, inventory.streamed())
        if not generation.directory.status(layout.CREW):
            generation.directory.replace(layout.CREW, b"")
        crew.start(ticket_of(self._ownership.epoch, generation.name, slot))
        filling.write_resident()
        blocks = [write_rows(filling.slot, inventory, filling.writer, self._downloads)]
        blocks += [adopt(written, filling.writer) for written in crew.finish(deadline)]
        require_all(inventory, np.concatenate(blocks))
        return filling.write_stream(deadline, inventory.gathered())

    def contribute(
        self, ticket: dict[str, Any], inventory: Inventory, deadline: Deadline
    ) -> dict[str, Any]:
        if deadline.expired:  # rank 0 does not wait any more: the slot may be another's
            raise DeadlineError(f"this rank was stopped for more than {deadline.seconds:.1f} s")
        return self._rows.write(ticket, inventory)

    def _same_number(self, commit: Commit) -> bool:
        """Whether this is the head's version once more, with the same weights."""
        if self._head is None or self._head.version != commit.version:
            return False
        if (self._head.generation, self._head.digest) != (commit.generation, commit.digest):
            raise VersionError(
                f"version {commit.version.number} was published before with other weights: "
                "receivers that hold it would never see these; use a newer number"
            )
        return True

    def _changed(self, generation: Generation, digests: Digests) -> int | None:
        before = self._head_digests
        if before is None or len(before) != len(digests):
            return None
        return generation.geometry.changed(before, digests)

    def _free_slot(self, generation: Generation, deadline: Deadline) -> int | None:
        """Lock a slot that is neither the head's nor leased, the longest unused one first."""
        head = self._head
        taken = head.slot if head and head.generation == generation.name else -1
        order = [(taken + 1 + n) % len(generation.slots) for n in range(len(generation.slots))]

        def attempt() -> int | None:
            for slot in order:
                if slot != taken and generation.locks[slot].try_exclusive():
                    return slot
            if (
                head
                and taken >= 0
                and self._receivers.want_no_more(head.version, head.receivers)
                and generation.locks[taken].try_exclusive()
            ):
                self._withdraw(generation)
                return taken
            return None

        slot = attempt()
        if slot is not None or self._scheme.on_busy == "skip":
            return slot
        slot = deadline.wait(attempt)
        if slot is None:
            late = [r for r in self.receivers() if r.state != "dead" and r.version != _at(head)]
            who = "; ".join(map(str, late)) or "a reader that is no receiver"
            raise DeadlineError(
                f"no free slot within {deadline.seconds:.1f} s: every slot but the newest is in "
                f"use by {who}. More slots= give slow receivers more time; on_busy='skip' leaves "
                "versions out instead of waiting"
            )
        return slot

    def _withdraw(self, generation: Generation) -> None:
        """Make the newest other whole version the head again, before the head's slot is written."""
        run = self._ownership.directory()
        assert self._head is not None
        commits = []
        for slot in range(len(generation.slots)):
            with contextlib.suppress(FileNotFoundError, ProtocolError):
                name = layout.slot_record(slot)
                data = generation.directory.read(name, MAX_RECORD)
                commits.append(Commit.from_json(data, name))
        others = [commit for commit in commits if commit.slot != self._head.slot]
        self._head_digests = None
        if others:
            self._head = max(others, key=lambda commit: commit.version)
            run.replace(layout.HEAD, self._head.to_json())
        else:
            self._head = None
            run.remove(layout.HEAD)

    # ---------------------------------------------------------------- receivers

    def receivers(self) -> list[ReceiverReport]:
        return self._receivers.reports()

    def wait_applied(
        self, version: Version, deadline: Deadline, receivers: Sequence[str] | None = None
    ) -> list[ReceiverReport]:
        return self._receivers.wait_applied(version, deadline, receivers, self._stale)

    # ---------------------------------------------------------------- the end

    def close(self) -> None:
        self._generation = None
        self._copier.close()
        self._downloads.clear()
        self._rows.close()
        self._ownership.release()


def _at(head: Commit | None) -> Version | None:
    return head.version if head else None


def _same(one: Manifest, other: Manifest) -> bool:
    return one is other or one.fingerprint == other.fingerprint
