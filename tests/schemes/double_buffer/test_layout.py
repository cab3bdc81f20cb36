"""Names of files, and the small records in them."""

import json

import numpy as np
import pytest
import torch

from weightsync.errors import ProtocolError
from weightsync.manifest import Manifest
from weightsync.report import ReceiverReport, Seconds
from weightsync.run import records
from weightsync.schemes.double_buffer import layout
from weightsync.schemes.double_buffer.layout import Commit
from weightsync.version import Version

COMMIT = Commit(Version(3, 7), "generation-0002", 1, "d1ge57", 4096, None, 12.5)
REPORT = ReceiverReport(
    "r1", "applied", Version(3, 7), Version(3, 8), "words", "host", 5, Seconds(apply=1.0, pause=0.5)
)


def test_generations():
    assert layout.generation_name(1) == "generation-0001"
    for number in (1, 9999, 10_000, 123_456_789):
        assert layout.generation_number(layout.generation_name(number)) == number
    for name in ("generation-1", "generation-", "generation-0001x", "generation-0001\n",
                 "generation-\u0660\u0660\u0660\u0661",
                 "xgeneration-0001", "generation-0001/..", "generation--001",
                 "Generation-0001", "generation-0000000001"):  # fmt: skip
        assert layout.generation_number(name) is None


def test_which_files_are_ours():
    """Only these are ever removed from a generation."""
    for slot in (0, 9, layout.MAX_SLOTS - 1):
        for name in (layout.slot_bytes, layout.slot_lock, layout.slot_record, layout.slot_digests):
            assert layout.is_generation_file(name(slot))
    assert layout.is_generation_file("manifest.json")
    assert layout.is_generation_file(".slot0.json.12.34.tmp")
    for name in ("notes.txt", "slot.bin", "slot0.bin.bak", "xslot0.bin", "slot0.bin\n", "manifest",
                 "slot000.bin", "slot0.txt", ".hidden", "a.tmp", ".a.tmp", ".a.1.tmp",
                 "slot-1.bin"):  # fmt: skip
        assert not layout.is_generation_file(name)


@pytest.mark.parametrize("id", ["r1", "R.2_x-3", "a", "0", "x" * 100])
def test_receiver_ids(id):
    assert records.is_receiver_id(id)


@pytest.mark.parametrize(
    "id", ["", ".x", "-x", "_x", "a/b", "..", "a b", "ä", "a\n", "a\0", "x" * 101]
)
def test_no_receiver_ids(id):
    assert not records.is_receiver_id(id)


@pytest.mark.parametrize("receivers", [None, (), ("r1",), ("r1", "r2")])
def test_commits_round_trip(receivers):
    commit = Commit(Version(1, 2), "generation-0001", 0, "x", 0, receivers, 0.0)
    assert Commit.from_json(commit.to_json(), "head.json") == commit


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": None}, {"epoch": -1}, {"epoch": 1.0}, {"epoch": "1"}, {"epoch": True},
        {"number": None}, {"number": -1}, {"number": []},
        {"generation": None}, {"generation": 1}, {"generation": "../x"}, {"generation": ""},
        {"generation": "generation-0001/../.."}, {"generation": "generation-1"},
        {"slot": None}, {"slot": -1}, {"slot": layout.MAX_SLOTS}, {"slot": "0"}, {"slot": True},
        {"digest": None}, {"digest": 5}, {"nbytes": -1}, {"nbytes": 1.5}, {"nbytes": 1 << 70},
        {"receivers": 5}, {"receivers": "r1"}, {"receivers": {"r1": 1}}, {"receivers": [5]},
        {"receivers": True}, {"time": None}, {"time": "x"}, {"time": []}, {"time": 10**400},
    ],
    ids=lambda change: repr(change)[:30],
)  # fmt: skip
def test_commits_are_validated(change):
    fields = {**json.loads(COMMIT.to_json()), **change}
    with pytest.raises(ProtocolError, match=r"head\.json is malformed") as caught:
        Commit.from_json(json.dumps(fields).encode(), "head.json")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("field", list(json.loads(COMMIT.to_json())))
def test_a_missing_field_is_named(field):
    fields = json.loads(COMMIT.to_json())
    del fields[field]
    with pytest.raises(ProtocolError, match=field):
        Commit.from_json(json.dumps(fields).encode(), "head.json")


@pytest.mark.parametrize(
    "data", [b"", b"null", b"5", b"[]", b"{}", b'"x"', b"\xff", b"[" * 100_000]
)
def test_what_is_no_record(data):
    for read in (Commit.from_json, records.report_from_json):
        with pytest.raises(ProtocolError, match="the file is malformed"):
            read(data, "the file")


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


def test_the_digest_covers_bytes_and_names():
    one = Manifest.build([("a", torch.int8, (4,))])
    other = Manifest.build([("b", torch.int8, (4,))])
    digests = np.array([1, 2], dtype=np.uint64)
    found = {
        layout.digest_of(one, digests),
        layout.digest_of(other, digests),
        layout.digest_of(one, digests[::-1].copy()),
        layout.digest_of(one, digests[:1]),
    }
    assert len(found) == 4
    assert layout.digest_of(one, digests) == layout.digest_of(one, digests.astype(">u8"))
