"""One command for every figure: what it runs, keeps, and names."""

import importlib
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def reproduce(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("reproduce")
    sys.modules.pop("reproduce", None)


@pytest.fixture
def command(reproduce, monkeypatch, tmp_path, capsys):
    """Run it over benchmarks of the test's own; its exit code and last lines."""

    def run(*benchmarks):
        monkeypatch.setattr(reproduce, "BENCHMARKS", benchmarks)
        monkeypatch.setattr(reproduce.torch.cuda, "device_count", lambda: 0)
        monkeypatch.setattr(sys, "argv", ["reproduce.py", "--into", str(tmp_path / "into")])
        with pytest.raises(SystemExit) as end:
            reproduce.main()
        return end.value.code, capsys.readouterr().out

    return run


def test_every_benchmark_of_the_folder_is_among_them(reproduce):
    run_by_others = {"common", "gpu_paths", "gpu_shapes", "multi_part"}
    run_by_others |= {"multi_broadcast", "multi_engine", "multi_fsdp", "reproduce"}
    scripts = {path.stem for path in FOLDER.glob("*.py")} - run_by_others
    named = {Path(word).stem for b in reproduce.BENCHMARKS for word in b.command[:1] if "/" in word}
    assert named == scripts


def test_figures_and_tables_are_kept_and_failures_named(reproduce, command, tmp_path):
    writes = "import sys; open(sys.argv[2], 'w').write('{}'); print('a table')"
    code, said = command(
        reproduce.Benchmark("good", "Good", ("-c", writes, "--json", "{json}")),
        reproduce.Benchmark("bad", "Bad", ("-c", "raise SystemExit(3)")),
        reproduce.Benchmark("cards", "Cards", ("-c", "raise AssertionError"), gpus=1),
    )
    assert code == 1
    assert "good: done" in said
    assert "bad: ended with 3" in said
    assert "cards: not run, it needs 1 GPUs" in said
    assert (tmp_path / "into" / "good.json").read_text() == "{}"
    results = (tmp_path / "into" / "results.md").read_text()
    assert "## Good: " in results
    assert "```\na table\n```" in results


def test_one_that_hangs_is_ended(reproduce, command, monkeypatch):
    monkeypatch.setattr(reproduce, "PATIENCE", 0.5)
    hangs = reproduce.Benchmark(
        "hangs", "Hangs", ("-c", "import threading; threading.Event().wait()")
    )
    code, said = command(hangs)
    assert code == 1
    assert "hangs: no end within 0.5 s" in said
