"""Broadcasts, engines and sharded trainers over several real GPUs, in one run.

    python benchmarks/multi_gpu.py --json multi.json          # all GPUs; about six minutes
    python benchmarks/multi_gpu.py --gpus 2 --parts engine --shape 7b
    python benchmarks/multi_gpu.py --show multi.json          # its table and verdicts again
    python benchmarks/multi_gpu.py --device cpu --shape tiny  # a try: gloo, engines on the CPU

Needs NVIDIA GPUs of one host and an environment as for ``gpu.py``. What is compared is measured in
the same run. Each part is a script with processes of its own and a time limit; what fails is a row
with its words; rows are written as they come. With fewer GPUs than a comparison needs, it is said
what was not measured.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import gpu
from gpu import Row, Rows, median, verdict

SHAPES = {"broadcast": "7b", "fsdp": "7b", "engine": "1b"}
"""The parts, in this order, and what each is measured with. The longest comes last."""

THEIRS = "vLLM's nccl engine, packed"

LIMITS = {"broadcast": 180.0, "fsdp": 120.0, "engine": 300.0}
"""Seconds."""

LEAST = 20.0
"""Seconds that are worth a start."""


def measure(options: argparse.Namespace) -> list[Row]:
    """Run each part in processes of its own."""
    rows = Rows(options.json)
    rows.add({"shape": "any", "path": "the machine", "device": options.machine})
    ends = time.monotonic() + options.seconds
    for part in options.parts.split(","):
        shape = options.shape or SHAPES[part]
        left = min(ends - time.monotonic(), options.limit or LIMITS[part])
        words = "no time was left for it"
        if left >= LEAST:
            words = run(part, shape, left, rows, options)
        if words:
            rows.add({"shape": shape, "path": f"the rest of {part}", "error": words})
    return rows.rows


def run(part: str, shape: str, left: float, rows: Rows, options: argparse.Namespace) -> str:
    folder = tempfile.mkdtemp(dir="/dev/shm", prefix="weightsync-bench-")
    arguments = [shape, "--gpus", str(options.gpus), "--rounds", str(options.rounds)]
    arguments += ["--device", options.device, "--folder", folder]
    try:
        return gpu.run(arguments, left, rows, f"multi_{part}.py")
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # a part that was killed leaves its slots


# -------------------------------------------------------------------- what came of it


def judge(rows: list[Row], parts: list[str]) -> Iterator[str]:
    """What is wanted, and whether it was reached, a line each."""
    good = {row["path"]: row for row in rows if "error" not in row}
    judges = {"broadcast": judge_broadcast, "engine": judge_engine, "fsdp": judge_fsdp}
    for part in parts:
        yield from judges[part](good)


def judge_broadcast(good: dict[str, Row]) -> Iterator[str]:
    measured = [row for row in good.values() if "of_flat" in row and not row.get("bucket_mb")]
    for digests in (True, False):
        title = f"broadcast: digests {'on' if digests else 'off'}"
        mine = {row["receivers"]: row for row in measured if row["digests"] is digests}
        for count in (1, 3, 7):
            ratio = mine[count]["of_flat"] if count in mine else None
            what = f"{title}, {count} receiver{'s' * (count > 1)}, of one flat broadcast"
            yield verdict(what, ratio, 0.85)
        few, many = min(mine, default=0), max(mine, default=0)
        slower = None if few == many else _times(mine[many], mine[few], "publish")
        yield verdict(f"{title}: {many} receivers' time, of one's", slower, 0, 1.25)
    lost = good.get("a receiver killed in mid-transfer", {}).get("lost")
    if lost is None:
        yield "broadcast: a receiver killed in mid-transfer: not measured"
        return
    late = lost["seconds"] / (2 * lost["silence"])
    yield verdict("broadcast: killed: the update's time, of twice the silence", late, 0, 1.0)
    yield _true("broadcast: killed: the error names it", lost["named"])
    yield _true("broadcast: killed: the other has the version", lost["survivor"])
    yield _true("broadcast: killed: back in the next version, right", lost["works"])


def judge_engine(good: dict[str, Row]) -> Iterator[str]:
    ours = {path: row for path, row in good.items() if "tokens" in row}
    if not ours:
        yield "engine: tokens as of an engine that loaded the same weights: not measured"
    for path, row in ours.items():
        yield _true(f"{path}: tokens as of an engine that loaded the same weights", row["tokens"])
    for path, row in ours.items():
        if row["workers"] > 1 and "double buffer" in path:
            share = max(row["read"]) * 1e9 / row["nbytes"] if row["read"] else None
            yield verdict(f"{path}: a rank reads of the bytes", share, 0, 1.1 / row["workers"])
    for title in ("TP=1", "TP=2", "replicas"):
        theirs = good.get(f"{title}, {THEIRS}", {})
        compared = [path for path in ours if path.startswith(f"{title}, ") and THEIRS not in path]
        if not theirs.get("apart") or not compared:
            yield f"{title}: against vLLM's nccl engine, beside the trainer's GPU: not measured"
            continue
        for path in compared:
            for column in ("end to end", "pause"):
                what = f"{path}: {column}, times as fast as vLLM's nccl engine"
                yield verdict(what, _times(theirs, ours[path], column), 1.0)


def judge_fsdp(good: dict[str, Row]) -> Iterator[str]:
    sharded, gathered = good.get("FSDP2, each rank its rows"), good.get("FSDP2, gathered")
    link, alone = good.get("limit: one GPU's link to the host"), good.get("one GPU alone")
    yield verdict(
        "fsdp: sharded, times as fast as gathered", _times(gathered, sharded, "publish"), 1.0
    )
    yield verdict("fsdp: sharded, of one GPU's link", _times(link, sharded, "publish"), 1.0)
    yield verdict(
        "fsdp: sharded, times as fast as one GPU alone", _times(alone, sharded, "publish"), 1.0
    )


def _times(other: Row | None, row: Row | None, column: str) -> float | None:
    """How many times as fast a row is."""
    theirs, its = median((other or {}).get(column)), median((row or {}).get(column))
    return theirs / its if theirs and its else None


def _true(what: str, right: bool) -> str:
    return f"{what}: {'yes' if right else 'NO'}"


# -------------------------------------------------------------------- the command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--parts", default=",".join(SHAPES), help="of: broadcast, engine, fsdp (all)"
    )
    parser.add_argument("--gpus", type=int, help="how many, 1 to 8 (all)")
    parser.add_argument(
        "--shape", choices=("tiny", "1b", "7b"), help="of all parts (7b; engine 1b)"
    )
    parser.add_argument("--rounds", type=int, default=4, help="measured for each way (%(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=900.0, help="for all of it (%(default).0f)"
    )
    parser.add_argument(
        "--limit",
        type=float,
        help=f"seconds for each part ({', '.join(map(str, LIMITS.values()))})",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", metavar="FILE", help="keep what is measured, as it comes")
    parser.add_argument("--show", metavar="JSON", help="table and verdicts of a run before")
    options = parser.parse_args()
    if unknown := set(options.parts.split(",")) - set(SHAPES):
        parser.error(f"--parts: {', '.join(sorted(unknown))}: no such part")
    if options.show:
        rows = json.loads(Path(options.show).read_text())["rows"]
    else:
        if why := prepare(options):
            parser.exit(2, f"multi_gpu.py: {why}\n")
        rows = measure(options)
    show(rows)
    print(*judge(rows, options.parts.split(",")), sep="\n")
    if any("error" in row for row in rows):
        sys.exit(1)  # some ways were not measured; their rows say why


def prepare(options: argparse.Namespace) -> str:
    """Settle how many GPUs there are to be used.

    Returns:
        Why nothing can be measured here, or nothing.
    """
    if options.device == "cpu":
        options.gpus, options.machine = options.gpus or 2, "CPU, gloo"
        return ""
    if why := gpu.unable(*(["vllm"] if "engine" in options.parts.split(",") else [])):
        return why
    import torch

    there = torch.cuda.device_count()
    options.gpus = options.gpus or min(there, 8)
    if not 1 <= options.gpus <= there:
        return f"--gpus {options.gpus}: there are {there}"
    options.machine = f"{options.gpus} x {torch.cuda.get_device_name()}"
    return ""


def show(rows: list[Row]) -> None:
    """The table of what has times; the rest in words."""
    gpu.show([row for row in rows if "error" in row or "nbytes" in row])
    for row in rows:
        if "lost" in row:
            told = {key: value for key, value in row["lost"].items() if key != "next"}
            print(f"{row['path']}: {told}")


if __name__ == "__main__":
    main()
