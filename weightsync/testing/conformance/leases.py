"""Readers see whole versions only, however slow they are and however fast the writer is."""

from __future__ import annotations

import functools

import pytest

from weightsync.testing import roles
from weightsync.testing.conformance.base import Conformance, Run, refusal
from weightsync.testing.engines import SlowEngine

LAST = 1_000_000
"""The number of a version after many."""


def torn(seen: roles.Seen) -> roles.Seen:
    """Those that held another value than that of their version, or a mix."""
    return [(number, value) for number, value in seen if number != value]


class Leases(Conformance):
    """Nothing is overwritten or removed under a reader."""

    def test_a_reader_that_is_slow_in_the_middle_of_its_copy(self, run: Run) -> None:
        """R1: six versions go by meanwhile; the writer waits or skips, and overwrites nothing."""
        sender = run.sender()
        slow = run.receiver("slow", engine=functools.partial(SlowEngine, seconds=0.3))
        quick = run.receiver("quick")
        for receiver in slow, quick:
            receiver.start(roles.poll_until, 6)
        sender.call(roles.publish_range, 1, 6)
        for receiver in slow, quick:
            seen = receiver.result()
            assert torn(seen) == []
            numbers = [number for number, _ in seen]
            assert numbers == sorted(set(numbers))
            assert numbers[-1] == 6

    def test_a_reader_that_is_slow_to_open_what_it_saw(self, run: Run) -> None:
        """R6: it gets that version or is told that it is gone, and then gets a newer one."""
        sender, reader = run.sender(), run.peer()
        reader.call(roles.subscribe, run.scheme, "reader")
        reader.start(roles.see_and_read_later, 0.5)
        sender.start(roles.publish_range, 1, 4)
        number, value, _ = reader.result()
        assert number == value
        sender.result()

    def test_what_is_leased_stays(self, run: Run) -> None:
        """A version is read, kept open while others are published, and read again."""
        sender, reader = run.sender(), run.peer()
        reader.call(roles.subscribe, run.scheme, "reader")
        reader.start(roles.see)
        sender.start(roles.publish, 1)
        assert reader.call(roles.lease, reader.result()) == 1
        sender.result()
        for number in 2, 3, 4:
            late = refusal(sender, roles.publish, number, timeout=0.3)
            assert late is None or late.kind in ("DeadlineError", "ReceiverError"), late
        assert reader.call(roles.end_lease) == 1

    def test_no_read_is_torn(self, run: Run) -> None:
        """R3: receivers and a writer at full speed."""
        sender = run.sender(nbytes=8 << 20)
        receivers = [run.receiver(id, nbytes=8 << 20) for id in ("one", "two")]
        for receiver in receivers:
            receiver.start(roles.poll_until, LAST)
        sender.call(roles.publish_until, self.race_seconds)
        sender.call(roles.publish, LAST, wait="applied")
        for receiver in receivers:
            seen = receiver.result()
            assert torn(seen) == []
            assert len(seen) > 2, "the race was none"

    def test_no_read_without_an_id_is_torn(self, run: Run) -> None:
        """R3 for readers of whom the sender knows nothing."""
        if not self.keeps_versions:
            pytest.skip("what is handed out is handed to receivers (keeps_versions = False)")
        sender, reader = run.sender(nbytes=8 << 20), run.peer()
        sender.call(roles.publish, 1)
        reader.start(roles.read_until, run.scheme, self.race_seconds)
        sender.call(roles.publish_until, self.race_seconds, first=2)
        seen = reader.result()
        assert torn(seen) == []
        assert len(seen) > 2, "the race was none"
