"""This library's schemes, as a user drives them: a sender, and a receiver in each process."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import weightsync as ws
from weightsync.bench.memory import Needs
from weightsync.bench.way import Notices, ReceivingEnd, SendingEnd, Setting, Tensors, Way
from weightsync.deadline import Deadline
from weightsync.errors import DeadlineError
from weightsync.scheme import WeightSyncScheme


@dataclass(frozen=True)
class Scheme(Way):
    """A scheme by its URL, in which ``{shared}``, ``{disk}``, ``{port}`` and ``{receivers}`` stand
    for those of the turn, and ``{turn}`` for a name that no other turn has.

    Attributes:
        places: folders that each turn makes and removes, besides its own.
    """

    title: str
    url: str
    bounded_by: str = "plain copy"
    places: tuple[str, ...] = ()
    ours: ClassVar[bool] = True
    about: ClassVar[str] = "as it comes, digests on; receivers hear of versions by its own protocol"

    @property
    def name(self) -> str:
        return self.title

    @property
    def limit(self) -> str:
        return self.bounded_by

    @property
    def folders(self) -> tuple[str, ...]:
        return self.places

    def channels(self, context: object, receivers: int) -> int:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port: int = free.getsockname()[1]
        return port

    def needs(self, nbytes: int, receivers: int) -> Needs:
        url = self.url.format(
            shared="/shared", disk="/disk", turn="turn", port=1, receivers=receivers
        )
        return needs_of(ws.scheme_from_url(url), nbytes, receivers)

    def _scheme(self, setting: Setting) -> WeightSyncScheme:
        return ws.scheme_from_url(
            self.url.format(
                shared=setting.shared,
                disk=setting.disk,
                turn=os.path.basename(setting.disk),
                port=setting.channels,
                receivers=setting.receivers,
            )
        )

    def send(self, weights: Tensors, setting: Setting) -> SendingEnd:
        sender = self._scheme(setting).create_sender(weights, timeout=setting.timeout)
        try:
            sender.connect(setting.timeout, receivers=setting.receivers)
        except BaseException:
            sender.shutdown()
            raise
        return _Sending(sender)

    def receive(
        self, target: Tensors, setting: Setting, index: int, notices: Notices
    ) -> ReceivingEnd:
        receiver = self._scheme(setting).create_receiver(target)
        try:
            receiver.connect(setting.timeout)
        except BaseException:
            receiver.shutdown()
            raise
        return _Receiving(receiver)


@dataclass
class _Sending(SendingEnd):
    sender: ws.Sender
    versions: dict[int, ws.Version] = field(default_factory=dict)

    def publish(self, version: int) -> None:
        self.sender.update_weights(version=version)

    def close(self) -> None:
        self.sender.shutdown()


@dataclass
class _Receiving(ReceivingEnd):
    receiver: ws.Receiver

    def receive(self, version: int, deadline: Deadline) -> float:
        pause = 0.0
        while (held := self.receiver.version) is None or held.number < version:
            if deadline.expired:
                raise DeadlineError(f"no version {version} within {deadline.seconds} s")
            report = self.receiver.poll_and_apply(deadline.remaining)
            pause = report.seconds.pause if report else pause
        return pause

    def close(self) -> None:
        self.receiver.shutdown()


def needs_of(scheme: WeightSyncScheme, nbytes: int, receivers: int) -> Needs:
    """What a scheme's buffers take. A third party's is taken for two in shared memory."""
    if isinstance(scheme, ws.FallbackScheme):
        each = (needs_of(member, nbytes, receivers) for member in members(scheme))
        return sum(each, Needs(0))
    if isinstance(scheme, ws.DiskScheme):
        return Needs(0, disk=(scheme.keep + 1) * nbytes)
    if isinstance(scheme, ws.NCCLScheme):
        return Needs(scheme.buffers * receivers * nbytes)
    slots = getattr(scheme, "slots", 2)
    return Needs(slots * nbytes, slots * nbytes)


def members(scheme: WeightSyncScheme) -> tuple[WeightSyncScheme, ...]:
    """The schemes of a fallback; any other is its own only one."""
    if not isinstance(scheme, ws.FallbackScheme):
        return (scheme,)
    return tuple(one for one in scheme.schemes if isinstance(one, WeightSyncScheme))


OURS: Mapping[str, Scheme] = {
    scheme.title: scheme
    for scheme in (
        Scheme("double buffer", "shm://{shared}/run"),
        Scheme(
            "broadcast (gloo)",
            "nccl://127.0.0.1:{port}?backend=gloo&num_replicas={receivers}",
            "plain socket",
        ),
        Scheme("disk", "disk://{disk}/run?keep=2&keep_files=false", "plain file"),
        Scheme("fallback", "fallback://shm://{shared}/run,disk://{disk}/run?keep=2"),
    )
}
