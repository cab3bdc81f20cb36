"""The data end: takes part in the sender's collectives, in a thread of its own.

The engine may generate meanwhile. Whatever happens is said to the sender over the control channel,
and no collective is entered before the sender's word for it has come, so that nobody waits in one
for a sender that failed or went away.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

import torch

from weightsync.chunks import Copier
from weightsync.deadline import Deadline, call_with_deadline
from weightsync.device import Device, Lane, settle
from weightsync.device.host import HostDevice
from weightsync.errors import NoRoomError, ProtocolError, WeightSyncError
from weightsync.manifest import ALIGNMENT
from weightsync.schemes.nccl.buckets import Bounce, Pieces, check, unpack, verify
from weightsync.schemes.nccl.control import Connection, Message
from weightsync.schemes.nccl.digests import Digester, from_text
from weightsync.schemes.nccl.endpoint import Endpoint
from weightsync.schemes.nccl.group import Group, join_store
from weightsync.schemes.nccl.link import Link
from weightsync.schemes.nccl.places import Places
from weightsync.schemes.nccl.staging import Slot, Staging
from weightsync.schemes.nccl.topology import device_identity
from weightsync.schemes.nccl.windows import gpu_of
from weightsync.version import Version

if TYPE_CHECKING:
    from weightsync.schemes.nccl import NCCLScheme

IN_FLIGHT = 3
"""Buckets under way at a time, so that the next is received while one is looked at."""

_DIRECT_IN_FLIGHT = 64
"""The same of those that come into their places on a GPU, and cost nothing."""

HOST = HostDevice()

_POLL = {"cuda": 0.0002, "cpu": 0.002}
"""Seconds between two looks at what is under way. Over gloo a bucket takes several milliseconds,
and looking costs of the cores that it needs."""


_IDLE = 0.02
"""Seconds without orders after which there is time for what is not urgent."""


class _Abandoned(Exception):
    """The group that a collective belongs to was left, or the connection is over."""


@dataclass
class _Update:
    """What is being received.

    Attributes:
        slot: None if it failed: what comes is dropped then.
        digests: of all of it, as the sender wrote them.
        taken: the buckets that were put into their places.
    """

    number: int
    version: Version
    slot: Slot | None
    dropped: Version | None
    digests: str = ""
    taken: set[int] = field(default_factory=set)


@dataclass
class _Part:
    """A part of a bucket under way.

    Attributes:
        direct: it comes into its place in the slot, not into a buffer.
        digests: to compare with now; empty if they follow, or are off.
    """

    number: int
    digests: list[int]
    pieces: Pieces
    payload: torch.Tensor
    direct: bool


@dataclass
class _Arriving:
    """A bucket under way. ``works``: those of its collectives that are not known to be over."""

    round: int
    group: Group
    message: Message
    parts: list[_Part]
    works: list[Any]

    def is_done(self) -> bool:
        """
        Raises:
            WeightSyncError: a collective failed.
        """
        while self.works and self.works[0].is_completed():
            self.group.settle(self.works.pop(0))
        return not self.works


class Reader:
    """One of the processes that read for a receiver.

    Args:
        receiver: whose; rank, size: which of them this is.
    """

    def __init__(self, scheme: NCCLScheme, receiver: str, rank: int, size: int) -> None:
        self._scheme = scheme
        self._copier = Copier(scheme.threads)
        self._device = scheme.device_here()
        self._poll = _POLL[self._device.type]
        self._gpu = gpu_of(self._device)
        places = Places(self._gpu, scheme.memory)
        self.staging = Staging(scheme.buffers, self._copier, places)
        self._digester: Digester | None = None
        self._digesting = (self._gpu or HOST).lane()
        self._lane: Lane | None = None
        self._bounce = Bounce(scheme.bucket_size)
        self._hello = {
            "role": "reader",
            "receiver": receiver,
            "rank": rank,
            "size": size,
            "backend": scheme.backend,
            "device": device_identity() if scheme.backend == "nccl" else "",
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        # Not a SimpleQueue: its wait of a few microseconds can turn into one without end, if the
        # thread is put aside just then (Python 3.11 takes a negative rest for infinite).
        self._orders: queue.Queue[tuple[Connection, Message] | None] = queue.Queue()
        self._groups: dict[int, Group] = {}
        self._left: set[int] = set()
        self._broken: set[int] = set()
        self._current: Connection | None = None
        self._cancelled: tuple[Connection, int] | None = None
        self._update: _Update | None = None
        self._under_way: deque[_Arriving] = deque()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="weightsync reader", daemon=True)
        self._thread.start()
        where = Endpoint(scheme.master_address, scheme.port)
        self._link = Link(where, scheme.token, self._introduce, self._heard, self._lost)
        # Also when the process ends without shutdown(): a thread of torch's that is interrupted by
        # the interpreter's end takes the process down with it.
        self._at_exit = Finalize(None, self.close, exitpriority=0)

    def wait_connected(self, deadline: Deadline) -> None:
        self._link.wait_connected(deadline)

    def close(self) -> None:
        self._at_exit.cancel()
        self._closed = True
        self._link.close()
        self._orders.put(None)
        self._thread.join(1.0)  # torch does not like to be interrupted by the interpreter's end
        self.staging.clear()
        self._copier.close()

    # ---------------------------------------------------------------- the link's thread

    def _introduce(self) -> Message:
        return self._hello

    def _heard(self, connection: Connection, message: Message) -> None:
        self._current = connection
        if message["op"] == "ping":
            connection.tell({"op": "pong"})
            return
        if message["op"] == "leave":
            self._left.add(message["round"])  # at once: the other thread may be stuck in it
        elif message["op"] == "cancel":
            self._cancelled = connection, message["update"]  # or be waiting for a buffer for it
        self._orders.put((connection, message))

    def _lost(self, connection: Connection) -> None:
        self._current = None
        self._orders.put((connection, {"op": "lost"}))

    # ---------------------------------------------------------------- the thread for collectives

    def _serve(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            # Torch has a collective begin when its thread's current stream gets there. On the one
            # that every thread begins with, an engine may have queued steps that take longer.
            own = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
            torch.cuda.set_stream(own)
        while True:
            try:
                order = self._orders.get(timeout=self._until_next_look())
            except queue.Empty:
                if self._under_way:
                    self._take_what_is_there()
                else:
                    self.staging.make_room(lambda: self._closed or not self._orders.empty())
                continue
            if order is None:
                break
            connection, message = order
            if connection is not self._current and message["op"] != "lost":
                continue  # of a connection that is over
            try:
                self._obey(connection, message)
            except _Abandoned:
                self._give_up()
            except Exception as error:
                if message["op"] != "group":  # without it another is built, for the same update
                    self._fail()
                self._say_failed(connection, message, error)
        self._abandon()

    def _until_next_look(self) -> float | None:
        if self._under_way:  # often: the next bucket is to be posted at once
            return self._poll
        return _IDLE if self.staging.lacks_room else None

    def _obey(self, connection: Connection, message: Message) -> None:
        op = message["op"]
        if op == "group":
            self._join(connection, message)
        elif op == "leave":
            self._leave(message["round"])
        elif op == "begin":
            self._begin(connection, message)
        elif op == "bucket":
            self._post(message)
        elif op == "digests":
            if self._update is not None and self._update.number == message["update"]:
                self._update.digests = str(message["digests"])
        elif op == "end":
            self._finish_all()
            self._end(connection, message)
        elif op == "cancel":
            self._finish_all()
            self._fail()
        elif op == "lost":
            self._abandon()

    def _join(self, connection: Connection, message: Message) -> None:
        number, seconds = int(message["round"]), float(message["seconds"])
        store = Endpoint(str(message["store"][0]), int(message["store"][1]))
        # The sender's words for its address may be others than those by which this host knows it.
        store = Endpoint(self._scheme.master_address, store.port)

        def build() -> Group:
            return Group(
                self._scheme.backend,
                join_store(store, seconds),
                str(message["key"]),
                int(message["rank"]),
                int(message["size"]),
                connection.local_host,
                self._device,
                seconds,
            )

        self._groups[number] = call_with_deadline(
            build, Deadline(seconds + 1), f"building group {number}", lambda: self._check(number)
        )
        connection.tell({"op": "grouped", "round": number})

    def _leave(self, number: int) -> None:
        if any(arriving.round == number for arriving in self._under_way):
            self._give_up()
        self._left.discard(number)  # nothing more is said of it
        self._broken.discard(number)
        group = self._groups.pop(number, None)
        if group is not None and not group.leave() and self._device.type != "cpu":
            self._fail_slot(written=True)  # what is stuck in it may write there yet
            if self._update is not None:
                stuck = WeightSyncError("a collective of NCCL could not be aborted within 10 s")
                self._say_failed(self._current, {"update": self._update.number}, stuck)

    def _begin(self, connection: Connection, message: Message) -> None:
        number = int(message["update"])
        if self._update is None or self._update.number != number:
            self._fail()
            layout = self.staging.layout(str(message["fingerprint"]), message.get("manifest"))
            version, keep = Version.parse(message["version"]), message.get("keep")

            def check() -> None:
                self._check(int(message["round"]))
                where, last = self._cancelled or (None, -1)
                if where is connection and number <= last:  # the next may be cancelled already
                    raise _Abandoned

            found = self.staging.begin(
                layout,
                None if keep is None else Version.parse(keep),
                Deadline(float(message["seconds"])),
                check,
            )
            if found is None:
                connection.tell({"op": "busy", "update": number})
                return
            self._update = _Update(number, version, *found)
        dropped = self._update.dropped
        answer = {"op": "ready", "update": number, "round": message["round"], "dropped": dropped}
        connection.tell(answer)

    def _post(self, message: Message) -> None:
        slot = self._update.slot if self._update is not None else None
        whole = all(len(part["pieces"]) == 1 for part in message["parts"])
        direct = whole and slot is not None and self._gpu is not None
        direct = direct and slot is not None and slot.place.gpu is self._gpu
        while len(self._under_way) >= (_DIRECT_IN_FLIGHT if direct else IN_FLIGHT):
            self._take_oldest()
        number = int(message["round"])
        group = self._groups.get(number)
        if group is None or number in self._left or number in self._broken:
            return
        self._broken.add(number)  # unless its collectives begin
        buffer: torch.Tensor | None = None
        arriving = _Arriving(number, group, message, [], [])
        for index, part in enumerate(message["parts"]):
            nbytes = int(part["nbytes"])
            pieces = check(part, slot.layout.manifest) if slot and slot.layout else []
            direct = len(pieces) == 1 and slot is not None and slot.place.gpu is self._gpu
            if direct and slot is not None:
                payload = slot.bytes[pieces[0][0] : pieces[0][0] + nbytes]
            else:
                if buffer is None:
                    buffer = self._buffer(group, int(message["number"]), int(message["size"]))
                payload = buffer[:nbytes]
                buffer = buffer[-(-nbytes // ALIGNMENT) * ALIGNMENT :]
            if len(payload) != nbytes:
                raise ProtocolError(f"a part of {nbytes} bytes does not fit the bucket")
            arriving.parts.append(_Part(index, part["digests"], pieces, payload, direct))
        self._under_way.append(arriving)
        try:
            for each in arriving.parts:
                arriving.works.append(group.broadcast(each.payload))
        except WeightSyncError as error:  # another member is gone, which is no fault of ours
            self._break_off(number, error)
            return
        self._broken.discard(number)

    def _buffer(self, group: Group, bucket: int, size: int) -> torch.Tensor:
        """The group's own: a collective of a group that was left may still write into its.

        Raises:
            NoRoomError: the GPU is full.
        """
        if not group.buffers or len(group.buffers[0]) != size:
            group.buffers = []  # never both at a time
            try:
                group.buffers = [
                    torch.empty(size, dtype=torch.uint8, device=self._device)
                    for _ in range(IN_FLIGHT)
                ]
            except torch.cuda.OutOfMemoryError:
                raise NoRoomError(
                    f"{self._device} has no room for {IN_FLIGHT} buckets of {size:,} bytes on "
                    "their way to host memory: a smaller bucket_mb= at the sender needs less"
                ) from None
        return group.buffers[bucket % IN_FLIGHT]

    def _take_oldest(self) -> None:
        """Wait for the oldest bucket under way."""
        before = len(self._under_way)
        while True:
            self._take_what_is_there()
            if len(self._under_way) != before:
                return
            time.sleep(self._poll)

    def _take_what_is_there(self) -> None:
        """See that buckets that have arrived are right and in their places."""
        while self._under_way:
            arriving = self._under_way[0]
            try:
                if not arriving.is_done():
                    self._check(arriving.round)
                    return
            except _Abandoned:
                self._give_up()
                return
            except Exception as error:  # the collective itself failed
                self._break_off(arriving.round, error)
                return
            self._under_way.popleft()
            self._take(arriving)

    def _take(self, arriving: _Arriving) -> None:
        message = arriving.message
        connection = self._current
        # In its place, and looked at when all have come: the sender need not wait for more.
        early = message.get("digests_follow") and all(part.direct for part in arriving.parts)
        if early:
            self._say_took(connection, message)
        try:
            if self._update is not None and self._update.number == message["update"]:
                for part in arriving.parts:
                    self._put(part, message)
                self._update.taken.add(int(message["number"]))
        except Exception as error:
            self._fail_slot()
            self._say_failed(connection, {"update": message["update"]}, error)
            return
        if not early:
            self._say_took(connection, message)

    @staticmethod
    def _say_took(connection: Connection | None, message: Message) -> None:
        if connection is not None:
            took = {"op": "took", "update": message["update"], "bucket": message["number"]}
            connection.tell(took)

    def _put(self, part: _Part, message: Message) -> None:
        slot = self._update.slot if self._update is not None else None
        if slot is None or slot.layout is None or not part.pieces:
            return
        digested = None
        if message.get("digests_follow"):
            self._digester = self._digester or Digester(self._gpu or HOST, self._digesting)
            bucket = int(message["number"])
            digested = self._digester.add(bucket, part.number, part.payload, part.pieces)
        elif part.digests:
            payload = self._bounce.fetch(part.payload)
            verify(part.digests, part.pieces, payload, slot.layout.manifest, self._copier)
        if part.direct:
            return
        if self._gpu is None:
            unpack(part.pieces, part.payload, slot.bytes, self._copier)
            return
        self._carry(part, slot, self._gpu)
        if digested is not None:
            digested.wait()  # the next bucket comes into the same memory

    def _carry(self, part: _Part, slot: Slot, gpu: Device) -> None:
        """From the GPU that it came to into the slot, wherever that is."""
        self._lane = self._lane or gpu.lane()
        out_of = part.payload.data_ptr()
        for offset, length in part.pieces:
            self._lane.copy(slot.bytes.data_ptr() + offset, out_of, length)
            out_of += length
        settle(self._lane)

    def _break_off(self, number: int, error: Exception) -> None:
        """A collective failed. Nothing more is taken from its group: the bucket that comes next
        could get the bytes of this one, and would be said to be the last that is missing."""
        self._broken.add(number)
        self._give_up()
        self._say_failed(self._current, {"round": number}, error)

    def _give_up(self) -> None:
        """Wait no more for what is under way; it may still arrive, where it does no harm."""
        direct = any(part.direct for arriving in self._under_way for part in arriving.parts)
        self._under_way.clear()
        # NCCL's collectives are aborted when the group is left; gloo's cannot be.
        if direct and self._device.type == "cpu" and self._update is not None:
            if self._digester is not None:
                self._digester.wait()
            if self._update.slot is not None:
                self._update.slot.move_on()

    @staticmethod
    def _say_failed(connection: Connection | None, about: Message, error: Exception) -> None:
        if connection is not None:
            words = f"{type(error).__name__}: {error!s:.1000}"
            which: Message = {key: about[key] for key in ("round", "update") if key in about}
            connection.tell({**which, "op": "failed", "error": words})

    def _finish_all(self) -> None:
        while self._under_way:
            self._take_oldest()

    def _end(self, connection: Connection, message: Message) -> None:
        update = self._update
        if update is None or update.number != message["update"] or update.slot is None:
            return
        if len(update.taken) != message["buckets"]:
            raise ProtocolError(f"{len(update.taken)} of {message['buckets']} buckets have arrived")
        self._compare(update.slot, update.digests)
        self.staging.end(update.slot, update.version)
        self._update = None
        connection.tell({"op": "whole", "update": update.number})

    def _compare(self, slot: Slot, text: str) -> None:
        """
        Raises:
            CorruptError, ProtocolError: what has arrived is not what was sent.
        """
        digester, self._digester = self._digester, None
        if digester is not None and slot.layout is not None:
            digester.compare(from_text(text), slot.layout.manifest)

    def _fail(self) -> None:
        """Forget what was being received."""
        self._fail_slot()
        self._update = None

    def _fail_slot(self, written: bool = False) -> None:
        """
        Args:
            written: whether something may still arrive there, besides what is under way.
        """
        if self._digester is not None:
            self._digester.wait()
            self._digester = None
        if self._update is not None and self._update.slot is not None:
            if self._under_way or written:
                self._update.slot.drop()
            self.staging.end(self._update.slot, None)
            self._update.slot = None

    def _abandon(self) -> None:
        groups, self._groups = self._groups, {}
        over = [group.leave() for group in groups.values()]
        self._fail_slot(written=not all(over))
        self._under_way.clear()
        self._fail()
        self._left.clear()
        self._broken.clear()

    def _check(self, number: int) -> None:
        """
        Raises:
            _Abandoned: nothing more will come of this round.
        """
        if self._closed or self._current is None or number in self._left:
            raise _Abandoned
