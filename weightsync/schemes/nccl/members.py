"""Who receives: the sender's view of its receivers and of the processes that read for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from weightsync.deadline import Deadline
from weightsync.errors import ProtocolError, SchemeError
from weightsync.manifest import Manifest
from weightsync.report import ReceiverReport
from weightsync.run.records import is_receiver_id, report_from_json
from weightsync.schemes.nccl.control import Connection, Message, Refused
from weightsync.schemes.nccl.inspection import status_message
from weightsync.schemes.nccl.topology import require_distinct
from weightsync.version import Version


@dataclass(eq=False)
class Peer:
    """One process that takes part in collectives. What it says is noted here.

    Attributes:
        grouped: the rounds whose group it has built. ready: ``(update, round)`` it waits for
            buckets of. took: the last bucket it has put into place, of ``update``.
        whole: the last update that it has received as a whole. busy: the last for which it had no
            buffer free. dropped: the version that it last gave up to make room.
    """

    receiver: str
    rank: int
    size: int
    device: str
    host: str
    pid: int
    connection: Connection
    gone: bool = False
    grouped: set[int] = field(default_factory=set)
    ready: tuple[int, int] = (-1, -1)
    update: int = -1
    took: int = -1
    whole: int = -1
    busy: int = -1
    dropped: Version | None = None
    failed: dict[tuple[str, int], str] = field(default_factory=dict)
    fingerprint: str = ""

    def __str__(self) -> str:
        return f"process {self.rank} of {self.size} (pid {self.pid} on {self.host})"


@dataclass(eq=False)
class Member:
    """One receiver.

    Attributes:
        workers: how many peers read for it.
        complete: whether all of them have been there at the same time.
        instance: what tells a receiver that comes back from another of the same name.
        told: the last version it was told of.
        announced, reported: when it was told, and when it last reported, in steps of one counter.
        left: it has said goodbye. said: its death was reported.
        silent: it gets versions, but has not said where it stands, and may never do.
    """

    id: str
    workers: int
    report: ReceiverReport
    connection: Connection | None
    peers: dict[int, Peer] = field(default_factory=dict)
    complete: bool = False
    instance: str = ""
    told: tuple[Version, Manifest] | None = None
    announced: int = 0
    reported: int = 0
    left: bool = False
    said: bool = False
    silent: bool = True
    fingerprint: str = ""

    @property
    def is_whole(self) -> bool:
        if self.connection is None or self.connection.closed:
            return False
        here = [peer for peer in list(self.peers.values()) if not peer.connection.closed]
        return len(here) == self.workers

    @property
    def failed(self) -> bool:
        return self.report.state == "failed"

    def missing(self) -> str:
        """Why not all of it is there."""
        if self.connection is None or self.connection.closed:
            return "its process is gone"
        absent = sorted(set(range(self.workers)) - set(self.peers))
        return f"{len(absent)} of its {self.workers} processes are not connected: {absent}"


class Members:
    """All receivers of a sender. Guarded by ``changed``, which is notified of whatever happens.

    Args:
        backend, device: the sender's own, which the others' must fit.
        workers: how many processes the replicas have, in any order; None if that is not known.
        epoch: the sender's.

    Attributes:
        newest: what visitors are told of the last version.
    """

    def __init__(
        self, backend: str, device: str, workers: Sequence[int] | None, epoch: int
    ) -> None:
        self.changed = threading.Condition(threading.RLock())
        self._backend = backend
        self._device = device
        self._workers = workers
        self.epoch = epoch
        self.newest: dict[str, Any] | None = None
        self._by_id: dict[str, Member] = {}
        self._early: dict[tuple[str, int], Peer] = {}
        self._steps = 0
        self._void = -1
        self._closed = False

    # ---------------------------------------------------------------- connections

    def serve(self, hello: Message, connection: Connection) -> None:
        """Run one connection until it is over."""
        if hello["role"] == "visitor":
            connection.welcome()
            connection.send(status_message(self.newest, self.reports()))
            return
        receiver = hello["receiver"]
        if not isinstance(receiver, str) or not is_receiver_id(receiver):
            raise Refused(f"not a receiver's id: {receiver!r:.120}")
        if hello["role"] == "reader":
            self._serve_reader(receiver, hello, connection)
        elif hello["role"] == "receiver":
            self._serve_receiver(receiver, hello, connection)
        else:
            raise Refused(f"no such role: {hello['role']!r:.80}")

    def _serve_receiver(self, receiver: str, hello: Message, connection: Connection) -> None:
        workers = int(hello["workers"])
        if not 1 <= workers <= 1 << 16:
            raise Refused(f"a receiver of {workers} processes")
        if self._workers is not None and workers not in self._workers:
            raise Refused(
                f"receiver {receiver!r} has {workers} processes; gpus_per_replica= says "
                f"{', '.join(map(str, self._workers))}"
            )
        first = hello["report"]
        host, pid = str(hello["host"]), int(hello["pid"])
        report = ReceiverReport(receiver, "connected", host=host, pid=pid)
        if first is not None:
            report = report_from_json(first.encode(), f"receiver {receiver!r}")
        with self.changed:
            former = self._by_id.get(receiver)
            if former is not None and former.connection is not None:
                self._require_dead(
                    former.connection, lambda: former.connection is None, f"receiver {receiver!r}"
                )
            self._require_open()
            member = Member(receiver, workers, replace(report, receiver=receiver), connection)
            member.silent = first is None
            member.instance = str(hello.get("instance"))
            if first is None and former is not None and former.failed and not former.instance:
                # One of its processes came before it, and was refused.
                member.report, member.silent = former.report, False
            for key, peer in list(self._early.items()):
                if key[0] == receiver:
                    self._enter(member, peer)
                    del self._early[key]
            if former is not None:
                for peer in former.peers.values():
                    if not peer.gone:
                        self._enter(member, peer)
            self._by_id[receiver] = member
            connection.welcome()
            if member.is_whole:
                member.complete = True
            if former is not None and former.instance == member.instance and former.told:
                # It may not have heard of a version that has arrived.
                member.told, member.announced = former.told, former.announced
                member.reported, member.complete = former.reported, former.complete
                self._tell(member, *former.told)
            self.changed.notify_all()
        try:
            while not member.left:
                message = connection.receive(1 << 20)
                self._hear_receiver(member, message)
        finally:
            with self.changed:
                if member.connection is connection:
                    member.connection = None
                    if member.said:
                        self.forget([member.id])
                self.changed.notify_all()

    def _hear_receiver(self, member: Member, message: Message) -> None:
        with self.changed:
            if message["op"] == "report":
                said = report_from_json(message["report"].encode(), f"receiver {member.id!r}")
                member.report = replace(said, receiver=member.id)
                self._steps += 1
                member.reported = self._steps
                member.silent = False
            elif message["op"] == "bye":
                member.left = True
            self.changed.notify_all()

    def _require_open(self) -> None:
        """Whoever comes while this ends would wait for ever for one that is gone."""
        if self._closed:
            raise EOFError("the sender has ended")

    def _find_peer(self, receiver: str, rank: int) -> Peer | None:
        member = self._by_id.get(receiver)
        found = self._early.get((receiver, rank))
        return found or (member.peers.get(rank) if member else None)

    def _require_dead(self, connection: Connection, gone: Callable[[], bool], who: str) -> None:
        """Refuse a second one of the same name, unless the first one's host is gone."""
        before = connection.heard
        connection.tell({"op": "ping"})
        end = time.monotonic() + 1.0
        while not gone() and time.monotonic() < end:
            self.changed.wait(0.02)
            if connection.heard != before:
                raise Refused(f"there is another live {who}")
        connection.close()

    def _serve_reader(self, receiver: str, hello: Message, connection: Connection) -> None:
        if hello["backend"] != self._backend:
            raise Refused(f"backend={hello['backend']!r:.40} here, {self._backend!r} at the sender")
        peer = Peer(
            receiver,
            int(hello["rank"]),
            int(hello["size"]),
            str(hello["device"]),
            str(hello["host"]),
            int(hello["pid"]),
            connection,
        )
        with self.changed:
            other = self._find_peer(receiver, peer.rank)
            if other is not None:
                who = f"process {peer.rank} of receiver {receiver!r}"
                self._require_dead(other.connection, lambda: other.gone, who)
            self._require_open()
            self._require_own_device(peer)
            member = self._by_id.get(receiver)
            if member is not None and member.connection is not None:
                self._enter(member, peer)
            else:
                self._early[receiver, peer.rank] = peer
            connection.welcome()
            self.changed.notify_all()
        try:
            while True:
                message = connection.receive(1 << 20)
                with self.changed:
                    _note(peer, message)
                    if message["op"] == "ready" and peer.ready[0] <= self._void:
                        self.retract([receiver], self._void)  # it was slower than the sender
                    self.changed.notify_all()
        finally:
            with self.changed:
                peer.gone = True
                if self._early.get((receiver, peer.rank)) is peer:
                    del self._early[receiver, peer.rank]
                member = self._by_id.get(receiver)
                if member is not None and member.peers.get(peer.rank) is peer:
                    del member.peers[peer.rank]
                self.changed.notify_all()

    def _enter(self, member: Member, peer: Peer) -> None:
        if peer.size != member.workers or not 0 <= peer.rank < peer.size:
            raise Refused(
                f"receiver {member.id!r} has {member.workers} processes, and {peer} wants to be "
                "one of them"
            )
        member.peers[peer.rank] = peer
        if member.is_whole:
            member.complete = True

    def _require_own_device(self, peer: Peer) -> None:
        devices = {"the trainer (rank 0)": self._device}
        others = [other for member in self._by_id.values() for other in member.peers.values()]
        for other in [*others, *self._early.values()]:
            devices[f"receiver {other.receiver!r}, rank {other.rank}"] = other.device
        devices[f"receiver {peer.receiver!r}, rank {peer.rank}"] = peer.device
        try:
            require_distinct(devices)
        except SchemeError as error:
            words = str(error)
            new = Member(peer.receiver, peer.size, _failed(peer, words), None)
            member = self._by_id.setdefault(peer.receiver, new)
            member.report, member.silent = _failed(peer, words), False
            self.changed.notify_all()
            raise Refused(words) from None

    # ---------------------------------------------------------------- looking

    def known(self) -> list[Member]:
        """Those that have been there as a whole, or failed; not those that are just arriving."""
        with self.changed:
            members = list(self._by_id.values())
        return [
            member
            for member in members
            if (member.complete or member.failed) and (member.is_whole or not member.said)
        ]

    def find(self, id: str) -> Member | None:
        with self.changed:
            return self._by_id.get(id)

    def wait_for(
        self,
        ready: Callable[[], bool],
        deadline: Deadline,
        check: Callable[[], None] = lambda: None,
    ) -> bool:
        """Wait until something holds, looking again whenever something happened."""
        with self.changed:
            while not ready():
                check()
                if deadline.expired:
                    return False
                self.changed.wait(min(0.2, max(deadline.remaining, 0.001)))
            return True

    def reports(self) -> list[ReceiverReport]:
        return [
            self.report_of(member)
            for member in self.known()
            if not member.left and not member.silent
        ]

    def report_of(self, member: Member) -> ReceiverReport:
        report = member.report
        if report.version is not None and report.version.epoch > self.epoch:
            # Its engine would take this sender's versions for older ones.
            error = f"it holds version {report.version}, of a sender whose clock was ahead"
            return replace(report, state="failed", version=None, error=error)
        if report.state != "failed" and not member.is_whole:
            return replace(report, state="dead", error=report.error or member.missing())
        return report

    # ---------------------------------------------------------------- versions

    def announce(self, member: Member, version: Version, manifest: Manifest) -> bool:
        """Tell a receiver that a version has arrived for it."""
        with self.changed:
            # It may have come back since by another connection.
            member = self._by_id.get(member.id, member)
            self._steps += 1
            member.announced, member.told, member.said = self._steps, (version, manifest), False
            for peer in member.peers.values():
                peer.dropped = None  # it may have been this one: an earlier copy of it
            return self._tell(member, version, manifest)

    def retract(self, receivers: Iterable[str], update: int) -> None:
        """Take back versions that were dropped for one that did not come."""
        with self.changed:
            self._void = update
            for member in filter(None, map(self._by_id.get, receivers)):
                dropped = {peer.dropped for peer in member.peers.values()}
                if member.told is not None and member.told[0] in dropped:
                    member.told = None
                    if member.connection is not None:
                        member.connection.tell({"op": "void"})

    def _tell(self, member: Member, version: Version, manifest: Manifest) -> bool:
        message: Message = {
            "op": "version",
            "version": version,
            "fingerprint": manifest.fingerprint,
        }
        if member.connection is None:
            return False
        if member.fingerprint != manifest.fingerprint:
            message["manifest"] = manifest.to_json().decode()
            member.fingerprint = manifest.fingerprint
        return member.connection.tell(message)

    def wait_applied(
        self, version: Version, deadline: Deadline, receivers: Sequence[str] | None
    ) -> list[ReceiverReport]:
        """See :meth:`weightsync.transport.Publisher.wait_applied`."""

        def wanted() -> list[Member]:
            if receivers is not None:
                return [member for id in receivers if (member := self._by_id.get(id))]
            # Those that it, or a newer one, was sent to; one that came later gets the next.
            sent = [m for m in self.known() if m.told and m.told[0] >= version and not m.silent]
            return [m for m in sent if not m.left or self._answered(m, version)]

        def all_answered() -> bool:
            members = wanted()
            enough = len(members) == len(receivers) if receivers is not None else bool(members)
            return enough and all(self._answered(member, version) for member in members)

        self.wait_for(all_answered, deadline)
        with self.changed:
            reports = []
            for member in wanted():
                report = self.report_of(member)
                if not self._answered(member, version):
                    report = replace(report, state="waiting", error=report.error or "late")
                elif member.left and not self._tried(member, version):
                    report = replace(report, state="dead", error="it has signed off")
                elif member.left:
                    report = replace(member.report)
                reports.append(report)
            absent = set(receivers or ()) - {report.receiver for report in reports}
            reports += [
                ReceiverReport(id, "waiting", error="never connected") for id in sorted(absent)
            ]
            self.forget(r.receiver for r in reports if r.state in ("dead", "failed"))
            return reports

    def _answered(self, member: Member, version: Version) -> bool:
        held = member.report.version
        if held is not None and held >= version:
            return True
        if member.left or not member.is_whole or member.failed:
            return True
        if member.told is None or member.told[0] < version:
            return True  # it did not arrive there, which was said already
        # An answer to an earlier attempt at this version is none to this one.
        return self._tried(member, version) and member.reported > member.announced

    @staticmethod
    def _tried(member: Member, version: Version) -> bool:
        known = (member.report.version, member.report.attempted)
        return any(each is not None and each >= version for each in known)

    def forget(self, ids: Iterable[str]) -> None:
        """Those that are dead, which was said now; one that has come back since is kept."""
        with self.changed:
            for id in list(ids):
                member = self._by_id.get(id)
                if member is not None and member.connection is None:
                    del self._by_id[id]
                    # Those of its processes that are back already, before itself.
                    back = [peer for peer in member.peers.values() if not peer.gone]
                    self._early.update({(id, peer.rank): peer for peer in back})
                elif member is not None:
                    member.said = True

    def forget_signed_off(self) -> None:
        with self.changed:
            self.forget([member.id for member in self._by_id.values() if member.left])

    def close(self) -> None:
        with self.changed:
            self._closed = True
            connections = [m.connection for m in self._by_id.values() if m.connection]
            peers = [p for m in self._by_id.values() for p in m.peers.values()]
            connections += [peer.connection for peer in [*peers, *self._early.values()]]
        for connection in connections:
            connection.close()


def _note(peer: Peer, message: Message) -> None:
    op = message["op"]
    if op == "grouped":
        peer.grouped.add(int(message["round"]))
    elif op == "ready":
        peer.ready = int(message["update"]), int(message["round"])
        if message.get("dropped") is not None:
            peer.dropped = Version.parse(message["dropped"])
    elif op == "took":
        peer.update, peer.took = int(message["update"]), int(message["bucket"])
    elif op == "busy":
        peer.busy = int(message["update"])
    elif op == "whole":
        peer.whole = int(message["update"])
    elif op == "failed":
        for key in ("update", "round"):
            if key in message:
                peer.failed[key, int(message[key])] = str(message["error"])[:2000]
    elif op != "pong":
        raise ProtocolError(f"no such word: {op!r:.80}")


def _failed(peer: Peer, words: str) -> ReceiverReport:
    return ReceiverReport(peer.receiver, "failed", error=words, host=peer.host, pid=peer.pid)
