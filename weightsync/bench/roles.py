"""What the processes of a turn do: a trainer and receivers that do as they are told."""

from __future__ import annotations

import faulthandler
import importlib
import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from weightsync.bench.way import Notices, ReceivingEnd, SendingEnd, Setting, Way
from weightsync.bench.weights import WeightSet, change, digests, is_version

BEGUN = "begun"
"""Answered before a step is done, so that who told it knows that it waits by now."""


class Trainer:
    """Holds the weights, changes them, publishes them."""

    def __init__(
        self, way: Way, weights: WeightSet, setting: Setting, notices: Sequence[Connection]
    ) -> None:
        self._way = way
        self._setting = setting
        self._notices = notices
        self._weights = weights.weights()
        self._end: SendingEnd | None = None

    def open(self) -> None:
        self._end = self._way.send(self._weights, self._setting)

    def change(self) -> bytes:
        """Make another version; its digests."""
        change(self._weights)
        return digests(self._weights)

    def publish(self, version: int) -> tuple[float, float]:
        """When the call began and when it returned, on the clock that all processes share."""
        assert self._end is not None
        began = time.monotonic()
        self._end.publish(version)
        ended = time.monotonic()
        for pipe in self._notices:
            Notices.tell(pipe, version)
        return began, ended

    def race(self, first: int, count: int) -> list[bytes]:
        """Publish one version after the other and wait for nobody; their digests."""
        made = []
        for version in range(first, first + count):
            made.append(self.change())
            self.publish(version)
        return made

    def is_version(self, held: bytes) -> bool:
        """Whether what a receiver holds was whole at some time, in this turn or another."""
        return is_version(held, self._weights)

    def used(self) -> float:
        return processor_seconds()

    def close(self) -> None:
        if self._end is not None:
            self._end.close()


class Receiver:
    """Holds a copy of the weights, into which versions are received."""

    def __init__(
        self, way: Way, weights: WeightSet, setting: Setting, index: int, notices: Connection
    ) -> None:
        self._way = way
        self._setting = setting
        self._index = index
        self._notices = Notices(notices)
        self._target = weights.zeros()
        self._end: ReceivingEnd | None = None

    def open(self) -> None:
        self._end = self._way.receive(self._target, self._setting, self._index, self._notices)

    def receive(self, version: int) -> tuple[float, float]:
        """When the target held the version, and for how many seconds an engine would have stood."""
        assert self._end is not None
        pause = self._end.receive(version, self._setting.deadline())
        return time.monotonic(), pause

    def digests(self) -> bytes:
        return digests(self._target)

    def race(self, first: int, count: int, idle: float) -> list[bytes]:
        """Receive versions at moments of its own; digests of what was held after each.

        Args:
            idle: seconds that it does something else in between, at most. An engine looks for a
                new version when it has time, not when the trainer has.
        """
        held = []
        moments = random.Random(self._index)
        for version in range(first, first + count):
            time.sleep(moments.uniform(0, idle))
            self.receive(version)
            held.append(self.digests())
        return held

    def used(self) -> float:
        return processor_seconds()

    def close(self) -> None:
        if self._end is not None:
            self._end.close()


def processor_seconds() -> float:
    """Of this process since it began, and of the living ones that it started."""
    total = time.process_time()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            times = child.cpu_times()
            total += times.user + times.system
    return total


def serve(
    link: Connection,
    way: Way,
    weights: WeightSet,
    setting: Setting,
    index: int | None,
    notices: Sequence[Connection],
) -> None:
    """Main function of a process: steps come through the link until it ends.

    Args:
        index: of a receiver; None for the trainer.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started it ends it
    _write_into(Path(setting.disk, f"{'trainer' if index is None else index}.log"))
    role: Trainer | Receiver | None = None
    while True:
        try:
            step, arguments = link.recv()
        except EOFError:
            return
        link.send(BEGUN)
        try:
            if role is None:
                for module in way.modules:
                    importlib.import_module(module)
                role = (
                    Trainer(way, weights, setting, notices)
                    if index is None
                    else Receiver(way, weights, setting, index, notices[0])
                )
            value = getattr(role, step)(*arguments) if step != "begin" else None
            link.send((True, value))
        except Exception as error:
            link.send((False, f"{type(error).__name__}: {error}"))


def _write_into(log: Path) -> None:
    """What libraries print is for nobody, unless the process ends by itself."""
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    faulthandler.enable()
