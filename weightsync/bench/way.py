"""What a way of moving weights must offer to be compared with others.

A way is plain configuration that travels to every process. Its two ends are made in processes of
their own, hold real weights, and are told what to do and when; how they hear of each other is up to
them, with what :class:`Setting` offers.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, ClassVar

import torch

from weightsync.bench.memory import Needs
from weightsync.deadline import Deadline
from weightsync.errors import DeadlineError

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Setting:
    """Where a turn's processes meet.

    Attributes:
        shared: a folder of this turn's own on memory-backed storage; removed after it.
        disk: likewise, on a disk.
        receivers: how many there are.
        timeout: seconds that any one step may take.
        channels: what :meth:`Way.channels` made.
    """

    shared: str
    disk: str
    receivers: int
    timeout: float
    channels: Any = None

    def deadline(self) -> Deadline:
        return Deadline(self.timeout)


@dataclass
class Notices:
    """How a receiver learns that a version is there, for ways that have no word for it themselves.

    A pipe from the trainer, written right after ``publish``: as fast as two processes can tell.
    """

    pipe: Connection
    newest: int = -1

    @staticmethod
    def tell(pipe: Connection, version: int) -> None:
        """Say to the receiver at the other end that a version is there."""
        pipe.send_bytes(version.to_bytes(8, "big"))

    def wait(self, version: int, deadline: Deadline) -> None:
        """Until a version is there, or a newer one.

        Raises:
            DeadlineError: there was none in time.
        """
        while self.newest < version or self.pipe.poll():
            if not self.pipe.poll(deadline.remaining):
                raise DeadlineError(f"no notice of version {version} within {deadline.seconds} s")
            self.newest = int.from_bytes(self.pipe.recv_bytes(8), "big")


class SendingEnd(ABC):
    """The trainer's end."""

    @abstractmethod
    def publish(self, version: int) -> None:
        """Send what the weights hold now; return as soon as the trainer may change them."""

    def close(self) -> None:
        """Give back what :meth:`Way.send` took."""


class ReceivingEnd(ABC):
    """A receiver's end."""

    @abstractmethod
    def receive(self, version: int, deadline: Deadline) -> float:
        """Wait until the target holds that version, or a newer one.

        Returns:
            Seconds during which an engine whose weights the target is would have to stand still.
        """

    def close(self) -> None:
        """Give back what :meth:`Way.receive` took."""


class Way(ABC):
    """One way of moving weights from a trainer to receivers. A frozen dataclass, or as plain.

    Attributes:
        ours: one of this library's schemes.
        bound: no way at all, but what bounds others: it moves one flat tensor without any protocol.
        limit: the name of the bound that it is compared with.
        modules: what is imported for it. One that is not there makes the way one that cannot run.
        about: how its API is used here, and why that is fair.
    """

    ours: ClassVar[bool] = False
    bound: ClassVar[bool] = False
    modules: ClassVar[tuple[str, ...]] = ()
    about: ClassVar[str]

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    def limit(self) -> str:
        return "plain copy"

    @property
    def folders(self) -> tuple[str, ...]:
        """Folders by their names that are made for each turn, and removed after it."""
        return ()

    def missing(self) -> str | None:
        """Why it cannot run on this machine, if it cannot."""
        for module in self.modules:
            if importlib.util.find_spec(module.partition(".")[0]) is None:
                return f"{module.partition('.')[0]} is not installed"
        return None

    def channels(self, context: Any, receivers: int) -> Any:
        """What can only be handed to processes as they start: queues, say."""
        return None

    def needs(self, nbytes: int, receivers: int) -> Needs:
        """What it needs beside the weights of trainer and receivers."""
        return Needs(2 * nbytes, 2 * nbytes)

    @abstractmethod
    def send(self, weights: Tensors, setting: Setting) -> SendingEnd: ...

    @abstractmethod
    def receive(
        self, target: Tensors, setting: Setting, index: int, notices: Notices
    ) -> ReceivingEnd: ...
