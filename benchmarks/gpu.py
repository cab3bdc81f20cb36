"""Updates of a vLLM engine on a GPU: our ways, vLLM's own, and those of others, on one card.

    python benchmarks/gpu.py --json gpu.json              # 1B, 7B and a MoE; about eight minutes
    python benchmarks/gpu.py --shapes 7b --soak 50        # every update compared with the reload
    python benchmarks/gpu.py --draw gpu.json docs/images/gpu.png

Needs an NVIDIA GPU and an environment with vLLM, torch for CUDA and this package. The trainer is a
process of its own with the weights on the same card, the engine an ``LLM`` with CUDA graphs in
another; weights are random. ``TRL's way`` and ``TorchRL's way`` are what those packages do, made
again in a few lines, so that the script needs neither.

Every path is checked by ``verify_weights`` or by reading weights back. Each shape and backend has
a process with a time limit; what fails is a row with its words; rows are written as they come.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import date
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

HERE = Path(__file__).parent

COLUMNS = ("publish", "apply", "written", "pause", "end to end")


def rows_of(lines: list[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in lines if line.startswith('{"shape"')]


def measure(options: argparse.Namespace) -> list[dict[str, object]]:
    """Run each shape and backend in a process of its own."""
    rows: list[dict[str, object]] = []
    ends = time.monotonic() + options.seconds
    for shape in options.shapes.split(","):
        for backend in options.backends.split(","):
            left = min(ends - time.monotonic(), options.limit)
            if left < 30:
                rows.append({"shape": shape, "path": backend, "error": "no time was left for it"})
                continue
            command = [sys.executable, str(HERE / "gpu_paths.py"), shape, backend]
            command += ["--rounds", str(options.rounds), "--soak", str(options.soak)]
            environment = {**os.environ, "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
            if find_spec("ray") is None:
                path = [os.environ.get("PYTHONPATH", ""), str(HERE / "stubs")]
                environment["PYTHONPATH"] = os.pathsep.join(path)
            words = ""
            with subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=sys.stderr,
                text=True,
                env=environment,
                start_new_session=True,
            ) as process:
                try:
                    out, _ = process.communicate(timeout=left)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, 9)
                    out, _ = process.communicate()
                    words = f"not done within {left:.0f} s"
            found = rows_of(out.splitlines())
            if process.returncode and not words:
                words = f"ended with {process.returncode}: {out[-300:]}"
            if words:
                found.append({"shape": shape, "path": backend, "error": words})
            rows += found
            for row in found:
                print(json.dumps(row), flush=True)
            if options.json:
                device = next((row["device"] for row in rows if "device" in row), "")
                about = {"date": str(date.today()), "device": device, "rows": rows}
                Path(options.json).write_text(json.dumps(about, indent=1))
    return rows


def median(values: object) -> float | None:
    return statistics.median(values) if isinstance(values, list) and values else None


def show(rows: list[dict[str, object]]) -> None:
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
        axis.set_xlim(0, max(times) * 1.25)
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
    parser.add_argument("--shapes", default="1b,7b,moe")
    parser.add_argument("--backends", default="weightsync,ipc")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--soak", type=int, default=0, help="updates, each verified")
    parser.add_argument("--seconds", type=float, default=1800.0, help="for all of it")
    parser.add_argument("--limit", type=float, default=300.0, help="for one shape and backend")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--draw", nargs=2, metavar=("JSON", "IMAGE"))
    options = parser.parse_args()
    if options.draw:
        draw(*options.draw)
    else:
        show(measure(options))


if __name__ == "__main__":
    main()
