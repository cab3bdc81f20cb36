"""``weightsync bench`` as a user runs it."""

import glob
import json
import os
import shlex
import signal
import subprocess
import sys

import psutil
import pytest
from typer.testing import CliRunner

from tests.docs import blocks
from weightsync.bench.measures import Cell, Move, Report, Result, Taken
from weightsync.cli.app import app
from weightsync.testing.processes import WAIT, eventually

SMALL = ["--suite", "--quick", "--rounds", "1", "--warm", "1"]


def run(*arguments, columns=80):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)], env={"COLUMNS": str(columns)})


def report():
    """Of our way, of one that is torn and slow, and of one that failed."""
    rows = [("double buffer", True, 0.01, 0), ("other", False, 0.1, 2)]
    results = [
        Result(name, "", ours, False, "plain copy", 9, (taken(seconds, torn),))
        for name, ours, seconds, torn in rows
    ]
    bound = Result("plain copy", "", False, True, "plain copy", 9, (taken(0.005, 0),))
    failed = Result("bad", "", False, False, "plain copy", error="its own words")
    cell = Cell("1 GB in 3 tensors, 1 receiver", 10**9, 3, 1, (bound, *results, failed))
    return Report({"date": "today", "cores": 2, "torch": "2", "peers": {"ray": "3"}}, (cell,))


def taken(seconds, torn):
    moves = [Move(cold, seconds / 2, seconds / 2, seconds, 0.001, 0.5) for cold in (True, False)]
    return Taken(tuple(moves), 2_000_000_000, 9, torn)


@pytest.fixture
def saved(tmp_path):
    (tmp_path / "report.json").write_text(json.dumps(report().to_dict()))
    return tmp_path / "report.json"


def test_a_table_fits_80_columns_and_says_what_it_leaves_out(saved):
    shown = run("--show", saved)
    assert shown.exit_code == 1, "a way failed"
    assert max(map(len, shown.stdout.splitlines())) <= 80
    lines = [line.split() for line in shown.stdout.replace("│", " ").splitlines()]
    assert ["double", "buffer", "5.0", "5.0", "10.0", "100.00", "50%", "0.50", "0/9"] in lines
    assert ["other", "50.0", "50.0", "100", "10.00", "5%", "0.50", "2/9"] in lines
    assert "bad: failed: its own words" in shown.stdout
    assert "Left out at 80 columns: pause, cold, extra" in shown.stdout
    wide = run("--show", saved, columns=120)
    assert "Left out" not in wide.stdout
    assert "2 GB" in wide.stdout


def test_pictures_are_drawn(saved, tmp_path):
    pytest.importorskip("matplotlib.figure")
    run("--show", saved, "--plots", tmp_path / "plots")
    (picture,) = (tmp_path / "plots").iterdir()
    assert picture.name == "bench-1GB-3-tensors-1-receivers.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.live
def test_a_suite_writes_what_it_shows(tmp_path):
    ran = run(*SMALL, "--ways", "double buffer", "--json", tmp_path / "a", "--directory", tmp_path)
    assert ran.exit_code == 0, ran.output
    document = json.loads((tmp_path / "a").read_text())
    (cell,) = document["cells"]
    assert [one["way"] for one in cell["results"]] == ["plain copy", "double buffer"]
    assert document["about"]["peers"]["psutil"] == psutil.__version__
    assert run("--show", tmp_path / "a").stdout == ran.stdout


@pytest.mark.live
def test_a_scheme_and_a_model_of_ones_own(run_dir, tmp_path):
    """As docs/command-line.md says it."""
    import torch
    from safetensors.torch import save_file

    save_file({"w": torch.zeros(1 << 18)}, tmp_path / "model.safetensors")
    command = blocks("docs/command-line.md", "bash")["bench"].replace("/dev/shm/run42", run_dir)
    arguments = shlex.split(command.replace("/mnt/shared/checkpoint", str(tmp_path)))[2:]
    ran = run(*arguments, "--rounds", 1, "--warm", 1, "--directory", tmp_path, columns=120)
    assert ran.exit_code == 0, ran.output
    assert "1.05 MB in 1 tensors, 2 receivers" in ran.stdout
    assert "your scheme" in ran.stdout
    assert "needed in memory: 5.24 MB" in ran.stdout
    assert not os.path.exists(run_dir)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "either --scheme URL (with --model), or --suite"),
        (["--suite", "--ways", "nonsense"], "no way is called 'nonsense'; there are: plain copy"),
        (["--suite", "--sizes", "1,x"], "--sizes 1,x: numbers above 0 were expected"),
        (["--suite", "--tensors", "-3"], "--tensors -3: numbers above 0 were expected"),
        (["--suite", "--sizes", "1e-9"], "do not fit"),
        (["--scheme", "no"], "no"),
        (["--scheme", "shm:///dev/shm"], "is there already"),
        (["--scheme", "nccl://127.0.0.1:1"], "its weights are on GPUs"),
        (["--scheme", "shm:///dev/shm/weightsync-x", "--sizes", "1e6"], "of memory are needed"),
        (["--scheme", "shm:///dev/shm/weightsync-x", "--model", "/none"], "neither a config.json"),
        (["--show", "/dev/null"], "Expecting value"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_words(arguments, words):
    ran = run(*arguments)
    assert ran.exit_code == 2
    assert words in " ".join(ran.stderr.split())
    assert ran.stdout == ""


@pytest.mark.live
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        signal.SIGKILL,
    ],
)
def test_nothing_stays_of_a_suite_that_is_ended(number, tmp_path):
    """Folders in shared memory and on the disk, and processes, wherever it stood."""
    command = [sys.executable, "-m", "weightsync", "bench", *SMALL, "--rounds", "500"]
    suite = subprocess.Popen(
        [*command, "--ways", "double buffer", "--directory", str(tmp_path)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    folders = f"/dev/shm/weightsync-bench-{suite.pid}-*"
    eventually(lambda: glob.glob(f"{folders}/run/head.json") or None)
    began = psutil.Process(suite.pid).children(recursive=True)
    assert began
    suite.send_signal(number)
    assert suite.wait(WAIT) != 0
    eventually(lambda: not glob.glob(folders) and not os.listdir(tmp_path))
    _, alive = psutil.wait_procs(began, timeout=WAIT)
    assert not alive
