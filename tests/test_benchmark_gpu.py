"""The GPU benchmark's front half, which needs no GPU: processes and limits, table, verdicts."""

import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("gpu")
    for name in ("gpu", "gpu_paths", "gpu_shapes"):
        sys.modules.pop(name, None)


@pytest.fixture
def part(gpu, monkeypatch, tmp_path):
    """Have another script measure."""
    monkeypatch.setattr(gpu, "HERE", tmp_path)
    return lambda text: (tmp_path / "gpu_paths.py").write_text(text)


ROW = {"shape": "7b", "path": "a", "nbytes": 10**9, "limit": 10.0, "end to end": [20.0, 30.0, 40.0]}


def test_a_part_that_hangs_is_ended_and_what_it_measured_before_is_kept(gpu, part, tmp_path):
    part(f"print({json.dumps(ROW)!r}, flush=True)\nimport time; time.sleep(600)")
    file, began = tmp_path / "found.json", time.monotonic()
    rows = gpu.Rows(str(file))
    assert gpu.run(["7b", "weightsync"], 3.0, rows) == "not done within 3 s"
    assert time.monotonic() - began < 60
    assert rows.rows == json.loads(file.read_text())["rows"] == [ROW]


def test_a_part_that_dies_is_told_in_its_own_words(gpu, part):
    part("print('why it died'); raise SystemExit(3)")
    assert gpu.run(["7b", "weightsync"], 60.0, gpu.Rows(None)) == "ended with 3: why it died\n"


def test_a_part_that_ends_well_leaves_nothing_to_say(gpu, part):
    part(f"print('noise')\nprint({json.dumps(ROW)!r})")
    rows = gpu.Rows(None)
    assert gpu.run(["7b", "weightsync"], 60.0, rows) == ""
    assert rows.rows == [ROW]


def test_a_machine_that_cannot_measure_is_told_at_once():
    command = [sys.executable, str(FOLDER / "gpu.py"), "--shapes", "tiny"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("gpu.py: needs ")


def test_the_table_has_measured_paths_and_those_that_failed(gpu, capsys):
    failed = {"shape": "7b", "path": "b", "error": "ValueError: no such thing"}
    gpu.show([ROW, failed, {"shape": "7b", "path": "c", "nbytes": 1, "soak": {"wrong": 0}}])
    out = capsys.readouterr().out
    assert "30.0" in out
    assert "33.3" in out  # GB/s
    assert "0.33" in out  # of the limit
    assert "no such thing" in out
    assert "{'wrong': 0}" in out


def rows_of(**changes):
    """A run in which everything that is wanted is reached, but for the changes."""
    values = {
        ("limit: one copy to host", "apply"): 245.0,
        ("limit: one copy to device", "apply"): 240.0,
        ("limit: one copy on device", "apply"): 6.0,
        ("double buffer, plan", "publish"): 250.0,
        ("double buffer, plan", "written"): 245.0,
        ("double buffer, staged", "end to end"): 300.0,
        ("double buffer, staged", "pause"): 12.0,
        ("CUDA IPC, plan", "written"): 7.0,
        ("CUDA IPC, plan", "end to end"): 15.0,
        ("vLLM's ipc engine", "end to end"): 180.0,
        ("vLLM's ipc engine, packed", "end to end"): 200.0,
    }
    return [
        {"shape": "7b", "path": path, column: [changes.get(f"{path}: {column}", value)]}
        for (path, column), value in values.items()
    ]


@pytest.mark.parametrize(
    ("changed", "value", "what"),
    [
        ("double buffer, plan: publish", 300.0, "trainer to slot"),
        ("double buffer, plan: written", 300.0, "slot to engine"),
        ("double buffer, staged: end to end", 320.0, "end to end, staged"),
        ("double buffer, staged: pause", 13.0, "pause, staged"),
        ("CUDA IPC, plan: written", 8.0, "apply by plan"),
        ("vLLM's ipc engine: end to end", 140.0, "times as fast"),
    ],
)
def test_what_was_not_reached_is_said(gpu, changed, value, what):
    rows = _merged(rows_of())
    assert all(line.endswith("yes)") for line in gpu.judge(rows)), list(gpu.judge(rows))
    lines = [line for line in gpu.judge(_merged(rows_of(**{changed: value}))) if "NO" in line]
    assert len(lines) == 1
    assert what in lines[0]


def test_what_failed_counts_as_not_measured(gpu):
    rows = [{"shape": "7b", "path": "CUDA IPC, plan", "error": "it failed"}]
    assert all(line.endswith("not measured") for line in gpu.judge(rows))


def _merged(rows):
    paths = {}
    for row in rows:
        paths.setdefault(row["path"], {}).update(row)
    return list(paths.values())


@pytest.mark.parametrize("shape", ["tiny", "1b", "7b"])
def test_a_shapes_tensors_are_those_of_the_model(gpu, shape):
    from transformers import AutoModelForCausalLM

    shapes = importlib.import_module("gpu_shapes")
    config = shapes.config_of(shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert dict(shapes.specs(config)) == wanted


def test_the_experts_shape_has_1600_tensors(gpu):
    shapes = importlib.import_module("gpu_shapes")
    found = dict(shapes.specs(shapes.config_of("moe")))
    assert len(found) == 1611
    assert sum(torch.Size(size).numel() for size in found.values()) * 2 == pytest.approx(
        5.4e9, rel=0.05
    )


@pytest.fixture
def bench(gpu):
    """The engine's side without an engine, and the trainer's end of its pipe."""
    paths = importlib.import_module("gpu_paths")
    bench = object.__new__(paths.Bench)
    bench.pipe, trainer = multiprocessing.Pipe()
    bench.number = 0
    trainer.send(None)  # has changed its weights
    return paths, bench, trainer


class Polled:
    def __init__(self, *reports):
        self._reports = list(reports)

    def poll_and_apply(self, timeout):
        return self._reports.pop(0) if self._reports else None


def test_an_update_ends_with_both_sides_answers(bench):
    _, bench, trainer = bench
    trainer.send((1.0, 2.0))  # published before the receiver looked
    report, published, _ = bench.change_and_update(Polled("report"))
    assert (report, published) == ("report", (1.0, 2.0))
    assert [trainer.recv(), trainer.recv()] == [("change", ()), ("publish", (1,))]


def test_a_trainer_that_fails_ends_the_round_with_its_words(bench):
    paths, bench, trainer = bench
    trainer.send(paths.TrainerError("NoRoomError: too little"))
    with pytest.raises(paths.TrainerError, match="too little"):
        bench.change_and_update(Polled())


def test_a_version_that_the_receiver_does_not_see_is_no_update(bench):
    paths, bench, trainer = bench
    trainer.send((1.0, 2.0))
    with pytest.raises(paths.TrainerError, match="saw nothing"):
        bench.change_and_update(Polled())


def test_a_run_is_drawn(gpu, tmp_path):
    pytest.importorskip("matplotlib")
    file, image = tmp_path / "found.json", tmp_path / "images" / "gpu.png"
    file.write_text(json.dumps({"date": "2026-11-30", "device": "GPU", "rows": [ROW]}))
    gpu.draw(str(file), str(image))
    assert image.stat().st_size > 1000
