"""Updates of a vLLM engine on a GPU: our ways, vLLM's own, and those of others, on one card.

    python benchmarks/gpu.py --json gpu.json              # 1B, 7B and a MoE; about eight minutes
    python benchmarks/gpu.py --shapes 7b --soak 50        # every update compared with the reload
    python benchmarks/gpu.py --show gpu.json              # its table again
    python benchmarks/gpu.py --draw gpu.json docs/images/gpu.png

Needs an NVIDIA GPU and an environment with vLLM, torch for CUDA and this package. The trainer is a
process of its own with the weights on the same card, the engine an ``LLM`` with CUDA graphs in
another; weights are random. ``TRL's way`` and ``TorchRL's way`` are what those packages do, made
again in a few lines, so that the script needs neither.

Ours and vLLM's ipc engine are checked by ``verify_weights`` or by sums of what has arrived. Each
shape has a process with a time limit; what fails is a row with its words; rows are written as they
come.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

HERE = Path(__file__).parent

Row = dict[str, Any]

PLAN, STAGED, IPC = "double buffer, plan", "double buffer, staged", "CUDA IPC, plan"

COLUMNS = ("publish", "apply", "written", "pause", "end to end")


@dataclass(frozen=True)
class Rows:
    """What was measured, in a file as well, if one is named: also of a run that is cut off."""

    file: str | None
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        if self.file:
            device = next((row["device"] for row in self.rows if "device" in row), "")
            about = {"date": str(date.today()), "device": device, "rows": self.rows}
            Path(self.file).write_text(json.dumps(about, indent=1))


def measure(options: argparse.Namespace) -> list[Row]:
    """Run each shape in a process of its own."""
    rows = Rows(options.json)
    ends = time.monotonic() + options.seconds
    for shape in options.shapes.split(","):
        left = min(ends - time.monotonic(), options.limit)
        words = "no time was left for it"
        if left >= 30:
            arguments = [shape, "--rounds", str(options.rounds)]
            words = run([*arguments, "--soak", str(options.soak)], left, rows)
        if words:
            rows.add({"shape": shape, "path": "the rest", "error": words})
    return rows.rows


def run(arguments: list[str], limit: float, rows: Rows, script: str = "gpu_paths.py") -> str:
    """Have a script's rows taken as they come, and end what it started when it is over.

    Returns:
        Why it did not end as it should, or nothing.
    """
    environment = {**os.environ, "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    if find_spec("ray") is None:
        path = [os.environ.get("PYTHONPATH", ""), str(HERE / "stubs")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    other: deque[str] = deque(maxlen=20)
    late = threading.Event()
    with subprocess.Popen(
        [sys.executable, str(HERE / script), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:

        def stop() -> None:
            late.set()
            os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(limit, stop)
        timer.start()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through what ends the process
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith('{"shape"'):
                    rows.add(json.loads(line))
                else:
                    other.append(line)
            process.wait()
        finally:
            timer.cancel()
            with suppress(ProcessLookupError):  # what it started ends with it
                os.killpg(process.pid, signal.SIGKILL)
    if late.is_set():
        return f"not done within {limit:.0f} s"
    return f"ended with {process.returncode}: {''.join(other)[-300:]}" if process.returncode else ""


def median(values: object) -> float | None:
    return statistics.median(values) if isinstance(values, list) and values else None


def show(rows: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"milliseconds, medians of a run, {date.today()}")
    table.add_column("shape")
    table.add_column("path")
    for column in (*COLUMNS, "GB/s", "of limit", "GPU GB", "host GB"):
        table.add_column(column, justify="right")
    for row in rows:
        if "error" in row:
            table.add_row(str(row["shape"]), str(row["path"]), str(row["error"])[:60])
            continue
        if "soak" in row:
            table.add_row(str(row["shape"]), str(row["path"]), str(row["soak"]))
            continue
        cells = [median(row.get(column)) for column in COLUMNS]
        best = cells[4] or cells[1] or cells[0]
        nbytes, limit = row["nbytes"], row.get("limit")
        assert isinstance(nbytes, (int, float))
        speed = "" if not best else f"{nbytes / best / 1e6:.1f}"
        share = f"{limit / best:.2f}" if isinstance(limit, float) and best else ""
        memory = [f"{row[k]:.1f}" if k in row else "" for k in ("gpu", "host")]
        shown = ["" if cell is None else f"{cell:.1f}" for cell in cells]
        table.add_row(str(row["shape"]), str(row["path"]), *shown, speed, share, *memory)
    Console(width=140).print(table)


def judge(rows: list[Row]) -> Iterator[str]:
    """What is wanted of the fast path, and whether it was reached, a line each."""
    for shape in dict.fromkeys(row["shape"] for row in rows):
        of = {row["path"]: row for row in rows if row["shape"] == shape and "error" not in row}

        def time(path: str, column: str, of: dict[str, Row] = of) -> float | None:
            return median(of.get(path, {}).get(column))

        host, device, flat = (
            time(f"limit: one copy {way}", "apply") for way in ("to host", "to device", "on device")
        )
        bus = max(host, device) if host and device else None
        times = 2.0 if shape == "moe" else 1.25
        theirs = [time(f"vLLM's ipc engine{way}", "end to end") for way in ("", ", packed")]
        pause = None if flat is None else times * flat + 5
        for what, value, to, low, high in (
            ("trainer to slot, of the bus", host, time(PLAN, "publish"), 0.95, None),
            ("slot to engine, of the bus", device, time(PLAN, "written"), 0.95, None),
            (
                "end to end, staged, of a copy over the bus",
                time(STAGED, "end to end"),
                bus,
                0,
                1.25,
            ),
            ("apply by plan, of a flat copy", time(IPC, "written"), flat, 0, times),
            ("pause, staged, of what it may be", time(STAGED, "pause"), pause, 0, 1.0),
            (
                "CUDA IPC, times as fast as vLLM's ipc",
                min(filter(None, theirs), default=None),
                time(IPC, "end to end"),
                10.0,
                None,
            ),
        ):
            yield verdict(f"{shape}: {what}", value / to if value and to else None, low, high)


def verdict(what: str, ratio: float | None, low: float, high: float | None = None) -> str:
    """Whether a ratio is what is wanted of it; None was not measured."""
    if ratio is None:
        return f"{what}: not measured"
    wanted = f"at least {low}" if high is None else f"at most {high}"
    reached = ratio >= low and (high is None or ratio <= high)
    return f"{what}: {ratio:.2f} ({wanted}: {'yes' if reached else 'NO'})"


def draw(source: str, target: str) -> None:
    """Bars of the time from the trainer's call until the engine goes on, by path and shape."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    content = json.loads(Path(source).read_text())
    rows = [row for row in content["rows"] if row.get("end to end")]
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    figure, axes = pyplot.subplots(1, len(shapes), figsize=(4.6 * len(shapes), 4.2), squeeze=False)
    for axis, shape in zip(axes[0], shapes, strict=True):
        mine = sorted(
            (row for row in rows if row["shape"] == shape),
            key=lambda row: -median(row["end to end"]),
        )
        names = [row["path"] for row in mine]
        times = [median(row["end to end"]) for row in mine]
        ours = ["#1f77b4" if row.get("ours") else "#b0b0b0" for row in mine]
        bars = axis.barh(names, times, color=ours)
        axis.bar_label(bars, [f"{value:.0f} ms" for value in times], padding=3, fontsize=8)
        axis.set_title(f"{shape}, {mine[0]['nbytes'] / 1e9:.1f} GB", fontsize=10)
        axis.set_xscale("log")  # the slowest takes hundreds of times as long as the fastest
        axis.set_xlim(min(times) / 2, max(times) * 12)
        axis.tick_params(labelsize=8)
        axis.set_xlabel("end to end, ms", fontsize=8)
    figure.suptitle(
        f"One update, {content.get('device', 'one GPU')}, {content['date']}", fontsize=11
    )
    figure.tight_layout()
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shapes", default="1b,7b,moe", help="of: tiny, 1b, 7b, moe (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="updates measured for each path (%(default)s)"
    )
    parser.add_argument(
        "--soak", type=int, default=0, metavar="N", help="N more updates, each verified"
    )
    parser.add_argument(
        "--seconds", type=float, default=1800.0, help="for all of it (%(default).0f)"
    )
    parser.add_argument(
        "--limit", type=float, default=300.0, help="seconds for one shape (%(default).0f)"
    )
    parser.add_argument("--json", metavar="FILE", help="keep what is measured, as it comes")
    parser.add_argument("--show", metavar="JSON", help="the table of a run before")
    parser.add_argument("--draw", nargs=2, metavar=("JSON", "IMAGE"), help="a plot of a run before")
    options = parser.parse_args()
    if options.draw:
        draw(*options.draw)
        return
    if options.show:
        rows = json.loads(Path(options.show).read_text())["rows"]
    else:
        if why := unable("vllm"):
            parser.exit(2, f"gpu.py: {why}\n")
        rows = measure(options)
    show(rows)
    print(*judge(rows), sep="\n")
    if any("error" in row for row in rows):
        sys.exit(1)  # some paths were not measured; their rows say why


def unable(*needed: str) -> str:
    """Why nothing can be measured here, or nothing.

    Args:
        needed: packages besides torch.
    """
    missing = [name for name in ("torch", "rich", *needed) if find_spec(name) is None]
    if missing:
        return f"needs {' and '.join(missing)} in this environment"
    import torch

    if not torch.cuda.is_available():
        return "needs an NVIDIA GPU and a torch that was built for CUDA; torch sees no such device"
    return ""


if __name__ == "__main__":
    main()
