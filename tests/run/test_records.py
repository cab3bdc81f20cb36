"""Names and records in a run's directory: what others wrote is checked before it is believed."""

import json

import pytest

from weightsync.errors import ProtocolError
from weightsync.report import ReceiverReport, Seconds
from weightsync.run import records
from weightsync.version import Version

REPORT = ReceiverReport(
    "r1",
    "applied",
    Version(3, 7),
    Version(3, 8),
    "words",
    "host",
    5,
    Seconds(apply=1.0, pause=0.5, total=1.0),
)


@pytest.mark.parametrize("id", ["r1", "R.2_x-3", "a", "0", "x" * 100])
def test_receiver_ids(id):
    assert records.is_receiver_id(id)


@pytest.mark.parametrize(
    "id", ["", ".x", "-x", "_x", "a/b", "..", "a b", "ä", "a\n", "a\0", "x" * 101]
)
def test_no_receiver_ids(id):
    assert not records.is_receiver_id(id)


@pytest.mark.parametrize(
    "data", [b"", b"null", b"5", b"[]", b"{}", b'"x"', b"\xff", b"[" * 100_000]
)
def test_what_is_no_record(data):
    with pytest.raises(ProtocolError, match="the file is malformed"):
        records.report_from_json(data, "the file")


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999"])
def test_a_time_that_json_does_not_know_is_refused(value):
    """Who looks with --json would hand it on."""
    data = records.report_to_json(REPORT).replace(b'"pause": 0.5', b'"pause": ' + value.encode())
    with pytest.raises(ProtocolError, match="seconds were expected"):
        records.report_from_json(data, "x.json")


def test_reports_round_trip():
    assert records.report_from_json(records.report_to_json(REPORT), "x.json") == REPORT
    bare = ReceiverReport("r1", "connected")
    assert records.report_from_json(records.report_to_json(bare), "x.json") == bare


@pytest.mark.parametrize("state", ["connected", "applied", "rolled back", "unusable", "failed"])
def test_states_that_a_receiver_can_report(state):
    report = ReceiverReport("r1", state)
    assert records.report_from_json(records.report_to_json(report), "x.json").state == state


@pytest.mark.parametrize(
    "change",
    [
        {"id": None}, {"id": 5}, {"host": None}, {"pid": None}, {"pid": -1}, {"pid": "5"},
        {"state": "dead"}, {"state": "happy"}, {"state": None}, {"state": []},
        {"version": 5}, {"version": [1]}, {"version": "x"}, {"attempted": [1, -1]}, {"error": 5},
        {"apply": None}, {"apply": "x"}, {"apply": 10**400}, {"pause": []},
    ],
    ids=lambda change: repr(change)[:30],
)  # fmt: skip
def test_reports_are_validated(change):
    fields = {**json.loads(records.report_to_json(REPORT)), **change}
    with pytest.raises(ProtocolError, match=r"x\.json is malformed"):
        records.report_from_json(json.dumps(fields).encode(), "x.json")
