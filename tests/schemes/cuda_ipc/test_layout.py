"""The small files of a CUDA IPC run: nothing in them is believed before it was checked."""

import json

import pytest
import torch

import weightsync as ws
from weightsync.files import Directory
from weightsync.schemes.cuda_ipc.layout import Allocation, Head, Table, read_head, remove_weights
from weightsync.version import Version

MANIFEST = ws.Manifest.build(
    [("a", torch.float32, (4, 4)), ("empty", torch.float32, (0,)), ("b", torch.bfloat16, (8,))]
)
TABLE = Table(
    MANIFEST,
    "GPU-1",
    "17-ab",
    (Allocation(bytes(range(64)), 256, 0x1000), Allocation(b"x" * 64, 1024, 0x2000)),
    ((0, 128), (0, 0), (1, 1008)),
)
HEAD = Head(Version(3, 4), ("r1",), "table-3-1.json", "ab" * 16, 12.5)


def test_a_table_is_read_as_it_was_written():
    assert Table.from_json(TABLE.to_json(), "t") == TABLE


def test_a_head_is_read_as_it_was_written():
    assert Head.from_json(HEAD.to_json(), "h") == HEAD


def change(**fields):
    return json.dumps({**json.loads(TABLE.to_json()), **fields}).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b"\x80\x04K\x01.",  # a pickle
        change(allocations=[["00", 256, 1], ["00", 256, 1]]),  # handles too short
        change(allocations=[["zz" * 64, 256, 1], ["00" * 64, 256, 1]]),
        change(allocations=[["00" * 64, -1, 1], ["00" * 64, 1024, 1]]),
        change(allocations=[["00" * 64, 256, 1]]),  # one is missing
        change(allocations=[["00" * 64, 256, 1, 2], ["00" * 64, 1024, 1]]),
        change(places=[[0, 0], [0, 0]]),  # one is missing
        change(places=[[0, 200], [0, 0], [1, 0]]),  # beyond its allocation
        change(places=[[0, 2], [0, 0], [1, 0]]),  # in the middle of an element
        change(places=[[0, -4], [0, 0], [1, 0]]),
        change(places=[[-1, 0], [0, 0], [1, 0]]),
        change(places=[[7, 0], [0, 0], [1, 0]]),
        change(places=[[True, 0], [0, 0], [1, 0]]),
        change(places=7),
        change(device=None),
        change(process=3),
        change(manifest=3),
        change(manifest="{}"),
    ],
)
def test_a_table_that_cannot_be_true_is_refused(data):
    with pytest.raises((ws.ProtocolError, ws.ManifestError)):
        Table.from_json(data, "the table")


@pytest.mark.parametrize(
    "fields",
    [
        {"table": "../../etc/passwd"},
        {"table": "table-1-1.json\n"},
        {"table": None},
        {"digest": 3},
        {"epoch": -1},
        {"receivers": "r1"},
        {"time": "now"},
    ],
)
def test_a_head_that_cannot_be_true_is_refused(fields):
    data = json.dumps({**json.loads(HEAD.to_json()), **fields}).encode()
    with pytest.raises(ws.ProtocolError, match="the head"):
        Head.from_json(data, "the head")


def test_nothing_but_our_own_files_is_removed(tmp_path):
    for name in ("table-1-2.json", "lease-1-2.lock", "head.json", "table-1.json", "notes.txt"):
        (tmp_path / name).write_text("x")
    remove_weights(Directory.open(str(tmp_path)))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["notes.txt", "table-1.json"]


def test_without_a_head_nothing_is_shown(tmp_path):
    assert read_head(Directory.open(str(tmp_path))) is None
