"""Every figure of README and docs once more: all benchmarks that this machine can run, one by one.

    make bench-all             # or: python benchmarks/reproduce.py --into FOLDER --only disk,suite

Figures go into FOLDER as JSON, tables and sentences as text, and all of it into FOLDER/results.md,
section by section as in benchmarks/RESULTS.md. What needs a GPU is run where there is one (and vLLM
with it), and named where there is none. About an hour and a half on two cores; nothing else
should run beside it. A benchmark that fails is named, the others go on.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch

HERE = Path(__file__).parent
PATIENCE = 3600.0  # seconds for one of them


@dataclass(frozen=True)
class Benchmark:
    """``command``: after ``python``; ``{json}`` is where its figures go."""

    name: str
    title: str
    command: tuple[str, ...]
    gpus: int = 0


def script(name: str, title: str, *options: str, gpus: int = 0) -> Benchmark:
    file = f"benchmarks/{name}.py"
    return Benchmark(name.replace("_", "-"), title, (file, *options, "--json", "{json}"), gpus)


def suite(name: str, title: str, *options: str) -> Benchmark:
    command = ("-m", "weightsync", "bench", "--suite", *options, "--json", "{json}")
    return Benchmark(name, title, (*command, "--plots", "{plots}"))


BENCHMARKS = (
    script("double_buffer", "Double buffer", "--rounds", "7"),
    script("sources", "Sources", "--rounds", "5"),
    script("broadcast", "Broadcast (gloo)", "--rounds", "4"),
    script("disk", "Disk", "--rounds", "2"),
    script("engines", "The pause that requests see", "--rounds", "12"),
    suite("suite-small", "Side by side, 0.1 GB", "--sizes", "0.1", "--tensors", "10",
          "--receivers", "1"),
    suite("suite", "Side by side, 1 GB", "--sizes", "1", "--tensors", "300"),
    suite("suite-many", "Side by side, 20,000 tensors", "--sizes", "1", "--tensors", "20000",
          "--receivers", "1", "--rounds", "1"),
    suite("suite-large", "Side by side, 4 GB", "--sizes", "4", "--tensors", "300",
          "--receivers", "1,2,4", "--rounds", "1"),
    script("imports", "What importing costs"),
    script("gpu", "On a GPU", gpus=1),
    script("multi_gpu", "On several GPUs", gpus=2),
)  # fmt: skip


def run(benchmark: Benchmark, into: Path) -> str | None:
    """Run it, show what it says, and keep it.

    Returns:
        Why it failed, if it did.
    """
    places = {
        "{json}": str(into.absolute() / f"{benchmark.name}.json"),
        "{plots}": str(into.absolute()),
    }
    command = [sys.executable, *(places.get(word, word) for word in benchmark.command)]
    text = into / f"{benchmark.name}.txt"
    print(f"== {benchmark.title}: {' '.join(benchmark.command)}", flush=True)
    environment = {**os.environ, "COLUMNS": "130", "PYTHONWARNINGS": "ignore"}
    with text.open("w") as out:
        try:
            code = subprocess.run(
                command, stdout=out, env=environment, timeout=PATIENCE, cwd=HERE.parent
            ).returncode
        except subprocess.TimeoutExpired:
            code = f"no end within {PATIENCE:g} s"
    print(text.read_text(), flush=True)
    return None if code == 0 else f"ended with {code}" if isinstance(code, int) else code


def section(benchmark: Benchmark, said: str) -> str:
    """As it would stand in RESULTS.md."""
    cores = len(os.sched_getaffinity(0))
    words = [word for word in benchmark.command if "{" not in word]
    command = " ".join(word for word in words if word not in ("--json", "--plots"))
    head = f"## {benchmark.title}: {cores} cores, {date.today()}"
    return f"{head}\n\n`python {command}`\n\n```\n{said.rstrip()}\n```\n"


def chosen(only: str | None) -> list[Benchmark]:
    names = [benchmark.name for benchmark in BENCHMARKS]
    wanted = only.split(",") if only else names
    if unknown := set(wanted) - set(names):
        raise SystemExit(f"{', '.join(sorted(unknown))}: not among {', '.join(names)}")
    return [benchmark for benchmark in BENCHMARKS if benchmark.name in wanted]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, default=Path(f"build/bench-{date.today()}"))
    parser.add_argument("--only", help="names, by commas: " + ", ".join(b.name for b in BENCHMARKS))
    options = parser.parse_args()
    benchmarks = chosen(options.only)
    options.into.mkdir(parents=True, exist_ok=True)
    gpus, outcomes, sections = torch.cuda.device_count(), [], []
    for benchmark in benchmarks:
        began = time.monotonic()
        if benchmark.gpus > gpus:
            outcomes.append(f"{benchmark.name}: not run, it needs {benchmark.gpus} GPUs")
            continue
        failed = run(benchmark, options.into)
        outcomes.append(f"{benchmark.name}: {failed or 'done'}, {time.monotonic() - began:.0f} s")
        sections.append(section(benchmark, (options.into / f"{benchmark.name}.txt").read_text()))
        (options.into / "results.md").write_text("\n".join(sections))
    print("\n".join([*outcomes, f"figures and tables: {options.into}"]))
    raise SystemExit(any("ended with" in outcome or "no end" in outcome for outcome in outcomes))


if __name__ == "__main__":
    main()
