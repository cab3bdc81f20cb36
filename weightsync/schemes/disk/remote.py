"""DiskScheme over an object store: the same directories, without locks and without renames.

A sender writes a version into its host's cache, uploads it and puts ``HEAD`` last. Receivers look
at ``HEAD``, and fetch a version once for each host. Who is alive is known by beats.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from weightsync.chunks import Copier
from weightsync.deadline import Deadline
from weightsync.errors import (
    DeadlineError,
    ProtocolError,
    SenderBusyError,
    VersionError,
    WeightSyncError,
)
from weightsync.files import Lock
from weightsync.manifest import Manifest
from weightsync.report import ReceiverReport
from weightsync.run.membership import announced
from weightsync.run.process import busy_words, self_description
from weightsync.run.receivers import Receivers, Record, Records
from weightsync.run.records import (
    MAX_RECORD,
    addressees,
    is_receiver_id,
    report_from_json,
    report_to_json,
    require_receiver_id,
)
from weightsync.schemes.disk import names
from weightsync.schemes.disk.cache import Cache, Filling, cache_directory, tidy, transfer_all
from weightsync.schemes.disk.commit import Commit
from weightsync.schemes.disk.history import History
from weightsync.schemes.disk.presence import Pulse, Sign, Watch, read_sign
from weightsync.schemes.disk.publisher import require_room, write_copier
from weightsync.schemes.disk.retention import remove_version
from weightsync.schemes.disk.store import Store
from weightsync.schemes.disk.version import Written, write_version
from weightsync.source import WeightSource
from weightsync.transport import Crew, Published, Publisher, Snapshot, Subscriber
from weightsync.version import Version, require_newer
from weightsync.words import address_of, one_line

if TYPE_CHECKING:
    from weightsync.schemes.disk import DiskScheme

T = TypeVar("T")

log = logging.getLogger("weightsync")

SENDER = "sender.json"
RECEIVERS = "receivers"

_POLL = 0.1
"""Seconds between two looks at an object, at least: a store may ask money for each."""


# -------------------------------------------------------------------- the trainer's end


class RemotePublisher(Publisher):
    """See :class:`~weightsync.transport.Publisher`."""

    def __init__(self, scheme: DiskScheme) -> None:
        self._scheme = replace(scheme, durable=False)  # the cache need not be
        self._store = Store(scheme.path)
        self._pulse: Pulse | None = None
        self._epoch = 0
        self._records = RecordObjects(self._store, scheme.patience)
        self._receivers = Receivers(self._records, lambda: self._epoch)
        self._history = History(scheme.shard_bytes)
        self._copier = write_copier(scheme.threads)
        self._lease: Lock | None = None

    def open(self, deadline: Deadline, epoch: int | None = None) -> int:
        if self._pulse is not None and not self._pulse.lost:
            if epoch not in (None, self._epoch):
                self._begin(epoch, self._epoch, deadline)
            return self._epoch
        former = self._wait_until_free(deadline)
        self._history.found(_head_of(self._store, deadline))
        seen = [version.epoch for version in store_versions(self._store, deadline)]
        seen += [self._history.version.epoch] if self._history.version else []
        self._begin(epoch, max([former, self._epoch, *seen]), deadline)
        self._sweep(deadline)
        return self._epoch

    def _wait_until_free(self, deadline: Deadline) -> int:
        """Wait until there is no other live sender. Returns the epoch of the last one."""
        watch = Watch(self._scheme.patience)
        found: list[Sign] = []

        def attempt() -> bool | None:
            try:
                sign = read_sign(self._store, SENDER, deadline)
            except ProtocolError:  # nobody beats with that
                return True
            if sign is None:
                return True
            found[:] = [sign]
            alive = watch.alive(SENDER, sign)
            if alive:
                raise SenderBusyError(
                    f"{self._store.where}: "
                    + busy_words(sign.words, "give each trainer a URL of its own")
                )
            return None if alive is None else True

        if _poll(attempt, deadline) is None:
            raise DeadlineError(
                f"{self._store.where}: whether its former sender is alive was not known within "
                f"{deadline.seconds:.1f} s (patience={self._scheme.patience})"
            )
        epoch = found[0].words.get("epoch") if found else 0
        return epoch if type(epoch) is int and 0 <= epoch < 1 << 53 else 0

    def _begin(self, epoch: int | None, before: int, deadline: Deadline) -> None:
        if epoch is None:
            time.sleep(0.001)  # so that no other sender draws the same one
            epoch = max(before + 1, int(time.time() * 1000))
        if epoch <= before:
            raise VersionError(
                f"{self._store.where} has seen a sender of epoch {before}; {epoch} is not later"
            )
        words = {**self_description(), "epoch": epoch}
        if self._pulse is not None and not self._pulse.lost:
            self._pulse.say(words, deadline)
        else:
            remove = not self._scheme.keep_files
            self._pulse = Pulse(
                self._store, SENDER, words, self._scheme.patience, owns=True, remove=remove
            )
            # Two may have begun at the same time: the last one to write is the sender.
            time.sleep(_POLL)
            self._pulse.require_ours(deadline)
        self._epoch = epoch

    def _sweep(self, deadline: Deadline) -> None:
        """Remove what a dead sender has not announced, and what ended receivers said."""
        head = self._history.version
        for version in store_versions(self._store, deadline):
            folder = names.version_name(version)
            half = names.RECORD not in self._store.names(folder, deadline)
            if half or (head is not None and version > head):
                _remove(self._store, version, deadline)
        self._records.forget_signed_off()

    def prepare(self, manifest: Manifest, deadline: Deadline) -> None:
        self._owned(deadline)
        needed = self._history.checkpoint(manifest).layout.nbytes
        require_room(cache_directory(self._scheme.cache, self._store.url), needed)

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
        require_newer(version, self._epoch, history.last)
        self._owned(deadline)
        self._records.forget_signed_off()
        meant_for = addressees(receivers)
        inventory = weights.inventory()
        manifest = inventory.manifest
        looked = time.perf_counter() - began
        self.prepare(manifest, deadline)
        checkpoint = history.checkpoint(manifest)
        cache = cache_directory(self._scheme.cache, self._store.url)
        filling = Filling.begin(cache, version)
        if filling is None:
            raise WeightSyncError(f"{cache.path}: another process writes version {version}")
        try:
            written = write_version(
                filling.directory, checkpoint, inventory, self._copier, self._scheme, deadline
            )
            layout = checkpoint.layout
            commit = Commit(version, written.digest, layout.nbytes, meant_for, time.time())
            repeated = history.repeats(commit)
            if repeated:
                commit = history.addressed_anew(commit)
            else:
                self._upload(filling, commit, written, deadline)
            changed = history.changed(layout, written.digests)
            self._records.look_again()
            history.stale = self._records.raw() if version == history.last else {}
            self._owned(deadline)
            self._store.write(names.HEAD, commit.to_json(), deadline)
        except BaseException:
            filling.give_up()
            self._undo(version)
            raise
        if repeated:
            filling.give_up()
        else:
            self._keep(filling, version)
        history.announced(commit, layout, written.digests)
        self._retire(deadline)
        extract = looked + written.extract
        seconds = time.perf_counter() - began - extract
        return Published(manifest.payload, len(manifest.tensors), changed, extract, seconds)

    def _upload(
        self, filling: Filling, commit: Commit, written: Written, deadline: Deadline
    ) -> None:
        """Have a version in the store, its record last."""
        written.finish(commit)
        folder, path = commit.directory, filling.directory.path
        files = [n for n in filling.directory.names() if names.is_version_file(n)]
        transfer_all(
            [
                partial(self._store.upload, f"{path}/{name}", f"{folder}/{name}", deadline)
                for name in files
                if name not in (names.RECORD, names.LEASE)
            ]
        )
        self._store.write(f"{folder}/{names.RECORD}", commit.to_json(), deadline)

    def _undo(self, version: Version) -> None:
        """Remove what was uploaded, unless it is announced all the same."""
        deadline = Deadline(self._scheme.patience)
        with contextlib.suppress(WeightSyncError):
            head = _head_of(self._store, deadline)
            if head != self._history.head:
                self._history.found(head)
            if self._history.version != version:
                _remove(self._store, version, deadline)

    def _keep(self, filling: Filling, version: Version) -> None:
        """Leave the version in this host's cache, for receivers that are here too."""
        cache = cache_directory(self._scheme.cache, self._store.url)
        remove_version(cache, version)
        former, self._lease = self._lease, filling.finish()
        if former is not None:
            former.release()
        tidy(cache, version)

    def _retire(self, deadline: Deadline) -> None:
        try:
            for version in store_versions(self._store, deadline)[: -self._scheme.keep]:
                if version != self._history.version:
                    _remove(self._store, version, deadline)
        except WeightSyncError as error:  # the version is published all the same
            where = address_of(self._store.url)
            log.warning("%s: old versions could not be removed: %s", where, one_line(error))

    def receivers(self) -> list[ReceiverReport]:
        return self._receivers.reports()

    def wait_applied(
        self, version: Version, deadline: Deadline, receivers: Sequence[str] | None = None
    ) -> list[ReceiverReport]:
        return self._receivers.wait_applied(version, deadline, receivers, self._history.stale)

    def close(self) -> None:
        self._copier.close()
        if self._lease is not None:
            self._lease.release()
        pulse, self._pulse = self._pulse, None
        if pulse is None:
            return
        if not self._scheme.keep_files and not pulse.lost:
            self._remove_all(Deadline(self._scheme.patience))
        pulse.close()

    def _remove_all(self, deadline: Deadline) -> None:
        with contextlib.suppress(WeightSyncError):
            self._store.remove(names.HEAD, deadline)
            for version in store_versions(self._store, deadline):
                _remove(self._store, version, deadline)
            for name in self._store.names(RECEIVERS, deadline):
                if name.endswith(".json") and is_receiver_id(name[:-5]):
                    self._store.remove(f"{RECEIVERS}/{name}", deadline)
            self._store.remove_folder(RECEIVERS, deadline)

    def _owned(self, deadline: Deadline) -> None:
        if self._pulse is None:
            raise WeightSyncError("the publisher is not open")
        self._pulse.require_ours(deadline)


class RecordObjects(Records):
    """What receivers say, and whether they still beat."""

    def __init__(self, store: Store, patience: float) -> None:
        self._store = store
        self._patience = patience
        self._watch = Watch(patience)
        self._looked = float("-inf")
        self._signs: dict[str, Sign | ProtocolError] = {}

    def look_again(self) -> None:
        """What was seen a moment ago is too old for what comes next."""
        self._looked = float("-inf")

    def _look(self) -> dict[str, Sign | ProtocolError]:
        if time.monotonic() - self._looked >= _POLL:
            deadline = Deadline(self._patience)
            found: dict[str, Sign | ProtocolError] = {}
            for name in self._store.names(RECEIVERS, deadline):
                receiver = name[:-5]
                if not name.endswith(".json") or not is_receiver_id(receiver):
                    continue
                try:
                    sign = read_sign(self._store, f"{RECEIVERS}/{name}", deadline)
                except ProtocolError as error:
                    found[receiver] = error
                else:
                    if sign is not None:
                        found[receiver] = sign
            self._signs, self._looked = found, time.monotonic()
        return self._signs

    def read(self) -> list[Record]:
        records = []
        for receiver, sign in self._look().items():
            try:
                if isinstance(sign, ProtocolError):
                    raise sign
                data = json.dumps(sign.words).encode()
                report = report_from_json(data, f"{self._store.where}/{RECEIVERS}/{receiver}.json")
                if report.receiver != receiver:
                    raise ProtocolError(f"{receiver}.json is of another receiver")
            except ProtocolError as error:
                records.append(Record(ReceiverReport(receiver, "failed", error=str(error))))
                continue
            going = report.state != "failed" and not sign.ended
            if going and self._watch.alive(receiver, sign) is False:
                report = replace(report, state="dead", error=report.error or "it shows no life")
            records.append(Record(report, sign.ended and report.state != "failed"))
        return records

    def raw(self) -> dict[str, bytes]:
        signs = self._look()
        return {
            receiver: json.dumps(sign.words).encode()
            for receiver, sign in signs.items()
            if isinstance(sign, Sign)
        }

    def forget(self, receiver: str) -> None:
        sign = self._signs.get(receiver)
        name = f"{RECEIVERS}/{receiver}.json"
        deadline = Deadline(self._patience)
        with contextlib.suppress(ProtocolError):
            now = read_sign(self._store, name, deadline)
            if isinstance(sign, Sign) and now is not None and now.token != sign.token:
                return  # just restarted under its name
        self._store.remove(name, deadline)
        self._signs = {id: s for id, s in self._signs.items() if id != receiver}

    def forget_signed_off(self) -> None:
        for receiver, sign in self._look().items():
            if isinstance(sign, Sign) and sign.ended:
                self.forget(receiver)


# -------------------------------------------------------------------- the inference end


class RemoteSubscriber(Subscriber):
    """See :class:`~weightsync.transport.Subscriber`."""

    def __init__(self, scheme: DiskScheme, receiver: str | None) -> None:
        require_receiver_id(receiver)
        self._scheme = scheme
        self._receiver = receiver
        self._store = Store(scheme.path)
        self._watch = Watch(scheme.patience)
        self._cache: Cache | None = None
        self._pulse: Pulse | None = None

    def open(self, deadline: Deadline) -> None:
        def attempt() -> bool | None:
            with contextlib.suppress(ProtocolError):
                sign = read_sign(self._store, SENDER, deadline)
                return (sign is not None and self._watch.alive(SENDER, sign)) or None
            return None

        if _poll(attempt, deadline) is None:
            raise DeadlineError(
                f"no live sender at {self._store.where} within {deadline.seconds:.1f} s: is its "
                "connect() done, and is the URL the same on both sides?"
            )

    def wait(self, after: Version | None, deadline: Deadline) -> Version | None:
        def attempt() -> Version | None:
            # One look is due, also when the time is over.
            within = Deadline(max(deadline.remaining, self._scheme.patience))
            head = _announced(self._store, within)
            if head is None or not announced(head, after, self._receiver, self._store.where):
                return None
            return head.version

        return _poll(attempt, deadline)

    def snapshot(self, version: Version, deadline: Deadline) -> Snapshot:
        if self._cache is None:
            copier = Copier(self._scheme.threads)
            self._cache = Cache(self._store, self._scheme.cache, copier, self._scheme.verify)
        return self._cache.snapshot(version, deadline)

    def acknowledge(self, report: ReceiverReport) -> None:
        if self._receiver is None:
            raise WeightSyncError("this subscriber has no id to acknowledge under")
        words: dict[str, Any] = json.loads(report_to_json(report))
        patience = self._scheme.patience
        if self._pulse is not None and not self._pulse.lost:
            with contextlib.suppress(WeightSyncError):
                self._pulse.say(words, Deadline(patience))
                return
        name = f"{RECEIVERS}/{self._receiver}.json"
        self._pulse = Pulse(self._store, name, words, patience)

    def close(self) -> None:
        if self._cache is not None:
            self._cache.close()
        pulse, self._pulse = self._pulse, None
        if pulse is not None:
            pulse.close()


# -------------------------------------------------------------------- both


def newest(scheme: DiskScheme) -> Version | None:
    """See :meth:`DiskScheme.newest`."""
    head = _announced(Store(scheme.path), Deadline(max(scheme.patience, 30.0)))
    return head.version if head else None


def _announced(store: Store, deadline: Deadline) -> Commit | None:
    """
    Raises:
        ProtocolError: ``HEAD`` is malformed.
    """
    try:
        data = store.read(names.HEAD, MAX_RECORD, deadline)
    except FileNotFoundError:
        return None
    return Commit.from_json(data, f"{store.where}/{names.HEAD}")


def _poll(attempt: Callable[[], T | None], deadline: Deadline) -> T | None:
    """Like :meth:`Deadline.wait`, with fewer looks."""
    while True:
        found = attempt()
        if found is not None or deadline.expired:
            return found
        time.sleep(min(_POLL, deadline.remaining))


def _head_of(store: Store, deadline: Deadline) -> Commit | None:
    """What is announced, if anybody understands it."""
    try:
        return _announced(store, deadline)
    except ProtocolError:
        return None


def store_versions(store: Store, deadline: Deadline) -> list[Version]:
    found = map(names.version_of, store.names("", deadline))
    return sorted(version for version in found if version is not None)


def _remove(store: Store, version: Version, deadline: Deadline) -> None:
    folder = names.version_name(version)
    files = [name for name in store.names(folder, deadline) if names.is_version_file(name)]
    for name in sorted(files, key=lambda name: name != names.RECORD):
        store.remove(f"{folder}/{name}", deadline)
    store.remove_folder(folder, deadline)
