"""Versions come in order, over restarts too, to those they are meant for, or with an error."""

from __future__ import annotations

import functools

import pytest

from weightsync.testing import faults, roles, weights
from weightsync.testing.conformance.base import Conformance, Run, refusal
from weightsync.testing.engines import FailingEngine
from weightsync.testing.processes import PeerError

HOUR = 3600.0


class Versions(Conformance):
    """Newer is newer, whatever happened in between; a failure is heard of."""

    def test_numbers_grow(self, run: Run) -> None:
        """An older number is refused, and nothing comes of it."""
        sender, receiver = run.sender(), run.follower("engine")
        sender.call(roles.publish, 5, wait="applied")
        with pytest.raises(PeerError) as refused:
            sender.call(roles.publish, 4)
        assert refused.value.kind == "VersionError"
        assert receiver.call(roles.held) == (5, 5)
        sender.call(roles.publish, 9, wait="applied")
        assert receiver.call(roles.held) == (9, 9)

    def test_a_number_stands_for_one_set_of_weights(self, run: Run) -> None:
        """The same again is no error; other weights under the same number would be lost."""
        sender, receiver = run.sender(), run.follower("engine")
        sender.call(roles.publish, 5, wait="applied")
        sender.call(roles.publish, 5, wait="applied")
        with pytest.raises(PeerError) as refused:
            sender.call(roles.publish, 5, 50)
        assert refused.value.kind == "VersionError"
        assert receiver.call(roles.held) == (5, 5)

    def test_the_first_version_has_any_number(self, run: Run) -> None:
        """C8."""
        sender, receiver = run.sender(), run.follower("engine")
        sender.call(roles.publish, 40, wait="applied")
        assert receiver.call(roles.held) == (40, 40)

    def test_a_receiver_that_comes_late(self, run: Run) -> None:
        """It gets the newest version, or the next one."""
        run.scheme = self.for_receivers(run.scheme, 2)
        sender = run.sender()
        run.follower("early")
        sender.call(roles.publish, 1)
        receiver = run.follower("late")
        if not self.keeps_versions:
            sender.call(roles.publish, 2)
        newest = 1 if self.keeps_versions else 2
        assert receiver.call(roles.held_while_following, newest) == (newest, newest)

    @pytest.mark.parametrize("end", ["killed", "ended"])
    def test_a_sender_that_comes_back_is_newer(self, run: Run, end: str) -> None:
        """C8: it resumes from a step that was published before, with other weights."""
        sender = run.sender()
        receiver = run.follower("engine")
        first = sender.call(roles.publish, 40, wait="applied")
        if end == "killed":
            sender.kill()
        else:
            sender.call(roles.end_sender)
        again = run.sender(receivers=["engine"])
        report = again.call(roles.publish, 40, 41, wait="applied")
        assert report.epoch > first.epoch
        assert receiver.call(roles.held) == (40, 41)

    @pytest.mark.parametrize("end", ["killed", "ended"])
    def test_the_clock_goes_back(self, run: Run, end: str) -> None:
        """A sender that comes back an hour earlier is followed, or told that it is not."""
        sender = run.sender()
        receiver = run.follower("engine")
        sender.call(roles.publish, 5, wait="applied")
        if end == "killed":
            sender.kill()
        else:
            sender.call(roles.end_sender)
        again = run.peer()
        again.call(roles.suffer, faults.clock_back, HOUR)
        refused = refusal(again, roles.send_from, run.scheme, receivers=["engine"])
        words = refused.text if refused else again.call(roles.publish_to_failures, 6).words
        if words:
            assert "engine" in words
            assert receiver.call(roles.held) == (5, 5)
        else:
            assert receiver.call(roles.held) == (6, 6)

    def test_updates_for_some_of_three(self, run: Run) -> None:
        """H5: fifty of them, for all, for one, for two."""
        run.scheme = self.for_receivers(run.scheme, 3)
        ids = ("a", "b", "c")
        sender = run.sender(nbytes=4096)
        receivers = {id: run.follower(id, nbytes=4096) for id in ids}
        last = {}
        for number in range(1, 51):
            one = ids[number // 3 % 3]
            addressed = [None, [one], [id for id in ids if id != one]][(number - 1) % 3]
            report = sender.call(roles.publish, number, wait="applied", receivers=addressed)
            for id in addressed or ids:
                last[id] = number
                assert report.receivers[id] == ("applied", number)
            assert {id: receivers[id].call(roles.held) for id in ids} == {
                id: (last[id], last[id]) for id in ids
            }

    def test_an_update_that_fails_at_a_receiver(self, run: Run) -> None:
        """C1: heard of in the receiver's own words; the next one delivers everything."""
        run.scheme = self.for_receivers(run.scheme, 2)
        sender = run.sender()
        failing = run.follower("failing", engine=functools.partial(FailingEngine, value=3))
        other = run.follower("other")
        for number in 1, 2:
            sender.call(roles.publish, number, wait="applied")
        told = sender.call(roles.publish_to_failures, 3)
        assert set(told.failed) == {"failing"}
        assert "no such kernel" in told.words
        assert "failing" in told.words
        assert told.receivers["other"] == ("applied", 3)
        assert other.call(roles.held) == (3, 3)
        status = failing.call(roles.status)
        if status.state == "rolled back":
            assert failing.call(roles.held) == (2, 2)
        else:
            assert (status.state, status.version) == ("unusable", None)
        report = sender.call(roles.publish, 4, wait="applied")
        assert report.receivers == {"failing": ("applied", 4), "other": ("applied", 4)}
        assert failing.call(roles.held) == other.call(roles.held) == (4, 4)

    def test_weights_that_do_not_fit_change_nothing(self, run: Run) -> None:
        """E6: the sender hears of the name and both shapes."""
        sender, receiver = run.sender(), run.follower("engine")
        sender.call(roles.publish, 1, wait="applied")
        with pytest.raises(PeerError, match=r"layer0.*engine|engine.*layer0"):
            sender.call(
                roles.publish_made, 2, weights.constants, 2, 1 << 21, wait="applied", timeout=10.0
            )
        assert receiver.call(roles.held) == (1, 1)
        sender.call(roles.publish, 3, wait="applied")
        assert receiver.call(roles.held) == (3, 3)
