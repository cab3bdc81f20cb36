"""Ways that do not do what they should, in a module that other processes can import."""

import threading
from dataclasses import dataclass
from typing import ClassVar

from weightsync.bench.memory import Needs
from weightsync.bench.way import ReceivingEnd, SendingEnd, Way
from weightsync.bench.ways.queue import Queue
from weightsync.bench.weights import bytes_of
from weightsync.deadline import Deadline


class Torn(Queue):
    """Its receivers hold the new version, but for one byte of the old one."""

    name: ClassVar[str] = "torn"

    def receive(self, target, setting, index, notices):
        return _AllButOne(super().receive(target, setting, index, notices), target)


@dataclass
class _Around(ReceivingEnd):
    whole: ReceivingEnd
    target: object


class _AllButOne(_Around):
    def receive(self, version: int, deadline: Deadline) -> float:
        last = list(self.target.values())[-1]
        kept = last[-1].clone()
        pause = self.whole.receive(version, deadline)
        last[-1] = kept
        return pause


class Stale(Queue):
    """Its receivers hold a version whole, but one of long ago."""

    name: ClassVar[str] = "stale"

    def receive(self, target, setting, index, notices):
        return _LongAgo(super().receive(target, setting, index, notices), target)


class _LongAgo(_Around):
    def receive(self, version: int, deadline: Deadline) -> float:
        pause = self.whole.receive(version, deadline)
        for tensor in self.target.values():
            bytes_of(tensor).sub_(100)
        return pause


class _Ways(Way):
    about: ClassVar[str] = "for tests"

    def receive(self, target, setting, index, notices):
        return _Idle()


class Hanging(_Ways):
    name: ClassVar[str] = "hanging"

    def send(self, weights, setting):
        return _Sleeps()


class Failing(_Ways):
    name: ClassVar[str] = "failing"

    def send(self, weights, setting):
        raise ConnectionError("the other end said no")


class Dying(_Ways):
    name: ClassVar[str] = "dying"

    def send(self, weights, setting):
        import os

        os.write(2, b"a library's last words\n")
        os._exit(3)


class Large(_Ways):
    name: ClassVar[str] = "large"

    def needs(self, nbytes, receivers):
        return Needs(10**15)

    def send(self, weights, setting):
        raise AssertionError("it should not have been tried")


class _Sleeps(SendingEnd):
    def publish(self, version: int) -> None:
        threading.Event().wait()


class _Idle(ReceivingEnd):
    def receive(self, version: int, deadline: Deadline) -> float:
        return 0.0
