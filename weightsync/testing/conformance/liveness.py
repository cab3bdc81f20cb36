"""Ends that die, stop, fail or come back: every wait ends, and the others are served."""

from __future__ import annotations

import time
from typing import Any

import pytest

from weightsync.testing import faults, roles
from weightsync.testing.conformance.base import Conformance, Run
from weightsync.testing.engines import BrokenEngine, StuckEngine
from weightsync.testing.processes import Peer, PeerError


class Liveness(Conformance):
    """A dead peer costs at most the deadline, and is said to be dead."""

    def within(self, deadline: float) -> float:
        """Seconds that a call with a deadline may take in all."""
        return deadline + self.patience

    # ---------------------------------------------------------------- nobody there

    def test_there_is_no_sender(self, run: Run) -> None:
        """Refused connections, missing files: an error at the deadline."""
        receiver = run.peer()
        with pytest.raises(PeerError) as none:
            receiver.call(
                roles.receive_in, run.scheme, "engine", timeout=0.3, within=self.within(0.3)
            )
        assert none.value.kind == "DeadlineError"

    def test_receivers_do_not_come(self, run: Run) -> None:
        """The error says who is missing, and who is there."""
        sender = run.sender()
        run.receiver("here")
        with pytest.raises(PeerError, match=r"absent.*connected: here") as missing:
            sender.call(
                roles.connect_again, ["here", "absent"], timeout=0.3, within=self.within(0.3)
            )
        assert missing.value.kind == "DeadlineError"

    def test_nothing_is_published(self, run: Run) -> None:
        run.sender()
        receiver = run.receiver("engine")
        assert receiver.call(roles.poll, 0.0, within=self.within(0.0)) is None
        assert receiver.call(roles.poll, 0.3, within=self.within(0.3)) is None

    # ---------------------------------------------------------------- receivers

    def test_a_receiver_dies_while_it_applies(self, run: Run) -> None:
        """H1: the other one is served, the sender hears who died, and once only."""
        run.scheme = self.for_receivers(run.scheme, 2)
        sender, other = run.sender(), run.follower("other")
        victim = run.follower("victim", engine=StuckEngine)
        sender.call(roles.publish, 1, wait="applied")
        sender.start(roles.publish_to_failures, 2, timeout=5.0)
        assert other.call(roles.held_while_following, 2) == (2, 2)
        victim.kill()
        told = sender.result(self.within(5.0))
        assert told.failed == {"victim": "dead"}
        assert "victim" in told.words
        assert told.receivers["other"] == ("applied", 2)
        assert sender.call(roles.publish, 3, wait="applied").receivers == {"other": ("applied", 3)}
        assert other.call(roles.held) == (3, 3)

    def test_a_receiver_dies_in_the_middle_of_a_transfer(self, run: Run) -> None:
        """H1: half of a version is under way."""
        run.scheme = self.for_receivers(run.scheme, 2)
        sender, other, victim = run.sender(), run.follower("other"), run.follower("victim")
        sender.call(roles.publish, 1, wait="applied")
        sender.start(roles.publish_haltingly, 2, 1.0, wait="applied", timeout=8.0)
        time.sleep(0.5)
        victim.kill()
        with pytest.raises(PeerError, match="victim") as lost:
            sender.result(self.within(8.0))
        assert lost.value.kind == "ReceiverError"
        report = catch_up(sender, 3, {"other"})
        assert other.call(roles.held) == (report.number, report.number)

    def test_a_receiver_stands_still(self, run: Run) -> None:
        """H1: stopped, not dead. It is late, the other is served, and it catches up."""
        run.scheme = self.for_receivers(run.scheme, 2)
        sender, other, stopped = run.sender(), run.follower("other"), run.follower("stopped")
        sender.call(roles.publish, 1, wait="applied")
        with faults.stalled(stopped.pid):
            told = sender.call(roles.publish_to_failures, 2, timeout=1.0, within=self.within(1.0))
            assert set(told.failed) == {"stopped"}
            assert "stopped" in told.words
            assert told.receivers["other"] == ("applied", 2)
            assert other.call(roles.held) == (2, 2)
        number = catch_up(sender, 3, {"other", "stopped"}).number
        assert stopped.call(roles.held) == other.call(roles.held) == (number, number)

    def test_a_receiver_cannot_be_set_up(self, run: Run) -> None:
        """H3: the sender fails at once, in the receiver's own words."""
        sender, broken = run.sender(), run.peer()
        sender.start(roles.connect_again, 1, timeout=20.0)
        with pytest.raises(PeerError, match="no nccl"):
            broken.call(roles.receive_in, run.scheme, "broken", engine=BrokenEngine)
        with pytest.raises(PeerError, match=r"broken.*no nccl") as failed:
            sender.result(self.patience)
        assert failed.value.kind == "ReceiverError"

    def test_a_receiver_comes_back_under_its_name(self, run: Run) -> None:
        """Killed and started again, while the other one goes on."""
        run.scheme = self.for_receivers(run.scheme, 2)
        sender, other = run.sender(), run.follower("other")
        number = 0
        for _ in range(3):
            again = run.follower("again")
            number = catch_up(sender, number + 1, {"other", "again"}).number
            assert again.call(roles.held) == other.call(roles.held) == (number, number)
            again.kill()

    def test_a_receiver_signs_off(self, run: Run) -> None:
        """Nobody waits for it any more."""
        run.scheme = self.for_receivers(run.scheme, 2)
        sender, staying, leaving = run.sender(), run.follower("staying"), run.follower("leaving")
        sender.call(roles.publish, 1, wait="applied")
        leaving.call(roles.end_receiver)
        report = sender.call(roles.publish, 2, wait="applied")
        assert report.receivers == {"staying": ("applied", 2)}
        assert staying.call(roles.held) == (2, 2)
        assert leaving.call(roles.held)[1] == 1

    # ---------------------------------------------------------------- senders

    def test_a_sender_dies_while_it_publishes(self, run: Run) -> None:
        """Half a version is nowhere; the next sender is followed."""
        sender, receiver = run.sender(), run.follower("engine")
        sender.call(roles.publish, 1, wait="applied")
        sender.start(roles.publish_haltingly, 2, 60.0)
        time.sleep(0.3)
        assert receiver.call(roles.held) == (1, 1)
        sender.kill()
        time.sleep(0.3)
        assert receiver.call(roles.held) == (1, 1)
        again = run.sender(receivers=["engine"])
        assert receiver.call(roles.held) == (1, 1)
        again.call(roles.publish, 1, 10, wait="applied")
        assert receiver.call(roles.held) == (1, 10)

    def test_a_sender_ends_while_receivers_wait(self, run: Run) -> None:
        """They keep what they hold, and hear of the next one."""
        sender, receiver = run.sender(), run.receiver("engine")
        receiver.start(roles.poll)
        sender.call(roles.publish, 1)
        assert receiver.result() == (1, 1)
        receiver.start(poll_or_words, 1.0)
        sender.call(roles.end_sender, within=self.patience)
        assert receiver.result(self.within(1.0)) in (None, "WeightSyncError")
        assert receiver.call(roles.held) == (1, 1)
        receiver.call(roles.follow)
        again = run.sender(receivers=["engine"])
        again.call(roles.publish, 0, 7, wait="applied")
        assert receiver.call(roles.held) == (0, 7)

    def test_there_is_one_sender(self, run: Run) -> None:
        """The second one is refused, and the first one goes on."""
        sender, receiver, second = run.sender(), run.follower("engine"), run.peer()
        with pytest.raises(PeerError) as busy:
            second.call(roles.send_from, run.scheme, timeout=1.0, within=self.within(1.0))
        assert busy.value.kind == "SenderBusyError"
        sender.call(roles.publish, 1, wait="applied")
        assert receiver.call(roles.held) == (1, 1)

    @pytest.mark.parametrize("tidy", [True, False], ids=["shutdown", "without shutdown"])
    def test_programs_end(self, run: Run, tidy: bool) -> None:
        """No thread, lock or socket keeps a process that is done."""
        sender, receiver = run.sender(), run.follower("engine")
        sender.call(roles.publish, 1, wait="applied")
        if tidy:
            receiver.call(roles.end_receiver)
            sender.call(roles.end_sender)
        receiver.end(self.patience)
        sender.end(self.patience)


def catch_up(sender: Peer, number: int, receivers: set[str]) -> Any:
    """Publish until exactly these receivers have applied a version, which must not take long."""
    for attempt in range(10):
        told = sender.call(roles.publish_to_failures, number + attempt, timeout=10.0)
        if not told.failed and set(told.receivers) == receivers:
            return told
    raise AssertionError(f"{receivers} do not catch up: {told}")


def poll_or_words(state: Any, timeout: float) -> Any:
    """What a poll gives, or that it was an error of ours."""
    from weightsync.errors import WeightSyncError

    try:
        return roles.poll(state, timeout)
    except WeightSyncError:
        return "WeightSyncError"
