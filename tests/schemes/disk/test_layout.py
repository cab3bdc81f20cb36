"""Names, commits and layouts: what others wrote is checked before it is believed."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.errors import ProtocolError, WeightSyncError
from weightsync.manifest import DTYPES, Manifest
from weightsync.schemes.disk import names
from weightsync.schemes.disk.commit import Commit
from weightsync.schemes.disk.layout import Checkpoint, Layout
from weightsync.version import Version

COMMIT = Commit(Version(1764454321000, 40), "ab", 4096, ("r1",), 1.5)
SPECS = [("a", torch.bfloat16, (3,)), ("b", torch.float64, (2, 2)), ("c", torch.uint8, ())]
CHECKPOINT = Checkpoint.plan(Manifest.build(SPECS, {"d": "a"}), 1 << 20)


@given(st.integers(0, 1 << 63), st.integers(0, 1 << 53))
def test_versions_have_names(number, epoch):
    version = Version(epoch, number)
    assert names.version_of(names.version_name(version)) == version
    assert names.is_unfinished(names.unfinished_name(version))
    assert names.version_of(names.unfinished_name(version)) is None


@pytest.mark.parametrize(
    "name",
    [
        "step-1-2", "step-0000000001", "step-00000000001-2", "step-0000000001-02",
        "step-0000000001-2\n", "xstep-0000000001-2", "step-000000000\u0661-2",
        "step--000000001-2", "checkpoint-40", ".step-0000000001-2", "",
    ],
)  # fmt: skip
def test_other_names(name):
    assert names.version_of(name) is None
    assert not names.is_unfinished(name)


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00002.safetensors",
                                  "config.json", "weightsync.lock", ".HEAD.1.2.tmp"])  # fmt: skip
def test_files_of_ours(name):
    assert names.is_version_file(name)


@pytest.mark.parametrize("name", ["tokenizer.json", "model.bin", "notes", "xconfig.json",
                                  "model.safetensors.bak", "weightsync.txt"])  # fmt: skip
def test_files_of_others(name):
    assert not names.is_version_file(name)


@pytest.mark.parametrize("receivers", [None, (), ("r1",), ("r1", "r2")])
def test_commits_round_trip(receivers):
    commit = Commit(Version(1, 2), "x", 0, receivers, 0.0)
    assert Commit.from_json(commit.to_json(), "HEAD") == commit


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": -1}, {"epoch": "1"}, {"number": None}, {"number": True}, {"digest": 5},
        {"nbytes": -1}, {"nbytes": "5"}, {"receivers": "r1"}, {"receivers": [5]}, {"time": "x"},
        {"directory": "step-0000000041-1764454321000"}, {"directory": "../other"}, {"directory": 5},
    ],
    ids=repr,
)  # fmt: skip
def test_commits_are_validated(change):
    fields = {**json.loads(COMMIT.to_json()), **change}
    with pytest.raises(ProtocolError, match="HEAD is malformed"):
        Commit.from_json(json.dumps(fields).encode(), "HEAD")


@pytest.mark.parametrize("data", [b"", b"null", b"5", b"[]", b"{}", b"\xff", b"[" * 100_000])
def test_x1_what_is_no_record(data):
    for read in (Commit.from_json, Layout.from_json):
        with pytest.raises(ProtocolError, match="the file is malformed"):
            read(data, "the file")


@pytest.mark.parametrize("shard_bytes", [1, 20, 1 << 20])
def test_layouts_round_trip(shard_bytes):
    specs = [(f"{name}{n}", dtype, (n,)) for name, dtype in DTYPES.items() for n in range(3)]
    layout = Checkpoint.plan(Manifest.build(specs, {"tied": "bool1"}), shard_bytes).layout
    again = Layout.from_json(layout.json, "layout")
    assert again == layout
    assert again.json == layout.json


def changed(change):
    document = json.loads(CHECKPOINT.layout.json)
    change(document)
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(files=[]),
        lambda d: d.update(files=7),
        lambda d: d.update(manifest=7),
        lambda d: d["files"].append(d["files"][0]),
        lambda d: d["files"][0].update(name="../model.safetensors"),
        lambda d: d["files"][0].update(name="/etc/passwd"),
        lambda d: d["files"][0].update(name="weightsync.json"),
        lambda d: d["files"][0].update(size=4100),
        lambda d: d["files"][0].update(size=-1),
        lambda d: d["files"][0]["tensors"].pop(),
        lambda d: d["files"][0]["tensors"].append([99, 8192]),
        lambda d: d["files"][0]["tensors"].append([-1, 8192]),
        lambda d: d["files"][0]["tensors"][1].__setitem__(1, 4096),
        lambda d: d["files"][0]["tensors"][1].__setitem__(1, 4096 + 33),
        lambda d: d["files"][0]["tensors"][0].__setitem__(1, 1 << 62),
        lambda d: d["files"][0]["tensors"][0].append(5),
        lambda d: d["manifest"]["tensors"][0].update(dtype="pickle"),
        lambda d: d["manifest"].update(fingerprint="0" * 32),
    ],
)
def test_layouts_are_validated(change):
    with pytest.raises(WeightSyncError, match="the layout"):
        Layout.from_json(changed(change), "the layout")


def test_a_plan_is_the_same_every_time():
    """Else no two versions could be compared."""
    again = Checkpoint.plan(Manifest.build(SPECS, {"d": "a"}), 1 << 20)
    assert (again.layout, again.headers, again.index) == (
        CHECKPOINT.layout,
        CHECKPOINT.headers,
        CHECKPOINT.index,
    )
