"""What all parts of the suite share: the scheme under test, and processes that use it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from weightsync.engine import Engine
from weightsync.scheme import WeightSyncScheme
from weightsync.testing import roles
from weightsync.testing.processes import Peer, PeerError
from weightsync.testing.weights import Weights


class Run:
    """One run: the scheme, and the processes that use it."""

    def __init__(self, scheme: WeightSyncScheme) -> None:
        self.scheme = scheme
        self._peers: list[Peer] = []

    def peer(self) -> Peer:
        """A process that has done nothing yet."""
        self._peers.append(Peer())
        self._peers[-1].call(roles.know, type(self.scheme))
        return self._peers[-1]

    def sender(self, **options: Any) -> Peer:
        """A process that is a connected sender of constants."""
        peer = self.peer()
        peer.call(roles.send_from, self.scheme, **options)
        return peer

    def receiver(
        self, id: str, engine: Callable[[Weights], Engine] | None = None, **shape: int
    ) -> Peer:
        """A process that is a connected receiver of constants."""
        peer = self.peer()
        peer.call(roles.receive_in, self.scheme, id, engine=engine, **shape)
        return peer

    def follower(self, id: str, **options: Any) -> Peer:
        """A receiver that applies whatever comes."""
        peer = self.receiver(id, **options)
        peer.call(roles.follow)
        return peer

    def kill_all(self) -> None:
        """End all processes at once, receivers first."""
        while self._peers:
            self._peers.pop().dispose()


class Conformance:
    """Base of all parts. A subclass gives the fixture ``scheme``, and says what is special.

    Attributes:
        keeps_versions: a receiver that connects after a publish gets that version. Transports
            that hand versions out, instead of leaving them somewhere, give it the next one.
        buffered_bytes: how much of a stream a publish may hold in memory at one time.
        patience: seconds that an answer may take beyond the deadline it has.
        race_seconds: how long readers and a writer race for each other.
    """

    keeps_versions: ClassVar[bool] = True
    buffered_bytes: ClassVar[int] = 32 << 20
    patience: ClassVar[float] = 10.0
    race_seconds: ClassVar[float] = 0.5

    @pytest.fixture
    def scheme(self) -> WeightSyncScheme:
        """The scheme under test, for a run of its own, which is gone after the test."""
        raise NotImplementedError("a conformance class gives its scheme by a fixture `scheme`")

    @pytest.fixture
    def run(self, scheme: WeightSyncScheme) -> Iterator[Run]:
        made = Run(scheme)
        yield made
        made.kill_all()

    # ---------------------------------------------------------------- hooks

    def for_receivers(self, scheme: WeightSyncScheme, count: int) -> WeightSyncScheme:
        """The same scheme with room for so many receivers that hold different versions."""
        return scheme

    def stored_files(self, scheme: WeightSyncScheme) -> list[Path]:
        """All files that hold the newest version, bytes and descriptions, once it is published.

        Left as it is where there are none.
        """
        raise NotImplementedError

    def damage(self) -> Callable[[], AbstractContextManager[None]] | None:
        """A fault for the sender's process: whatever it publishes meanwhile loses a bit on its way.

        A function of a module. None: bytes lie in ``stored_files``, or cannot be reached.
        """
        return None

    def endpoints(self, scheme: WeightSyncScheme) -> list[tuple[str, int]]:
        """Hosts and ports on which the connected sender listens."""
        return []

    def scheme_at(self, path: Path) -> WeightSyncScheme | None:
        """A scheme that keeps its files below a directory. None: it keeps no files."""
        return None

    def wrong_options(self) -> list[dict[str, Any]]:
        """Options that the scheme refuses, each with the reason for one to be wrong."""
        return []


def refusal(
    peer: Peer, function: Callable[..., object], *args: Any, **how: Any
) -> PeerError | None:
    """The error with which a process refuses to do something, if it does."""
    try:
        peer.call(function, *args, **how)
    except PeerError as error:
        return error
    return None


def names_below(path: Path) -> list[str]:
    """Every file below a directory, relative to it."""
    return sorted(
        os.path.relpath(os.path.join(root, name), path)
        for root, _, names in os.walk(path)
        for name in names
    )
