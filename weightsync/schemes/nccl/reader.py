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
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from weightsync.chunks import Copier
from weightsync.deadline import Deadline, call_with_deadline
from weightsync.errors import WeightSyncError
from weightsync.schemes.nccl.buckets import unpack
from weightsync.schemes.nccl.control import Connection, Message
from weightsync.schemes.nccl.endpoint import Endpoint
from weightsync.schemes.nccl.group import Group, join_store
from weightsync.schemes.nccl.link import Link
from weightsync.schemes.nccl.staging import Slot, StagedSnapshot, Staging
from weightsync.schemes.nccl.topology import device_identity
from weightsync.version import Version

if TYPE_CHECKING:
    from weightsync.schemes.nccl import NCCLScheme

IN_FLIGHT = 2
"""Buckets under way at a time: one is received while the one before is put into place."""


class _Abandoned(Exception):
    """The group that a collective belongs to was left, or the connection is over."""


@dataclass
class _Update:
    """What is being received. ``slot`` is None if it failed: collectives go on, bytes are dropped."""

    number: int
    version: Version
    slot: Slot | None


class Reader:
    """One of the processes that read for a receiver.

    Args:
        receiver: whose; rank, size: which of them this is.
    """

    def __init__(self, scheme: NCCLScheme, receiver: str, rank: int, size: int) -> None:
        self._scheme = scheme
        self._copier = Copier(scheme.threads)
        self.staging = Staging(scheme.buffers, self._copier)
        self._device = scheme.device_here()
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
        self._orders: queue.SimpleQueue[tuple[Connection, Message] | None] = queue.SimpleQueue()
        self._groups: dict[int, Group] = {}
        self._left: set[int] = set()
        self._current: Connection | None = None
        self._update: _Update | None = None
        self._under_way: deque[tuple[int, Group, Message, torch.Tensor, Any]] = deque()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="weightsync reader", daemon=True)
        self._thread.start()
        where = Endpoint(scheme.master_address, scheme.port)
        self._link = Link(where, scheme.token, lambda: self._hello, self._heard, self._lost)

    def wait_connected(self, deadline: Deadline) -> None:
        self._link.wait_connected(deadline)

    def lease(self, version: Version, deadline: Deadline) -> StagedSnapshot:
        return self.staging.lease(version, deadline)

    def close(self) -> None:
        self._closed = True
        self._link.close()
        self._orders.put(None)
        self._thread.join(1.0)  # torch does not like to be interrupted by the interpreter's end
        self.staging.clear()
        self._copier.close()

    # ---------------------------------------------------------------- the link's thread

    def _heard(self, connection: Connection, message: Message) -> None:
        self._current = connection
        if message["op"] == "ping":
            connection.tell({"op": "pong"})
            return
        if message["op"] == "leave":
            self._left.add(message["round"])  # at once: the other thread may be stuck in it
        self._orders.put((connection, message))

    def _lost(self, connection: Connection) -> None:
        self._current = None
        self._orders.put((connection, {"op": "lost"}))

    # ---------------------------------------------------------------- the thread for collectives

    def _serve(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while True:
            try:
                order = self._orders.get(block=not self._under_way)
            except queue.Empty:
                self._take_oldest()
                continue
            if order is None:
                break
            connection, message = order
            if connection is not self._current and message["op"] != "lost":
                continue  # of a connection that is over
            try:
                self._obey(connection, message)
            except _Abandoned:
                self._under_way.clear()
            except Exception as error:
                words = f"{type(error).__name__}: {error!s:.1000}"
                self._fail()
                connection.tell({**_about(message), "op": "failed", "error": words})
        self._abandon()

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
        if any(entry[0] == number for entry in self._under_way):
            self._under_way.clear()
        group = self._groups.pop(number, None)
        if group is not None:
            group.leave()

    def _begin(self, connection: Connection, message: Message) -> None:
        number = int(message["update"])
        if self._update is None or self._update.number != number:
            self._fail()
            layout = self.staging.layout(str(message["fingerprint"]), message.get("manifest"))
            keep = message.get("keep")
            slot = self.staging.begin(
                layout,
                None if keep is None else Version.parse(keep),
                Deadline(float(message["seconds"])),
                lambda: self._check(int(message["round"])),
            )
            if slot is None:
                raise WeightSyncError(
                    f"all {self._scheme.buffers} buffers hold versions that the engine still reads"
                )
            self._update = _Update(number, Version.parse(message["version"]), slot)
        connection.tell({"op": "ready", "update": number, "round": message["round"]})

    def _post(self, message: Message) -> None:
        while len(self._under_way) >= IN_FLIGHT:
            self._take_oldest()
        number = int(message["round"])
        group = self._groups.get(number)
        if group is None:
            return  # left already
        buffer = self._buffer(group, int(message["number"]), int(message["size"]))
        nbytes = int(message["nbytes"])
        if not 0 <= nbytes <= len(buffer):
            raise WeightSyncError(f"a bucket of {nbytes} bytes does not fit {len(buffer)}")
        work = group.broadcast(buffer[:nbytes])
        self._under_way.append((number, group, message, buffer, work))

    def _buffer(self, group: Group, bucket: int, size: int) -> torch.Tensor:
        """The group's own: a collective of a group that was left may still write into its."""
        if not group.buffers or len(group.buffers[0]) != size:
            group.buffers = [
                torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(IN_FLIGHT)
            ]
        return group.buffers[bucket % IN_FLIGHT]

    def _take_oldest(self) -> None:
        """Wait for the oldest bucket under way, and put it into its place."""
        number, group, message, buffer, work = self._under_way[0]
        connection = self._current
        try:
            while not group.is_done(work):
                self._check(number)
            self._under_way.popleft()
            update = self._update
            if update is not None and update.slot is not None and update.slot.layout is not None:
                arrived = buffer if buffer.device.type == "cpu" else buffer.cpu()
                unpack(
                    message, arrived, update.slot.bytes, update.slot.layout.manifest, self._copier
                )
        except _Abandoned:
            self._under_way.clear()
            return
        except Exception as error:
            if self._under_way and self._under_way[0][4] is work:  # the collective itself failed
                self._under_way.clear()
                about: Message = {"round": number}
            else:
                self._fail_slot()
                about = {"update": message["update"]}
            if connection is not None:
                words = f"{type(error).__name__}: {error!s:.1000}"
                connection.tell({**about, "op": "failed", "error": words})
            return
        if connection is not None:
            connection.tell(
                {"op": "took", "update": message["update"], "bucket": message["number"]}
            )

    def _finish_all(self) -> None:
        while self._under_way:
            self._take_oldest()

    def _end(self, connection: Connection, message: Message) -> None:
        update = self._update
        if update is None or update.number != message["update"] or update.slot is None:
            return
        self.staging.end(update.slot, update.version)
        self._update = None
        connection.tell({"op": "whole", "update": update.number})

    def _fail(self) -> None:
        """Forget what was being received."""
        self._fail_slot()
        self._update = None

    def _fail_slot(self) -> None:
        if self._update is not None and self._update.slot is not None:
            self.staging.end(self._update.slot, None)
            self._update.slot = None

    def _abandon(self) -> None:
        self._under_way.clear()
        self._fail()
        for group in self._groups.values():
            group.leave()
        self._groups.clear()
        self._left.clear()

    def _check(self, number: int) -> None:
        """
        Raises:
            _Abandoned: nothing more will come of this round.
        """
        if self._closed or self._current is None or number in self._left:
            raise _Abandoned


def _about(message: Message) -> Message:
    return {key: message[key] for key in ("round", "update") if key in message}
