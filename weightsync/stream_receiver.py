"""The inference end for a framework that loads weights itself, from a stream."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

import torch

from weightsync.attempt import words_of
from weightsync.deadline import Deadline
from weightsync.errors import DeadlineError, VersionGoneError, WeightSyncError
from weightsync.listeners import Call, Listener
from weightsync.receiver import new_id
from weightsync.report import ReceiverReport, Seconds, State, SyncReport
from weightsync.scheme_end import SchemeEnd
from weightsync.transport import Snapshot
from weightsync.version import Version
from weightsync.words import one_line

if TYPE_CHECKING:
    from weightsync.scheme import WeightSyncScheme

log = logging.getLogger("weightsync")

_SLICE = 0.2
"""Seconds after which a wait looks whether it is still wanted."""

_AGAIN = 0.02
"""Seconds after which a version that is announced and not there is looked for again."""


class StreamReceiver(SchemeEnd):
    """Hands out whole versions as streams of ``(name, tensor)``, and tells the sender of each.

    To the sender it is a receiver like any other. What it knows of the engine behind it is whether
    a stream was taken to its end: then it says ``applied``, and ``unusable`` if it was not, as part
    of the weights may have been loaded.

    Args:
        scheme: as on the sender's side.
        id: how the sender knows this receiver; unique in the run. Letters, digits, ``._-``.
        listeners: called after each stream; see :meth:`subscribe`. The seconds that they are told
            of are those from the lease of the version to the end of the stream.
    """

    side = "receiver"

    def __init__(
        self,
        scheme: WeightSyncScheme,
        *,
        id: str | None = None,
        listeners: Sequence[Listener] = (),
    ) -> None:
        super().__init__(scheme, id or new_id(), listeners)
        self._connected = False
        self._version: Version | None = None
        self._subscriber = scheme.create_subscriber(self.id)
        self._busy = threading.Lock()
        self._turn = object()
        self._leased: Snapshot | None = None

    @property
    def connected(self) -> bool:
        return self._connected

    @property
    def version(self) -> Version | None:
        """The version of the last stream that was taken to its end."""
        return self._version

    def connect(self, timeout: float | Deadline = 60.0) -> None:
        """Find the sender, and become known to it. May be called again.

        Raises:
            DeadlineError: no live sender showed up.
        """
        self._subscriber.open(Deadline.of(timeout))
        self._connected = True
        if self.version is None:
            self._say("connected")

    async def stream(
        self, timeout: float, at_least: Version | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """The tensors of the newest version, once there is one of ``at_least`` this age.

        Read-only views, whose memory stays as it is until the next call of ``stream``, ``release``
        or ``shutdown``, also when the stream is at its end. All bytes are compared with their
        digests before the first tensor is handed out. No event loop is blocked meanwhile.

        Args:
            timeout: seconds to wait for the version.

        Raises:
            DeadlineError: no such version came.
            CorruptError: its bytes are wrong.
            WeightSyncError: ``release`` or another stream has ended this one.
        """
        turn, call = self.release(), Call()
        try:
            snapshot = await asyncio.to_thread(self._lease, turn, Deadline(timeout), at_least, call)
        except asyncio.CancelledError:
            if turn is self._turn:
                self.release()
            raise
        except Exception as error:
            if turn is self._turn:
                self._tell(call, error)
            raise
        name = "none"
        try:
            for name, tensor in snapshot:
                yield name, tensor
            self._require(turn)
            snapshot.settle()
        except BaseException as error:
            left = isinstance(error, GeneratorExit)  # by whom it was handed to
            words = "the stream was not taken to its end" if left else words_of(error)
            said = f"{words}; the last tensor taken was {name!r}"
            self._conclude(turn, snapshot, call, WeightSyncError(said) if left else error, said)
            raise
        self._conclude(turn, snapshot, call)

    def release(self) -> object:
        """Give back the version that was handed out last, and end whatever waits for one."""
        with self._busy:
            self._turn = object()
            leased, self._leased = self._leased, None
            if leased is not None:
                leased.close()
            return self._turn

    def shutdown(self) -> None:
        """Sign off. Idempotent; the engine keeps its weights."""
        self._connected = False
        self.release()
        self._subscriber.close()

    def _lease(
        self, turn: object, deadline: Deadline, at_least: Version | None, call: Call
    ) -> Snapshot:
        self.connect(deadline)
        seen: Version | None = None
        while True:
            self._require(turn)
            version = self._subscriber.wait(seen, deadline.at_most(_SLICE))
            if version is not None and (at_least is None or version >= at_least):
                call.began, call.version = time.perf_counter(), version
                try:
                    return self._verified(turn, version, deadline)
                except VersionGoneError:
                    call.version = None
                    time.sleep(_AGAIN)  # a newer one is there, or will be
            elif version is not None:
                seen = version
            if deadline.expired:
                wanted = "" if at_least is None else f" as new as {at_least}"
                raise DeadlineError(
                    f"receiver {self.id!r}: no version{wanted} came by {self.scheme.shown()} "
                    f"within {deadline.seconds:.1f} s"
                )

    def _verified(self, turn: object, version: Version, deadline: Deadline) -> Snapshot:
        snapshot = self._subscriber.snapshot(version, deadline)
        try:
            snapshot.verify()
            with self._busy:
                self._require(turn)
                self._leased = snapshot
        except BaseException:
            snapshot.close()
            raise
        return snapshot

    def _require(self, turn: object) -> None:
        """
        Raises:
            WeightSyncError: this stream is no longer wanted.
        """
        if turn is not self._turn:
            raise WeightSyncError(f"receiver {self.id!r}: the stream was ended by a later call")

    def _conclude(
        self,
        turn: object,
        snapshot: Snapshot,
        call: Call,
        error: BaseException | None = None,
        words: str | None = None,
    ) -> None:
        """Tell the sender what became of a stream, unless a later one has taken its place."""
        if turn is not self._turn:
            return
        version = snapshot.version
        self._version = None if error is not None else version
        state: State = "applied" if error is None else "unusable"
        said = self._say(state, version, words)
        taken = time.perf_counter() - call.began
        call.seconds = Seconds(apply=taken, total=taken)
        if error is None:
            manifest = snapshot.manifest
            size = manifest.payload, len(manifest.tensors)
            kind = self.scheme.url_scheme
            call.report = SyncReport(version, kind, *size, None, call.seconds, receivers=(said,))
        self._tell(call, error)

    def _say(
        self, state: State, attempted: Version | None = None, error: str | None = None
    ) -> ReceiverReport:
        where = socket.gethostname(), os.getpid()
        report = ReceiverReport(self.id, state, self.version, attempted, error, *where)
        try:
            self._subscriber.acknowledge(report)
        except (WeightSyncError, OSError) as failure:
            # What was taken was taken; a sender that cannot be told will see a late receiver.
            said = f"{state}, version {attempted}"
            log.warning(
                "receiver %s cannot tell its sender (%s): %s", self.id, said, one_line(failure)
            )
        return report
