"""One turn of one way: processes, a cold version and warm ones, each compared bit for bit."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from weightsync.bench.janitor import Janitor, own_folders
from weightsync.bench.measures import Move, Taken
from weightsync.bench.memory import held, peak
from weightsync.bench.roles import BEGUN, serve
from weightsync.bench.way import Setting, Way
from weightsync.bench.weights import WeightSet
from weightsync.fork_server import CONTEXT, preload

_GRACE = 5.0
"""Seconds more than a step may take, after which a process is held for hanging: before that it is
expected to say itself what it waits for."""

_RACE, _SLOW = 6, 2
"""Versions that are published one after the other without waiting for anybody; of a way that takes
more than a second for one, fewer."""


class WayError(Exception):
    """A way failed, or hangs: who, where, and its own words."""


@dataclass(frozen=True)
class Length:
    """How much a turn does.

    Attributes:
        warm: versions that are timed, besides the first. The second is not: with it many ways touch
            a second buffer.
        probe: look at memory, and race, after them.
        timeout: seconds that any one step may take.
    """

    warm: int = 2
    probe: bool = True
    timeout: float = 60.0


@dataclass(frozen=True)
class Places:
    """Where turns make their folders: on memory-backed storage, and on a disk."""

    shared: str = "/dev/shm"
    disk: str = "."


_IDLE = 1.0
"""Seconds that a receiver lets pass between two looks in a race, at most: all of it is one step."""


def take_turn(
    way: Way, weights: WeightSet, receivers: int, length: Length, places: Places
) -> Taken:
    """
    Raises:
        WayError: it did not work, or not in time. Nothing of it is left.
    """
    moved = weights.flat() if way.bound else weights
    with _processes(way, moved, receivers, length, places) as (crew, setting):
        crew.all("begin")
        before = held(crew.pids, setting.shared) if length.probe else 0
        crew.all("open")
        reads = _Reads(crew.trainer)
        cold = _move(crew, 1, reads)
        _move(crew, 2, reads)
        moves = [cold, *(_move(crew, version, reads) for version in range(3, length.warm + 3))]
        extra = None
        if length.probe:
            with peak(crew.pids, setting.shared) as found:
                _move(crew, length.warm + 3, reads)
            extra = max(0, found.nbytes - before)
            if not way.bound:
                count = _RACE if moves[-1].total < 1 else _SLOW
                _race(crew, length.warm + 4, count, min(_IDLE, 2 * moves[-1].total), reads)
        crew.all("close")
    return Taken(tuple(moves), extra, reads.count, reads.torn, reads.stale)


@dataclass
class _Reads:
    """What receivers held, compared with what they should have held."""

    trainer: Peer
    count: int = 0
    torn: int = 0
    stale: int = 0

    def compare(self, held: bytes, sent: Collection[bytes]) -> None:
        self.count += 1
        if held in sent:
            return
        if self.trainer.do("is_version", held):
            self.stale += 1
        else:
            self.torn += 1


def _move(crew: _Crew, version: int, reads: _Reads) -> Move:
    """One version, timed; and what the receivers hold then."""
    made = crew.trainer.do("change")
    used = sum(crew.all("used"))
    for receiver in crew.receivers:
        receiver.start("receive", version)
    began, ended = crew.trainer.do("publish", version)
    took = [receiver.result() for receiver in crew.receivers]
    spent = sum(crew.all("used")) - used
    for receiver in crew.receivers:
        reads.compare(receiver.do("digests"), [made])
    applied = max(at for at, _ in took)
    return Move(
        cold=version == 1,
        blocked=ended - began,
        applied=max(0.0, applied - ended),
        total=max(applied, ended) - began,
        pause=max(pause for _, pause in took),
        processor=spent,
    )


def _race(crew: _Crew, first: int, count: int, idle: float, reads: _Reads) -> None:
    """Versions as fast as they come; what a receiver holds must be one of them."""
    for receiver in crew.receivers:
        receiver.start("race", first, count, idle)
    crew.trainer.start("race", first, count)
    made = set(crew.trainer.result())
    for receiver in crew.receivers:
        for one in receiver.result():
            reads.compare(one, made)


class Peer:
    """A process of a turn, step by step. Every wait for it ends at the turn's timeout."""

    def __init__(
        self, name: str, link: Connection, process: Any, log: Path, timeout: float
    ) -> None:
        self.name = name
        self.pid: int = process.pid
        self._link = link
        self._process = process
        self._log = log
        self._timeout = timeout
        self._step = ""

    def start(self, step: str, *arguments: Any) -> None:
        self._step = step
        try:
            self._link.send((step, arguments))
        except OSError:
            raise WayError(self._ended()) from None
        assert self._answer() == BEGUN

    def result(self) -> Any:
        good, value = self._answer()
        if not good:
            raise WayError(f"{self.name}, {self._step}: {value}")
        return value

    def do(self, step: str, *arguments: Any) -> Any:
        self.start(step, *arguments)
        return self.result()

    def _answer(self) -> Any:
        try:
            if self._link.poll(self._timeout + _GRACE):
                return self._link.recv()
        except (EOFError, OSError):
            raise WayError(self._ended()) from None
        raise WayError(
            f"{self.name}, {self._step}: hangs; ended after {self._timeout + _GRACE:.0f} s"
        )

    def _ended(self) -> str:
        self._process.join(_GRACE)
        said = self._log.read_text(errors="replace").strip() if self._log.exists() else ""
        words = f": {said.splitlines()[-1]:.200}" if said else ""
        return f"{self.name}, {self._step}: ended with {self._process.exitcode}{words}"


@dataclass(frozen=True)
class _Crew:
    trainer: Peer
    receivers: Sequence[Peer]

    @property
    def pids(self) -> list[int]:
        return [peer.pid for peer in (self.trainer, *self.receivers)]

    def all(self, step: str) -> list[Any]:
        """All do the same at the same time."""
        peers = (self.trainer, *self.receivers)
        for peer in peers:
            peer.start(step)
        return [peer.result() for peer in peers]


def prepare(ways: Sequence[Way]) -> None:
    """Have what the ways need imported once, not in each turn. Before the first turn."""
    modules = [module for way in ways if way.missing() is None for module in way.modules]
    preload(["torch", "weightsync.bench.roles", "weightsync.bench.ways", *modules])


@contextmanager
def _processes(
    way: Way, weights: WeightSet, receivers: int, length: Length, places: Places
) -> Iterator[tuple[_Crew, Setting]]:
    with own_folders(places.shared, places.disk, way.folders) as (janitor, shared, disk):
        setting = Setting(
            shared=shared,
            disk=os.path.abspath(disk),
            receivers=receivers,
            timeout=length.timeout,
            channels=way.channels(CONTEXT, receivers),
        )
        pipes = [CONTEXT.Pipe(duplex=False) for _ in range(receivers)]
        peers = []
        for index in (None, *range(receivers)):
            notices = [into for _, into in pipes] if index is None else [pipes[index][0]]
            peers.append(_start(janitor, way, weights, setting, index, notices))
        yield _Crew(peers[0], peers[1:]), setting


def _start(
    janitor: Janitor,
    way: Way,
    weights: WeightSet,
    setting: Setting,
    index: int | None,
    notices: Sequence[Connection],
) -> Peer:
    mine, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(
        target=serve, args=(theirs, way, weights, setting, index, notices), daemon=False
    )
    process.start()
    assert process.pid is not None
    janitor.watch(process.pid)
    theirs.close()
    name = "trainer" if index is None else f"receiver {index + 1}"
    log = Path(setting.disk, f"{'trainer' if index is None else index}.log")
    return Peer(name, mine, process, log, setting.timeout)
