"""What an update says of itself: how much, to whom, how long."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from weightsync.report import ReceiverReport, SyncReport
from weightsync.scheme import WeightSyncScheme
from weightsync.testing import roles, weights
from weightsync.testing.conformance.base import Conformance, Run
from weightsync.testing.conformance.round_trip import carry


class Reports(Conformance):
    """Both ends of an update report the same."""

    def test_both_ends_report_the_same(self, run: Run) -> None:
        """Bytes are those of the tensors, not of what lies between them."""
        sent, received, _ = carry(run, weights.shapes)
        tensors = weights.shapes().values()
        nbytes = sum(tensor.nbytes for tensor in tensors)
        for report in sent, received:
            assert (report.tensors, report.nbytes) == (len(tensors), nbytes)
            assert report.version.number == 1
            assert report.scheme.partition(":")[0] == run.scheme.url_scheme  # then, maybe, which
            assert not report.skipped
        assert sent.version == received.version

    def test_seconds_add_up(self, run: Run) -> None:
        sent, received, _ = carry(run, weights.shapes)
        parts = sent.seconds
        assert min(parts.extract, parts.transfer, parts.apply, parts.pause) >= 0.0
        assert 0.0 < parts.extract + parts.transfer <= parts.total
        assert 0.0 < received.seconds.pause <= received.seconds.apply
        assert parts.apply > 0.0

    def test_receivers_are_listed(self, run: Run) -> None:
        run.scheme = self.for_receivers(run.scheme, 2)
        sender = run.sender()
        followers = {id: run.follower(id) for id in ("a", "b")}
        sender.call(roles.publish, 1, wait="applied")
        known = {report.receiver: report for report in sender.call(receivers)}
        for id, follower in followers.items():
            report = known[id]
            assert (report.state, report.pid, report.error) == ("applied", follower.pid, None)
            assert report.version is not None
            assert report.version.number == 1
            assert report.host

    def test_a_report_is_plain_values(self, run: Run) -> None:
        sent, received, _ = carry(run, weights.shapes)
        for report in sent, received:
            assert SyncReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report

    def test_what_changed_is_counted_or_unknown(self, run: Run) -> None:
        """L6: the same weights under a new number are seen to be the same."""
        run.scheme = self.for_receivers(run.scheme, 1)
        sender = run.sender()
        run.follower("engine")
        for number, value, expected in ((1, 1, None), (2, 1, 0), (3, 2, 4)):
            changed = sender.call(publish_and_count, number, value)
            assert changed in (None, expected)

    def test_a_run_can_be_looked_at(self, run: Run) -> None:
        """By whoever is neither end, of schemes that have ``inspect``; nobody is disturbed."""
        if type(run.scheme).inspect is WeightSyncScheme.inspect:
            pytest.skip("this scheme cannot be looked at")
        run.scheme = self.for_receivers(run.scheme, 1)
        sender = run.sender()
        run.follower("engine")
        for number in (1, 2):
            sender.call(roles.publish, number, wait="applied")
            status = run.scheme.inspect()
            assert (status.sender_alive, status.problems) == (True, ())
            # None: a transport that keeps no copy shows nothing when all have answered.
            assert status.version is None or status.version.number == number
            (report,) = status.receivers
            assert (report.receiver, report.state) == ("engine", "applied")
            assert report.version is not None
            assert report.version.number == number
            assert status.lag(report, time.time()) is None
        json.dumps(status.to_dict(time.time()))


def receivers(state: Any) -> list[ReceiverReport]:
    found: list[ReceiverReport] = state.sender.receivers()
    return found


def publish_and_count(state: Any, number: int, value: int) -> int | None:
    weights.fill(state.weights, value)
    changed: int | None = state.sender.update_weights(version=number, wait="applied").changed
    return changed
