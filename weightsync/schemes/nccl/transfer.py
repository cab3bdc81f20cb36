"""One update on its way: buckets to all replicas, and what is done when one of them is lost.

A group is built of the trainer and every process of the replicas that take part. If one of them
dies, stops or fails, its replica is left out, a group of the others is built, and the buckets that
not all of them have are sent again; the source is not asked twice.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from weightsync.chunks import Digests
from weightsync.deadline import Deadline, call_with_deadline
from weightsync.errors import WeightSyncError
from weightsync.manifest import Manifest
from weightsync.schemes.nccl.asking import Asking
from weightsync.schemes.nccl.buckets import Bucket
from weightsync.schemes.nccl.building import Building
from weightsync.schemes.nccl.digests import to_text
from weightsync.schemes.nccl.endpoint import is_loopback
from weightsync.schemes.nccl.group import Group, join_store, serve_store
from weightsync.schemes.nccl.members import Member, Members, Peer
from weightsync.schemes.nccl.reader import IN_FLIGHT
from weightsync.schemes.nccl.topology import ranks_of
from weightsync.version import Version
from weightsync.words import one_line

if TYPE_CHECKING:
    from weightsync.schemes.nccl import NCCLScheme

log = logging.getLogger("weightsync")

MAX_GROUPS = 4
"""Groups that are kept, so that updates for one receiver and for all can take turns."""

GROUP_SECONDS = 30.0
"""For building a group; starting NCCL takes seconds."""


class Lost(Exception):
    """Some processes cannot go on. ``why`` has words for each."""

    def __init__(self, why: dict[Peer, str], late: bool = False) -> None:
        super().__init__("; ".join(f"{peer}: {words}" for peer, words in why.items()))
        self.why = why
        self.late = late


class Rounds:
    """The groups of a sender. Each is a round of its own, with keys that no other has."""

    def __init__(self, scheme: NCCLScheme, members: Members, device: torch.device) -> None:
        self._scheme = scheme
        self._members = members
        self._device = device
        self._where, self._store = serve_store(scheme.master_address)
        self._secret = secrets.token_hex(8)
        self._number = 0
        self._groups: dict[tuple[Peer, ...], tuple[int, Group]] = {}
        self._busy: int | None = None

    def get(self, peers: Sequence[Peer], seconds: float) -> tuple[int, Group]:
        """The group of these processes, built if there is none.

        Raises:
            Lost: some did not come. WeightSyncError: it could not be built here.
        """
        key = tuple(peers)
        self.drop_interrupted()
        self.drop_gone()
        if key in self._groups:
            self._groups[key] = self._groups.pop(key)  # the last used last
            self._busy = self._groups[key][0]
            return self._groups[key]
        while len(self._groups) >= MAX_GROUPS:
            self.drop(next(iter(self._groups.values()))[0])
        self._number += 1
        number = self._number
        name = f"{self._secret}/{number}"
        size = len(peers) + 1
        for rank, peer in enumerate(peers, 1):
            peer.connection.tell(
                {
                    "op": "group",
                    "round": number,
                    "rank": rank,
                    "size": size,
                    "store": [self._where.host, self._where.port],
                    "key": name,
                    "seconds": seconds,
                }
            )
        silence = min(self._scheme.peer_timeout, 0.6 * seconds)
        building = Building(self._members, peers, number, seconds, silence)

        def check() -> None:
            if building.trouble():
                raise Lost({})  # by whom is looked into below

        try:
            group = call_with_deadline(
                lambda: Group(
                    self._scheme.backend,
                    # A client of its own: a build that is stuck holds its client for as long.
                    join_store(self._where, seconds),
                    name,
                    0,
                    size,
                    _host_for(peers),
                    self._device,
                    seconds,
                ),
                Deadline(seconds + 1),
                f"building a group of {size}",
                check,
            )
            self._groups[key] = number, group
            self._busy = number
            if not self._members.wait_for(
                lambda: all(number in peer.grouped for peer in peers),
                Deadline(seconds),
                check,
            ):
                raise Lost({})
        except BaseException as error:
            try:
                # Before they are told to leave: who was, says no more that it failed.
                if isinstance(error, Lost | WeightSyncError) and (why := building.culprits()):
                    raise Lost(why) from None
                raise
            finally:
                self._tell_leave(peers, number)
                if key in self._groups:
                    self._groups.pop(key)[1].leave()
        return number, group

    def _tell_leave(self, peers: Sequence[Peer], number: int) -> None:
        for peer in peers:
            if not peer.gone:
                peer.connection.tell({"op": "leave", "round": number})

    def drop(self, number: int) -> None:
        for key, (found, group) in list(self._groups.items()):
            if found == number:
                del self._groups[key]
                self._tell_leave(key, number)
                group.leave()

    def at_rest(self) -> None:
        """Whatever was begun in the group that was used last is done, by everybody."""
        self._busy = None

    def drop_interrupted(self) -> None:
        """Leave a group whose use was broken off, by however many interrupts."""
        if self._busy is not None:
            self.drop(self._busy)
            self._busy = None

    def drop_gone(self) -> None:
        """Leave the groups of which a member is gone."""
        for key, (number, _) in list(self._groups.items()):
            if any(peer.gone for peer in key):
                self.drop(number)

    def close(self) -> None:
        for number, _ in list(self._groups.values()):
            self.drop(number)


class Transfer:
    """
    Args:
        replicas: who is to have it.
        update: a number that no other update of this sender has.
        size: of a bucket at most, in bytes.

    Attributes:
        lost: id of a replica -> whether it is only late, and why it was left out.
    """

    def __init__(
        self,
        scheme: NCCLScheme,
        members: Members,
        rounds: Rounds,
        replicas: Sequence[Member],
        update: int,
        version: Version,
        manifest: Manifest,
        device: torch.device,
        deadline: Deadline,
        size: int,
        in_flight: int = IN_FLIGHT,
    ) -> None:
        self._members = members
        self._rounds = rounds
        self._update = update
        self._version = version
        self._manifest = manifest
        self._device = device
        self._deadline = deadline
        self._size = size
        # One that stops must leave time for the others.
        self._silence = min(scheme.peer_timeout, max(0.5, deadline.remaining / 3))
        self._replicas = list(replicas)
        self._peers: list[Peer] = []
        self._round = -1
        self._ready = -1
        self._begun: dict[str, list[Peer]] = {}
        self._count = 0
        self._group: Group | None = None
        self._in_flight = in_flight
        self._buffers: list[torch.Tensor] = []
        self._under_way: deque[tuple[Bucket, list[Any]]] = deque()
        self._asking = Asking(self._silence)
        self._repeated = 0
        self._ending = False
        self.lost: dict[str, tuple[bool, str]] = {}

    @property
    def replicas(self) -> list[Member]:
        """Those that have not been lost."""
        return self._replicas

    def begin(self) -> None:
        """Build the group and have everybody get ready, which the first bucket waits for.

        Raises:
            WeightSyncError: nobody is left.
        """
        self._mending(lambda: None)

    def next_buffer(self) -> torch.Tensor:
        """A buffer on the CPU for the next bucket; waits until one is free."""
        while len(self._under_way) >= self._in_flight:
            self._mending(self._settle_oldest)
        if not self._buffers:
            self._buffers = [_buffer(self._size, self._device) for _ in range(self._in_flight)]
        parts = [part for bucket, _ in self._under_way for part in bucket.parts]
        taken = {id(part.buffer) for part in parts}
        return next(buffer for buffer in self._buffers if id(buffer) not in taken)

    def let_go(self, buffer: torch.Tensor) -> None:
        """Wait until no bucket under way has a part in some memory."""

        def is_used() -> bool:
            place = buffer.untyped_storage().data_ptr()
            parts = (part for bucket, _ in self._under_way for part in bucket.parts)
            return any(part.buffer.untyped_storage().data_ptr() == place for part in parts)

        while is_used():
            self._mending(self._settle_oldest)

    def send(self, bucket: Bucket) -> None:
        while len(self._under_way) >= self._in_flight:
            self._mending(self._settle_oldest)
        self._mending(lambda: self._post(bucket))
        self._count = bucket.number + 1

    def finish(self, digests: Digests | None = None) -> None:
        """Wait until all have all of it.

        Args:
            digests: of all buckets, if they did not come with them.

        Raises:
            WeightSyncError: nobody is left.
        """
        if digests is not None:  # a long message, which is read while buckets are under way
            text = to_text(digests)
            self._tell({"op": "digests", "update": self._update, "digests": text})

        def end() -> None:
            self._require_ready()
            while self._under_way:
                self._settle_oldest()
            message = {"op": "end", "update": self._update, "buckets": self._count}
            for peer in self._peers:
                if peer.whole != self._update:
                    peer.connection.tell(message)
            self._await(
                lambda peer: peer.whole == self._update, "it has not said that all is there"
            )

        self._ending = True
        self._mending(end)
        self._rounds.at_rest()

    def cancel(self, orderly: bool) -> None:
        """Nothing comes of it; everybody forgets what has arrived.

        Args:
            orderly: what was said to all has also been done. Otherwise, after an interrupt, some
                may wait for a bucket that never left: the group is left.
        """
        try:
            while orderly and self._under_way and self._group is not None:
                self._settle_oldest()
        except (Lost, WeightSyncError):
            orderly = False
        if orderly:
            self._tell({"op": "cancel", "update": self._update})
            self._rounds.at_rest()
        else:
            self._rounds.drop_interrupted()
            self._tell({"op": "cancel", "update": self._update})

    # ---------------------------------------------------------------- losing replicas

    def _mending(self, step: Callable[[], None]) -> None:
        """Take a step; as often as replicas are lost in it, go on without them."""
        while True:
            try:
                over = self._ending and not self._under_way and self._ready == self._round
                if self._group is None and not over:
                    self._gather()
                step()
                return
            except Lost as lost:
                self._leave_out(lost)
            except WeightSyncError as error:
                self._leave_out(self._culprits(error))
            if not self._replicas:
                words = "; ".join(f"receiver {id!r}: {why}" for id, (_, why) in self.lost.items())
                raise WeightSyncError(f"version {self._version} reached nobody: {words}")

    def _culprits(self, error: WeightSyncError) -> Lost:
        """Who is to blame for a collective that failed: those that died, or do not answer now.

        If that is nobody, it is tried again with all of them, twice.
        """
        self._drop_group()
        before = {peer: peer.connection.heard for peer in self._peers}
        for peer in self._peers:
            peer.connection.tell({"op": "ping"})
        within = self._deadline.at_most(self._silence)

        def answered(peer: Peer) -> bool:
            return peer.gone or peer.connection.heard > before[peer]

        self._members.wait_for(lambda: all(map(answered, self._peers)), within)
        lost = {
            peer: "its process is gone" if peer.gone else "it does not answer"
            for peer in self._peers
            if peer.gone or not answered(peer)
        }
        self._repeated += 1
        if not lost and (self._repeated > 2 or self._deadline.expired):
            lost = {peer: str(error) for peer in self._peers}
        return Lost(lost)

    def _leave_out(self, lost: Lost) -> None:
        self._drop_group()
        for peer, words in lost.why.items():
            said = f"version {self._version}: {one_line(words)}"
            log.warning("receiver %s, %s: %s", peer.receiver, peer, said)
            self.lost.setdefault(peer.receiver, (lost.late, f"{peer}: {words}"))
            member = self._members.find(peer.receiver)
            if not lost.late:  # they come back by themselves, if they live
                peer.connection.close()
                if member is not None and member.connection is not None:
                    member.connection.close()
        self._peers = [peer for peer in self._peers if peer.receiver not in self.lost]
        gone = [member for member in self._replicas if member.id in self.lost]
        for member in gone:
            for peer in list(member.peers.values()):  # they are leaving just now
                peer.connection.tell({"op": "cancel", "update": self._update})
        self._replicas = [member for member in self._replicas if member not in gone]

    def _drop_group(self) -> None:
        self._rounds.drop(self._round)
        self._group = None

    def _gather(self) -> None:
        """A group of all that are left, ready to take what they have not taken yet."""
        members = self._replicas
        why: dict[Peer, str] = {}
        with self._members.changed:
            peers = []
            for member in members:
                here = [member.peers[rank] for rank in sorted(member.peers)]
                if not member.is_whole:
                    self.lost[member.id] = False, member.missing()
                elif self._begun.get(member.id, here) != here:
                    self.lost[member.id] = False, "it went away, and has come back"
                peers += here
        self._replicas = [member for member in members if member.id not in self.lost]
        self._peers = [peer for peer in peers if peer.receiver not in self.lost]
        if not self._replicas:
            raise Lost(why)
        ranks = ranks_of([member.workers for member in self._replicas])
        assert ranks[-1].stop == len(self._peers) + 1
        seconds = max(1.0, min(GROUP_SECONDS, self._deadline.remaining / 2))
        number, group = self._rounds.get(self._peers, seconds)
        self._round, self._group = number, group
        self._begin()
        # Each stays under way, whatever becomes of those before it: another may be lost just now.
        for place, (bucket, _) in enumerate(tuple(self._under_way)):
            self._under_way[place] = bucket, self._broadcast(bucket)

    def _begin(self) -> None:
        document = None
        for peer in self._peers:
            message: dict[str, Any] = {
                "op": "begin",
                "update": self._update,
                "round": self._round,
                "version": self._version,
                "fingerprint": self._manifest.fingerprint,
                "keep": self._held_by(peer.receiver),
                "seconds": self._patience(),
            }
            if peer.fingerprint != self._manifest.fingerprint:
                document = document or self._manifest.to_json().decode()
                message["manifest"] = document
            peer.connection.tell(message)
            peer.fingerprint = self._manifest.fingerprint
        # One that comes back in between has nothing of what was sent.
        for member in self._replicas:
            self._begun[member.id] = [p for p in self._peers if p.receiver == member.id]

    def _require_ready(self) -> None:
        """
        Raises:
            Lost: some do not get ready, or cannot.
        """
        if self._ready == self._round:
            return
        self._await(
            lambda peer: peer.ready == (self._update, self._round) or peer.busy == self._update,
            "it does not get ready",
            self._patience() + self._silence,
        )
        busy = [peer for peer in self._peers if peer.busy == self._update]
        if busy:
            raise Lost(dict.fromkeys(busy, _BUSY), late=True)
        self._ready = self._round

    def _patience(self) -> float:
        """Seconds for a slow receiver to free a buffer; the others wait with it.

        Not all that are left: it has to say that it has none.
        """
        left = self._deadline.remaining
        return max(0.9 * left, left - 1.0) if len(self._replicas) == 1 else left / 2

    def _held_by(self, receiver: str) -> Version | None:
        member = self._members.find(receiver)
        return member.report.version if member else None

    # ---------------------------------------------------------------- buckets

    def _post(self, bucket: Bucket) -> None:
        self._under_way.append((bucket, self._broadcast(bucket)))

    def _broadcast(self, bucket: Bucket) -> list[Any]:
        assert self._group is not None
        self._require_ready()
        message = {
            **bucket.message(),
            "update": self._update,
            "round": self._round,
            "size": self._size,
        }
        payloads = [part.payload.to(self._device) for part in bucket.parts]
        self._tell(message)
        return [self._group.broadcast(each) for each in payloads]

    def _settle_oldest(self) -> None:
        """Wait until everybody has the oldest bucket under way."""
        bucket, works = self._under_way[0]
        group = self._group
        assert group is not None
        moved = time.monotonic()
        before = -1

        def took(peer: Peer) -> int:
            return peer.took if peer.update == self._update else -1

        while works:
            if group.wait_a_moment(works[0]):
                group.settle(works.pop(0))
                continue
            self._look_after()
            taken = list(map(took, self._peers))
            if sum(taken) != before:
                before, moved = sum(taken), time.monotonic()
            if time.monotonic() - moved > 3 * self._silence or self._deadline.expired:
                raise Lost({p: _STILL for p in self._peers if took(p) == min(taken)})
        self._await(lambda peer: took(peer) >= bucket.number, _STILL, 3 * self._silence)
        self._under_way.popleft()

    # ---------------------------------------------------------------- waiting for peers

    def _tell(self, message: dict[str, Any]) -> None:
        for peer in self._peers:
            peer.connection.tell(message)  # one that is gone is found out at the next wait

    def _await(
        self, ready: Callable[[Peer], bool], late: str, seconds: float | None = None
    ) -> None:
        """Wait until something holds for every peer.

        Raises:
            Lost: it does not for some, or they died, failed or went silent.
        """
        deadline = self._deadline.at_most(self._deadline.remaining if seconds is None else seconds)
        if not self._members.wait_for(
            lambda: all(map(ready, self._peers)), deadline, self._look_after
        ):
            raise Lost({peer: late for peer in self._peers if not ready(peer)}, late=True)

    def _look_after(self) -> None:
        """Ask those that say nothing whether they are alive.

        Raises:
            Lost: some are gone, have failed, or do not answer. WeightSyncError: the collective
            failed for some, for whatever reason.
        """
        lost = {}
        broken = []
        for peer in self._peers:
            if peer.gone:
                lost[peer] = "its process is gone"
            elif ("update", self._update) in peer.failed:
                lost[peer] = peer.failed["update", self._update]
            elif ("round", self._round) in peer.failed:
                broken.append(peer.failed["round", self._round])
            elif words := self._asking.silent(peer):
                lost[peer] = words
            else:
                self._asking.ask(peer)
        if lost:
            raise Lost(lost)
        if broken:
            raise WeightSyncError(broken[0])


_STILL = "it stands still in the transfer"

_BUSY = (
    "its engine still reads the versions in all of its buffers= (more of them give a slow one more "
    "time)"
)


def _host_for(peers: Sequence[Peer]) -> str:
    """The address by which these reach this host, also if it listens at 0.0.0.0."""
    hosts = [peer.connection.local_host for peer in peers]
    return next((host for host in hosts if not is_loopback(host)), hosts[0])


def _buffer(size: int, device: torch.device) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
