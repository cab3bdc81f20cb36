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
from weightsync.bench.here import plan_for
from weightsync.bench.janitor import own_folders
from weightsync.bench.measures import Cell, Move, Report, Result, Taken
from weightsync.bench.turn import Length, Places
from weightsync.bench.weights import uniform
from weightsync.cli.app import app
from weightsync.scheme import scheme_from_url
from weightsync.testing.processes import WAIT, eventually

SLOW = pytest.mark.slow
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
    assert [
        "double",
        "buffer",
        "5.0",
        "5.0",
        "10.0",
        "1.0",
        "100.00",
        "50%",
        "copy",
        "0/9",
    ] in lines
    assert ["other", "50.0", "50.0", "100", "1.0", "10.00", "5%", "copy", "2/9"] in lines
    assert "bad: failed: its own words" in shown.stdout
    assert "Left out at 80 columns: cold, CPU s, extra" in shown.stdout
    assert "cold:" not in shown.stdout, "what is left out is explained"
    wide = run("--show", saved, columns=120)
    assert "Left out" not in wide.stdout
    assert "cold: total of a first version" in wide.stdout
    assert "2 GB" in wide.stdout


@pytest.mark.parametrize("columns", [80, 110])
def test_no_figure_of_a_large_table_is_cut(saved, columns):
    """Names and figures as long as they were in earnest."""
    document = json.loads(saved.read_text())
    (cell,) = document["cells"]
    for one, total in zip(cell["results"][:3], (3.037, 6.074, 6.074), strict=True):
        one["way"] = "plain socket" if one["bound"] else f"{one['way']:_<21}"
        one["limit"] = "plain socket"
        one["turns"][0]["reads"] = 40
        for move in one["turns"][0]["moves"]:
            move.update(blocked=4.597, applied=1.477, total=total, pause=1.475)
    saved.write_text(json.dumps(document))
    shown = run("--show", saved, columns=columns).stdout
    assert "50% socket" in shown
    assert "double buffer________" in shown
    assert "…" not in shown
    assert shown.count("4,597") == 3
    assert max(map(len, shown.splitlines())) <= columns


@pytest.mark.parametrize("counts", [{"torn": 1}, {"stale": 1}])
def test_a_scheme_of_ours_that_was_torn_or_stale_is_something_found(saved, counts):
    document = json.loads(saved.read_text())
    (cell,) = document["cells"]
    bound, ours, other, _ = cell["results"]
    cell["results"] = [bound, ours, other]
    saved.write_text(json.dumps(document))
    assert run("--show", saved).exit_code == 0, "others' ways may be torn: that is a finding"
    ours["turns"][0].update(counts)
    saved.write_text(json.dumps(document))
    shown = run("--show", saved)
    assert shown.exit_code == 1
    assert ("double buffer: 1 of 9 reads were stale" in shown.stdout) == ("stale" in counts)


def test_a_dash_for_json_gives_one_document_on_stdout(saved):
    shown = run("--show", saved, "--json", "-")
    assert json.loads(shown.stdout) == json.loads(saved.read_text())
    refused = run("--json", "-")
    assert refused.exit_code == 2
    assert "--suite" in json.loads(refused.stdout)["error"]


def test_pictures_are_drawn(saved, tmp_path):
    pytest.importorskip("matplotlib.figure")
    run("--show", saved, "--plots", tmp_path / "plots")
    (picture,) = (tmp_path / "plots").iterdir()
    assert picture.name == "bench-1GB-3-tensors-1-receiver.png"
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


@pytest.mark.live
@pytest.mark.parametrize(
    "url", ["disk://{folder}/mine", pytest.param("nccl://127.0.0.1:0?backend=gloo", marks=SLOW)]
)
def test_turns_of_a_scheme_do_not_meet_and_nothing_of_it_stays(tmp_path, url):
    """Versions on a disk outlive their sender; a free port is the same for all processes."""
    (tmp_path / "others").write_text("mine")
    ran = run(
        "--scheme", url.format(folder=tmp_path), "--quick", "--rounds", 2, "--warm", 1,
        "--timeout", 20, "--directory", tmp_path, "--json", tmp_path / "json",
    )  # fmt: skip
    assert ran.exit_code == 0, ran.output
    (cell,) = json.loads((tmp_path / "json").read_text())["cells"]
    turns = cell["results"][1]["turns"]
    assert [(turn["torn"], turn["stale"]) for turn in turns] == [(0, 0)] * 2
    assert all(move["applied"] > 0 for turn in turns for move in turn["moves"])
    assert sorted(os.listdir(tmp_path)) == ["json", "others"]


def test_a_free_port_is_chosen_once():
    plan = plan_for("nccl://127.0.0.1?backend=gloo", uniform(1, 4), 1, 1, Length(), Places())
    port = scheme_from_url(plan.ways[1].url).port
    assert port > 0
    assert scheme_from_url(plan.ways[1].url).port == port


def test_a_folder_that_appears_meanwhile_stays_as_it_is(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    with (
        pytest.raises(FileExistsError),
        own_folders(tmp_path, tmp_path, [f"{tmp_path}/new", f"{tmp_path}/mine"]),
    ):
        pass
    assert os.listdir(tmp_path) == ["mine"]
    assert os.listdir(tmp_path / "mine") == ["file"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "either --scheme URL (with --model), or --suite"),
        (["--suite", "--ways", "nonsense"], "no way is called 'nonsense'; there are: plain copy"),
        (["--suite", "--sizes", "1,x"], "--sizes 1,x: numbers above 0 were expected"),
        (["--suite", "--tensors", "-3"], "--tensors -3: numbers above 0 were expected"),
        (["--suite", "--sizes", "1e-9"], "do not fit"),
        (["--scheme", "no"], "no"),
        (["--scheme", "shm:///none/x"], "/none is no folder"),
        (["--scheme", "shm:///x", "--receivers", "1,2"], "--scheme takes one count of receivers"),
        (["--scheme", "shm:///x", "--sizes", "0.02,0.05"], "--scheme takes one size"),
        (["--scheme", "shm:///x", "--tensors", "10,20"], "--scheme takes one count of tensors"),
        (["--scheme", "shm:///x", "--ways", "disk"], "--ways goes with --suite"),
        (["--scheme", "shm:///x", "--model", "m", "--sizes", "1"], "--model has its own sizes"),
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
