"""Nothing received is believed: files and connections may say anything."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weightsync.errors import WeightSyncError
from weightsync.scheme import WeightSyncScheme
from weightsync.testing import faults, roles
from weightsync.testing.conformance.base import Conformance, Run, refusal
from weightsync.testing.processes import WAIT, Peer
from weightsync.testing.weights import constants, value_of

GARBAGE = (b"", b"\xff" * 4096, b"[" * 100_000, b'{"tensors": 7}')


class Hostile(Conformance):
    """Corrupt, cut off, replaced or refused: an error of ours, or the right weights."""

    @pytest.fixture
    def bomb(self, tmp_path: Path) -> faults.Bomb:
        return faults.Bomb(tmp_path / "exploded")

    @pytest.fixture
    def sender(self, run: Run) -> Peer:
        """A sender that has published one version, which lies in files."""
        if type(self).stored_files is Conformance.stored_files:
            pytest.skip("the scheme stores no files (stored_files)")
        sender = run.sender()
        sender.call(roles.publish, 1)
        assert self.stored_files(run.scheme), "stored_files() finds no file of a version"
        return sender

    def files(self, run: Run) -> list[Path]:
        return sorted(self.stored_files(run.scheme))

    # ---------------------------------------------------------------- stored files

    @pytest.mark.parametrize("fault", [faults.corrupt, faults.truncate])
    def test_a_stored_file_is_damaged(
        self, run: Run, sender: Peer, fault: Callable[[Path], None]
    ) -> None:
        """The bytes of a tensor are never wrong without a word."""
        curious = run.peer()
        for file in self.files(run):
            whole = file.read_bytes()
            if whole:
                fault(file)
                assert outcome(curious, run) in ("refused", 1), file
                file.write_bytes(whole)  # in place: a sender may have it mapped
                assert outcome(curious, run, WAIT) == 1

    def test_a_stored_file_is_replaced(self, run: Run, sender: Peer, bomb: faults.Bomb) -> None:
        """X1: by garbage, and by a pickle."""
        curious = run.peer()
        for file in self.files(run):
            whole = file.read_bytes()
            for data in (*GARBAGE, bytes(bomb)):
                faults.replace(file, data)
                assert outcome(curious, run) in ("refused", 1), (file, data[:20])
            faults.replace(file, whole)
        assert outcome(curious, run, WAIT) == 1
        assert not bomb.exploded

    def test_a_sender_finds_what_somebody_left(
        self, run: Run, sender: Peer, bomb: faults.Bomb
    ) -> None:
        """X1: garbage and pickles of a former life are no hindrance."""
        sender.kill()
        for file in self.files(run):
            faults.replace(file, bytes(bomb))
        run.sender().call(roles.publish, 1, 7)
        assert outcome(run.peer(), run, WAIT) == 7
        assert not bomb.exploded

    def test_a_file_may_not_be_read(self, run: Run, sender: Peer) -> None:
        """Said, and nothing else is broken by it."""
        largest = max(self.files(run), key=lambda file: file.stat().st_size)
        curious = run.peer()
        assert outcome(curious, run, WAIT) == 1  # what it imports may lie where only root may read
        curious.call(roles.suffer, faults.unprivileged)
        with faults.refused(largest.parent):
            assert outcome(curious, run) == "refused"
        curious.call(roles.recover)
        assert outcome(curious, run, WAIT) == 1

    # ---------------------------------------------------------------- connections

    def test_bytes_are_damaged_on_their_way(self, run: Run) -> None:
        """A receiver says so, and the next version arrives."""
        damaged = self.damage()
        if damaged is None:
            pytest.skip("bytes cannot be damaged on their way (damage)")
        sender, receiver = run.sender(), run.follower("engine")
        sender.call(roles.publish, 1, wait="applied")
        sender.call(roles.suffer, damaged)
        told = sender.call(roles.publish_to_failures, 2)
        assert set(told.failed) == {"engine"}
        assert receiver.call(roles.held) in ((1, 1), (None, 1))
        sender.call(roles.recover)
        sender.call(roles.publish, 3, wait="applied")
        assert receiver.call(roles.held) == (3, 3)

    def test_strangers_connect(self, run: Run, bomb: faults.Bomb) -> None:
        """X1: what they say is not believed, and the run goes on."""
        sender, receiver = run.sender(), run.follower("engine")
        places = self.endpoints(run.scheme)
        if not places:
            pytest.skip("the scheme listens nowhere (endpoints)")
        for place in places:
            for data in (*GARBAGE, bytes(bomb)):
                with socket.create_connection(place, 5.0) as link:
                    link.sendall(data)
        sender.call(roles.publish, 1, wait="applied")
        assert receiver.call(roles.held) == (1, 1)
        assert not bomb.exploded

    # ---------------------------------------------------------------- names of receivers

    @pytest.mark.parametrize("id", ["../../x", "/x", "a/b", "x" * 300, "a\0b", "größe"])
    def test_an_id_is_no_path(self, run: Run, id: str) -> None:
        """Refused, or a name like any other."""
        sender, receiver = run.sender(), run.peer()
        refused = refusal(receiver, roles.receive_in, run.scheme, id)
        if refused is None:
            receiver.call(roles.follow)
            sender.call(roles.publish, 1, wait="applied", receivers=[id])
            assert receiver.call(roles.held) == (1, 1)
        else:
            assert refused.kind == "SchemeError", refused


def outcome(curious: Peer, run: Run, timeout: float = 0.1) -> object:
    """What a receiver makes of the run: the value it gets, or ``refused`` with an error of ours."""
    return curious.call(try_to_receive, run.scheme, timeout)


def try_to_receive(state: Any, scheme: WeightSyncScheme, timeout: float) -> object:
    weights = constants(-1)
    receiver = scheme.create_receiver(weights, id="curious")
    try:
        receiver.connect(timeout)
        receiver.apply_weights(timeout=timeout)
    except WeightSyncError:
        known = value_of(weights) == -1 or receiver.status().state == "unusable"
        return "refused" if known and not receiver.ready else f"refused: {receiver.status()}"
    finally:
        receiver.shutdown()
    return value_of(weights)
