"""What a run looks like, whatever its scheme: lag, and plain values."""

import json

from weightsync.inspection import Lag, RunStatus, SlotStatus
from weightsync.report import ReceiverReport
from weightsync.version import Version

NEWEST = Version(7, 12)


def holding(version):
    return ReceiverReport("r", "applied", version)


def test_lag_is_counted_in_versions_and_in_seconds_since_the_newest():
    status = RunStatus("shm", "/run", NEWEST, time=100.0)
    assert status.lag(holding(Version(7, 9)), 104.0) == Lag(3, 4.0)
    assert status.lag(holding(NEWEST), 104.0) is None


def test_who_holds_nothing_or_a_former_life_s_is_behind_by_all():
    status = RunStatus("shm", "/run", NEWEST, time=100.0)
    assert status.lag(holding(None), 101.0) == Lag(None, 1.0)
    assert status.lag(holding(Version(6, 400)), 101.0) == Lag(None, 1.0)


def test_nobody_is_behind_nothing():
    assert RunStatus("shm", "/run").lag(holding(None), 0.0) is None


def test_a_clock_that_is_behind_makes_no_negative_ages():
    assert RunStatus("shm", "/run", NEWEST, time=100.0).lag(holding(None), 3.0) == Lag(None, 0.0)


def test_a_status_is_plain_json():
    slot = SlotStatus("generation-0001", 1, NEWEST, "free", 64)
    member = RunStatus("disk", "/other", receivers=(holding(Version(7, 11)),), version=NEWEST)
    status = RunStatus("fallback", "/run", NEWEST, slots=(slot,), members=(member,), time=1.0)
    document = json.loads(json.dumps(status.to_dict(2.0)))
    assert document["version"] == [7, 12]
    assert document["slots"][0]["state"] == "free"
    assert document["members"][0]["receivers"][0]["lag"] == {"versions": 1, "seconds": None}
    assert slot.place == "generation-0001/slot1"
    assert SlotStatus("step-1", None, None, "free", None).place == "step-1"
