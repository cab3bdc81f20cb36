"""The benchmark of several GPUs without one: parts and limits, verdicts, and broadcasts on gloo."""

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def multi(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("multi_gpu")
    for name in [name for name in sys.modules if name.partition("_")[0] in ("gpu", "multi")]:
        del sys.modules[name]


@pytest.fixture
def options():
    return argparse.Namespace(
        parts="engine,fsdp",
        shape="tiny",
        gpus=2,
        rounds=1,
        device="cpu",
        seconds=100.0,
        limit=30.0,
        json=None,
        machine="none",
    )


@pytest.fixture
def scripts(multi, monkeypatch, tmp_path):
    """Have other scripts be the parts."""
    monkeypatch.setattr(multi.gpu, "HERE", tmp_path)
    return lambda part, text: (tmp_path / f"multi_{part}.py").write_text(text)


ROW = {"shape": "tiny", "path": "one GPU alone", "nbytes": 10**9, "publish": [20.0]}

FILLS = """
import pathlib, sys, threading
folder = pathlib.Path(sys.argv[sys.argv.index("--folder") + 1])
(folder / "slot").write_bytes(b"x")
print('{"shape": "tiny", "path": "folder", "error": "%s"}' % folder, flush=True)
"""


def test_a_part_that_hangs_is_a_row_and_the_next_one_is_measured(
    multi, options, scripts, monkeypatch
):
    scripts("engine", FILLS + "threading.Event().wait()")
    scripts("fsdp", f"print({json.dumps(ROW)!r})")
    monkeypatch.setattr(multi, "LEAST", 1.0)
    options.limit, began = 3.0, time.monotonic()
    rows = multi.measure(options)
    assert time.monotonic() - began < 60
    folder = next(row["error"] for row in rows if row["path"] == "folder")
    assert not Path(folder).exists()  # it is memory
    hung = {"shape": "tiny", "path": "the rest of engine", "error": "not done within 3 s"}
    assert rows[2:] == [hung, ROW]


def test_a_part_that_dies_is_a_row_with_its_words(multi, options, scripts):
    scripts("engine", "print('why it died'); raise SystemExit(3)")
    scripts("fsdp", "")
    _, died = multi.measure(options)
    assert died["error"] == "ended with 3: why it died\n"


def test_a_part_for_which_no_time_is_left_is_a_row(multi, options, scripts):
    options.seconds = 5.0
    assert [row.get("error") for row in multi.measure(options)[1:]] == [
        "no time was left for it",
        "no time was left for it",
    ]


def test_an_unknown_part_is_refused():
    command = [sys.executable, str(FOLDER / "multi_gpu.py"), "--parts", "broadcast,engines"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "engines: no such part" in done.stderr


def broadcast_row(receivers, digests, of_flat=0.9, publish=100.0):
    path = f"NCCLScheme, {receivers}, {digests}"
    row = {"receivers": receivers, "digests": digests, "of_flat": of_flat, "publish": [publish]}
    return {"shape": "7b", "path": path, "nbytes": 1, **row}


def engine_row(path, **changes):
    times = {"end to end": [10.0], "pause": [5.0]}
    about = {"workers": 1, "apart": True, "tokens": True}
    return {"shape": "1b", "path": path, "nbytes": 2 * 10**9, **about, **times, **changes}


def good_rows():
    """A run in which everything that is wanted is reached."""
    lost = {"seconds": 6.0, "silence": 5.0, "named": True, "survivor": True, "works": True}
    return [
        *(broadcast_row(count, digests) for count in (1, 3, 7) for digests in (True, False)),
        {"shape": "1b", "path": "a receiver killed in mid-transfer", "lost": lost},
        engine_row("TP=1, NCCLScheme"),
        engine_row("TP=1, vLLM's nccl engine, packed", **{"end to end": [20.0], "pause": [20.0]}),
        engine_row("TP=2, double buffer, staged", workers=2, read=[1.01]),
        engine_row("TP=2, vLLM's nccl engine, packed", workers=2, **{"end to end": [20.0]}),
        engine_row("replicas, double buffer, plan", read=[2.0]),
        engine_row("replicas, vLLM's nccl engine, packed"),
        {"path": "limit: one GPU's link to the host", "publish": [100.0]},
        {"path": "one GPU alone", "publish": [110.0]},
        {"path": "FSDP2, each rank its rows", "publish": [60.0]},
        {"path": "FSDP2, gathered", "publish": [300.0]},
    ]


PARTS = ["broadcast", "engine", "fsdp"]


def test_a_run_that_reaches_everything_has_no_other_verdict(multi):
    lines = list(multi.judge(good_rows(), PARTS))
    assert len(lines) > 25
    assert all(line.endswith((" yes)", ": yes")) for line in lines), lines


@pytest.mark.parametrize(
    ("path", "changes", "what"),
    [
        ("NCCLScheme, 3, True", {"of_flat": 0.8}, "digests on, 3 receivers"),
        ("NCCLScheme, 7, False", {"publish": [130.0]}, "digests off: 7 receivers' time"),
        ("TP=2, double buffer, staged", {"tokens": False}, "staged: tokens"),
        ("TP=2, double buffer, staged", {"read": [1.01, 2.0]}, "a rank reads"),
        ("TP=1, NCCLScheme", {"pause": [21.0]}, "pause, times as fast"),
        ("replicas, double buffer, plan", {"end to end": [11.0]}, "end to end, times as fast"),
        ("FSDP2, each rank its rows", {"publish": [105.0]}, "of one GPU's link"),
        ("FSDP2, gathered", {"publish": [50.0]}, "times as fast as gathered"),
    ],
)
def test_what_was_not_reached_is_said(multi, path, changes, what):
    rows = [{**row, **changes} if row["path"] == path else row for row in good_rows()]
    lines = [line for line in multi.judge(rows, PARTS) if "NO" in line]
    assert len(lines) == 1, lines
    assert what in lines[0]


@pytest.mark.parametrize("told", ["named", "survivor", "works"])
def test_a_lost_receiver_that_was_not_dealt_with_is_said(multi, told):
    rows = good_rows()
    next(row for row in rows if "lost" in row)["lost"][told] = False
    assert len([line for line in multi.judge(rows, PARTS) if line.endswith("NO")]) == 1


def test_engines_on_the_trainers_gpu_are_not_compared_over_nccl(multi):
    rows = [{**row, "apart": False} for row in good_rows()]
    lines = list(multi.judge(rows, ["engine"]))
    assert len([line for line in lines if "not measured" in line]) == 3
    assert not any("pause" in line or "end to end" in line for line in lines)


def test_nothing_measured_is_no_success(multi):
    rows = [{"shape": "7b", "path": "the rest of engine", "error": "not done within 3 s"}]
    lines = list(multi.judge(rows, PARTS))
    assert lines
    assert all("not measured" in line for line in lines)


@pytest.mark.parametrize(
    ("notes", "read"),
    [
        ("model: 5 copies by plan (1.24 GB) model: 5 copies by plan (1.25 GB)", [1.24, 1.25]),
        ("model: 5 copies by plan (1.24 GB); 2 layers by vLLM's reload: head (cast)", []),
        ("model: by vLLM's reload (it was asked for)", []),
    ],
)
def test_what_ranks_read_is_in_their_notes_if_all_is_planned(multi, notes, read):
    assert importlib.import_module("multi_engine").read_by_plan(notes) == read


@pytest.mark.parametrize("gpus", range(1, 9))
def test_engines_have_gpus_of_their_own_where_there_are_enough(multi, gpus):
    engine = importlib.import_module("multi_engine")
    layout = engine.places(gpus)
    used = {gpu for group in layout.values() for each in group for gpu in each}
    assert used <= set(range(gpus))
    assert (0 in used) == (gpus < 3)
    assert {"TP=2", "replicas"} <= set(layout) or gpus == 1


@pytest.mark.slow
@pytest.mark.live
def test_broadcasts_on_gloo_are_measured_and_a_killed_receiver_comes_back(tmp_path):
    file = tmp_path / "multi.json"
    command = [
        sys.executable,
        str(FOLDER / "multi_gpu.py"),
        "--parts",
        "broadcast",
        "--rounds",
        "1",
    ]
    command += ["--device", "cpu", "--shape", "tiny", "--gpus", "2", "--json", str(file)]
    done = subprocess.run(
        command,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    rows = {row["path"]: row for row in json.loads(file.read_text())["rows"]}
    for way in ("on", "off", "on, buckets of 64 MiB", "on, buckets of 512 MiB"):
        row = rows[f"NCCLScheme, 1 receiver, digests {way}"]
        assert len(row["publish"]) == len(row["flat"]) == 1
        assert row["of_flat"] > 0
    assert "killed: the error names it: yes" in done.stdout
    assert "killed: the other has the version: yes" in done.stdout
    assert "killed: back in the next version, right: yes" in done.stdout
