"""Names of files, and the small records in them."""

import json

import numpy as np
import pytest
import torch

from weightsync.errors import ProtocolError
from weightsync.manifest import Manifest
from weightsync.schemes.double_buffer import layout
from weightsync.schemes.double_buffer.layout import Commit
from weightsync.version import Version

COMMIT = Commit(Version(3, 7), "generation-0002", 1, "d1ge57", 4096, None, 12.5)


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
    with pytest.raises(ProtocolError, match="the file is malformed"):
        Commit.from_json(data, "the file")


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
