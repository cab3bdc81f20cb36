"""Receivers that fall behind their sender, and receivers that leave it for another run."""

from __future__ import annotations

from pathlib import Path

import pytest

from weightsync.testing import roles
from weightsync.testing.conformance.base import Conformance, Run
from weightsync.testing.processes import PeerError


class Moving(Conformance):
    """A sender waits for those who are too far behind, and not for those who have left."""

    def test_how_far_a_receiver_may_be_behind(self, run: Run) -> None:
        """It holds an earlier version; one further, and the sender waits and says for whom."""
        run.scheme = self.for_receivers(run.scheme, 2)
        sender, receiver = run.sender(), run.receiver("engine")
        sender.call(roles.publish, 1)
        assert receiver.call(roles.poll) == (1, 1)
        told = sender.call(roles.publish, 2, max_lag=1)
        assert told.receivers == {"engine": ("applied", 1)}
        with pytest.raises(PeerError, match="engine") as late:
            sender.call(roles.publish, 3, max_lag=1, timeout=1.0, within=1.0 + self.patience)
        assert late.value.kind == "ReceiverError"
        assert receiver.call(roles.poll) == (3, 3)
        sender.start(roles.publish, 4, max_lag=0)
        assert receiver.call(roles.poll) == (4, 4)
        assert sender.result().receivers == {"engine": ("applied", 4)}

    def test_a_receiver_goes_to_another_run_and_comes_back(self, run: Run, tmp_path: Path) -> None:
        """The one it has left waits for it no more; what is newest is newest in its own run."""
        from weightsync.schemes.double_buffer import DoubleBufferScheme

        run.scheme = self.for_receivers(run.scheme, 2)
        other, elsewhere = run.peer(), DoubleBufferScheme(str(tmp_path / "elsewhere"))
        other.call(roles.send_from, elsewhere)
        other.call(roles.publish, 40)
        sender, staying, moving = run.sender(), run.follower("staying"), run.follower("moving")
        sender.call(roles.publish, 1, wait="applied")
        assert moving.call(roles.switch, elsewhere) == (40, 40)
        told = sender.call(roles.publish, 2, wait="applied")
        assert told.receivers == {"staying": ("applied", 2)}
        told = other.call(roles.publish, 41, wait="applied")
        assert told.receivers == {"moving": ("applied", 41)}
        moving.start(roles.switch, run.scheme)
        sender.call(roles.connect_again, ["moving", "staying"])
        told = sender.call(roles.publish, 3, wait="applied")
        assert told.receivers == {"moving": ("applied", 3), "staying": ("applied", 3)}
        assert moving.result() in ((2, 2), (3, 3))
        other.call(roles.publish, 42)
        assert moving.call(roles.held) == staying.call(roles.held) == (3, 3)
        assert moving.call(roles.verified)
