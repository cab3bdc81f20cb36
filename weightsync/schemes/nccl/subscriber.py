"""The inference end: hears of versions, and says how it went. The bytes are a reader's business."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import weakref
from typing import TYPE_CHECKING

from weightsync.deadline import Deadline
from weightsync.errors import ProtocolError, VersionGoneError, WeightSyncError
from weightsync.manifest import Manifest
from weightsync.report import ReceiverReport
from weightsync.run.records import report_to_json, require_receiver_id
from weightsync.schemes.nccl.control import Connection, Message
from weightsync.schemes.nccl.endpoint import Endpoint
from weightsync.schemes.nccl.link import Link
from weightsync.schemes.nccl.reader import Reader
from weightsync.schemes.nccl.staging import DescribedSnapshot
from weightsync.transport import Snapshot, Subscriber
from weightsync.version import Version

if TYPE_CHECKING:
    from weightsync.schemes.nccl import NCCLScheme

_LAG = 5.0
"""Seconds after which a receiver has heard of a version that another one has been told of."""


class NCCLSubscriber(Subscriber):
    """See :class:`~weightsync.transport.Subscriber`; the protocol is in docs/architecture.md."""

    def __init__(self, scheme: NCCLScheme, receiver: str | None) -> None:
        require_receiver_id(receiver)
        self._scheme = scheme
        self._anonymous = receiver is None
        self._receiver = receiver or f"anonymous-{os.getpid()}-{secrets.token_hex(4)}"
        self._instance = secrets.token_hex(8)
        self._workers = 0
        self._link: Link | None = None
        self._reader: Reader | None = None
        self._said: ReceiverReport | None = None
        self._changed = threading.Condition()
        self._newest: Version | None = None
        self._manifest: Manifest | None = None
        self._manifests: dict[Version, Manifest] = {}

    def delegate(self, workers: int) -> None:
        self._workers = workers

    def open(self, deadline: Deadline) -> None:
        where = Endpoint(self._scheme.master_address, self._scheme.port)
        if self._link is None:
            self._link = Link(where, self._scheme.token, self._hello, self._heard)
            weakref.finalize(self, self._link.close)
            if self._workers == 0:
                self._reader = Reader(self._scheme, self._receiver, 0, 1)
                weakref.finalize(self, self._reader.close)
        try:
            self._link.wait_connected(deadline)
            if self._reader is not None:
                self._reader.wait_connected(deadline)
        except BaseException:
            # Or it would connect later, when nobody wants it any more.
            self._hang_up(goodbye=False)
            raise

    def _hello(self) -> Message:
        return {
            "role": "receiver",
            "receiver": self._receiver,
            "instance": self._instance,
            "workers": self._workers or 1,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "report": None if self._said is None else report_to_json(self._said).decode(),
        }

    def _heard(self, connection: Connection, message: Message) -> None:
        if message["op"] == "ping":
            connection.tell({"op": "pong"})
        elif message["op"] == "version":
            self._announced(message)
        elif message["op"] == "void":
            self._forget_newest()

    def _announced(self, message: Message) -> None:
        version = Version.parse(message["version"])
        with self._changed:
            manifest = self._manifest
            if manifest is None or manifest.fingerprint != message["fingerprint"]:
                manifest = Manifest.from_json(str(message["manifest"]).encode())
            self._manifest, self._newest = manifest, version
            self._manifests[version] = manifest
            for old in sorted(self._manifests)[: -2 * self._scheme.buffers]:
                del self._manifests[old]
            self._changed.notify_all()

    def _forget_newest(self) -> None:
        """It had to make room for one that did not come: what the engine has is the newest."""
        with self._changed:
            held = self._said.version if self._said is not None else None
            self._newest = held if held in self._manifests else None

    def wait(self, after: Version | None, deadline: Deadline) -> Version | None:
        with self._changed:
            while True:
                self._require_open()
                newest = self._newest
                if newest is not None and (after is None or newest > after):
                    return newest
                if newest is not None and after is not None and newest.epoch < after.epoch:
                    raise ProtocolError(
                        f"version {newest} comes from a sender whose clock is behind that of "
                        f"{after}, which is held; start it again with a right clock"
                    )
                if deadline.expired:
                    return None
                self._changed.wait(min(0.2, max(deadline.remaining, 0.0005)))

    def snapshot(self, version: Version, deadline: Deadline) -> Snapshot:
        self._require_open()
        if self._reader is not None:
            try:
                return self._reader.staging.lease(version)
            except VersionGoneError:
                if self._newest == version:
                    self._forget_newest()
                raise
        # The sender may just have told others of it that have passed the word on.
        patience = deadline.at_most(_LAG)
        with self._changed:
            while version not in self._manifests:
                if patience.expired or (self._newest is not None and self._newest > version):
                    raise VersionGoneError(f"version {version} has not arrived here, or is gone")
                self._changed.wait(min(0.1, max(patience.remaining, 0.001)))
            return DescribedSnapshot(version, self._manifests[version])

    def acknowledge(self, report: ReceiverReport) -> None:
        if self._anonymous:
            raise WeightSyncError("this subscriber has no id to acknowledge under")
        self._said = report
        if self._reader is not None and report.state == "applied":
            self._reader.staging.soften()
        if self._link is None:
            raise WeightSyncError("the subscriber is not open")
        # If there is no connection now, the next one begins with it.
        self._link.tell({"op": "report", "report": report_to_json(report).decode()})

    def _require_open(self) -> None:
        if self._link is None:
            raise WeightSyncError("the subscriber is not open")

    def close(self) -> None:
        # Of one that failed in its set-up the sender may be about to read why.
        self._hang_up(goodbye=self._said is None or self._said.state != "failed")

    def _hang_up(self, goodbye: bool) -> None:
        link, self._link = self._link, None
        reader, self._reader = self._reader, None
        # Before the reader: a process that is gone, of a receiver that is not, has died.
        if link is not None and goodbye:
            link.end({"op": "bye"})
        elif link is not None:
            link.close()
        if reader is not None:
            reader.close()
        with self._changed:
            self._newest = None
            self._manifests.clear()
            self._changed.notify_all()


class WorkerReader(Subscriber):
    """A reader in one of an engine's own processes: gives snapshots, and nothing else."""

    def __init__(self, scheme: NCCLScheme, receiver: str, rank: int, size: int) -> None:
        self._reader = Reader(scheme, receiver, rank, size)
        weakref.finalize(self, self._reader.close)

    def open(self, deadline: Deadline) -> None:
        self._reader.wait_connected(deadline)

    def wait(self, after: Version | None, deadline: Deadline) -> Version | None:
        raise NotImplementedError("versions are announced to the receiver, not to its workers")

    def snapshot(self, version: Version, deadline: Deadline) -> Snapshot:
        return self._reader.staging.lease(version)

    def acknowledge(self, report: ReceiverReport) -> None:
        raise NotImplementedError("the receiver acknowledges, not its workers")

    def close(self) -> None:
        self._reader.close()
