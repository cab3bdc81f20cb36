"""What getting weights out of a trainer costs: plain modules, LoRA, and trainers of two ranks.

    make bench-sources         # or: python benchmarks/sources.py --json FILE
    python benchmarks/sources.py --gpus   # two ranks on two GPUs, NCCL, bfloat16

Ways that are compared run in the same rounds. Extra memory is the peak of the process's anonymous
memory during an update, less what it had before: the buffers in shared memory, which are declared,
are not in it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import nn

import weightsync as ws
from weightsync.source import as_source
from weightsync.together import BUCKET

SHARED = "/dev/shm"
MB = 1 << 20


class Stack(nn.Module):
    """``count`` square layers."""

    def __init__(self, count: int, width: int, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(width, width, bias=False, **options) for _ in range(count)
        )


@dataclass
class Results:
    rows: list[tuple[str, str, str]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def add(self, what: str, way: str, text: str, **figures: Any) -> None:
        self.rows.append((what, way, text))
        self.figures[f"{what}: {way}"] = figures


def median(values: list[float]) -> float:
    return statistics.median(values)


def timed(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


@contextmanager
def run_path() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir=SHARED, prefix="weightsync-bench-") as parent:
        yield f"{parent}/run"


# -------------------------------------------------------------------- one process


def plain_module(results: Results, rounds: int, count: int, width: int) -> None:
    """The walk through the module, beside the publish that it is part of."""
    model = Stack(count, width)
    extract, total = [], []
    with run_path() as path:
        sender = ws.DoubleBufferScheme(path).create_sender(model)
        sender.connect()
        for number in range(rounds + 2):
            report = sender.update_weights(version=number)
            extract.append(report.seconds.extract)
            total.append(report.seconds.total)
        sender.shutdown()
    share = median([e / (t - e) for e, t in zip(extract[2:], total[2:], strict=True)])
    shape = f"{count} tensors, {count * width * width * 4 / 1e9:.2f} GB"
    results.add(
        f"plain module, {shape}",
        "publish",
        f"{median(total[2:]) * 1e3:.1f} ms, of which the walk adds {share:.1%}",
        extract=median(extract[2:]),
        total=median(total[2:]),
        share=share,
    )


def lora(results: Results, rounds: int, count: int, width: int) -> None:
    """Merging in the stream, beside merge_adapter, the same publish, and unmerge_adapter."""
    from peft import LoraConfig, get_peft_model

    base = Stack(count, width)
    base.config = {"model_type": "custom"}
    base.prepare_inputs_for_generation = None
    config = LoraConfig(r=16, target_modules=r"layers\.\d+", init_lora_weights=False)
    model = get_peft_model(base, config)
    ours: list[tuple[float, float, float]] = []
    theirs: list[tuple[float, float, float]] = []
    with run_path() as path:
        sender = ws.DoubleBufferScheme(path).create_sender(model)
        sender.connect()
        for number in range(rounds + 1):
            report = sender.update_weights(version=2 * number)
            ours.append((report.seconds.total, report.seconds.extract, report.seconds.transfer))
            merge = timed(model.merge_adapter)
            copy = sender.update_weights(version=2 * number + 1).seconds.total
            theirs.append((merge, copy, timed(model.unmerge_adapter)))
        sender.shutdown()
    ours, theirs = ours[1:], theirs[1:]
    shape = f"{count} layers, {count * width * width * 4 / 1e9:.2f} GB"
    total, extract, transfer = (median(list(column)) for column in zip(*ours, strict=True))
    results.add(
        f"LoRA of rank 16 on {shape}",
        "merged into the stream",
        f"{total * 1e3:.0f} ms = extract {extract * 1e3:.0f} + transfer {transfer * 1e3:.0f}",
        total=total,
        extract=extract,
        transfer=transfer,
    )
    merge, copy, unmerge = (median(list(column)) for column in zip(*theirs, strict=True))
    ratio = median([sum(t) / o[0] for o, t in zip(ours, theirs, strict=True)])
    results.add(
        f"LoRA of rank 16 on {shape}",
        "merge_adapter, publish, unmerge_adapter",
        f"{(merge + copy + unmerge) * 1e3:.0f} ms = {merge * 1e3:.0f} + {copy * 1e3:.0f} + "
        f"{unmerge * 1e3:.0f}; {ratio:.2f} times as long",
        merge=merge,
        copy=copy,
        unmerge=unmerge,
        ratio=ratio,
    )


# -------------------------------------------------------------------- two ranks


class Peak:
    """The most anonymous memory of this process while the block runs, above what it had."""

    def __enter__(self) -> Peak:
        self._over = threading.Event()
        self._begin = self.extra = _anonymous()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.001):
            self.extra = max(self.extra, _anonymous())

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self._thread.join()
        self.extra = max(self.extra, _anonymous()) - self._begin


def _anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise OSError("this kernel does not say RssAnon")


def rank_of_two(
    rank: int, store: str, path: str, rounds: int, count: int, width: int, gpus: bool, answers: Any
) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    if gpus:
        torch.cuda.set_device(rank)
        options = {"device": torch.device("cuda", rank), "dtype": torch.bfloat16}
    else:
        torch.set_num_threads(1)
        options = {}
    backend = "nccl" if gpus else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2)
    model = Stack(count, width, **options)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    for gather in (True, False):
        sender = ws.DoubleBufferScheme(path).create_sender(model, gather=gather)
        sender.connect(timeout=120)
        seconds, peaks = [], []
        for number in range(rounds + 1):
            dist.barrier()
            if gpus:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            with Peak() as peak:
                report = sender.update_weights(version=number)
            seconds.append(report.seconds.total)
            on_gpu = torch.cuda.max_memory_allocated() - before if gpus else 0
            peaks.append(max(peak.extra, on_gpu))
        written = sum(p.tensor.nbytes for _, p in as_source(model).inventory().pieces())
        answers.put((rank, gather, seconds[1:], max(peaks), written, report.nbytes))
        dist.barrier()
        sender.shutdown()
    dist.destroy_process_group()


def two_ranks(results: Results, rounds: int, count: int, width: int, gpus: bool = False) -> None:
    """FSDP2: gathered bucket by bucket, and each rank its own rows."""
    largest = width * width * (2 if gpus else 4)
    answers = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as store, run_path() as path:
        arguments = (f"{store}/store", path, rounds, count, width, gpus, answers)
        mp.spawn(rank_of_two, arguments, nprocs=2)
        found = {}
        for _ in range(4):
            rank, gather, *figures = answers.get()
            found[rank, gather] = figures
        # Memory once more, with an allocator that gives back at once what is let go: what glibc
        # keeps for later, in a heap of each thread, says nothing of how much is held.
        os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
        again = (f"{store}/again", path, 1, count, width, gpus, answers)
        mp.spawn(rank_of_two, again, nprocs=2)
        del os.environ["MALLOC_MMAP_THRESHOLD_"]
        for _ in range(4):
            rank, gather, _, peak, *_ = answers.get()
            found[rank, gather][1] = peak
    shape = f"{count} tensors, {count * largest / 1e9:.2f} GB"
    for gather, way in ((True, "gathered"), (False, "each its own rows")):
        seconds, peak, _, nbytes = found[0, gather]
        if gather:
            limit = BUCKET + largest
            text = f"limit: one bucket and one tensor, {limit / MB:.0f} MiB"
        else:
            share = [found[rank, gather][2] / nbytes for rank in (0, 1)]
            text = f"the ranks write {share[0]:.3f} and {share[1]:.3f} of the bytes"
        results.add(
            f"FSDP2, two ranks, {shape}",
            way,
            f"{median(seconds) * 1e3:.0f} ms, {nbytes / median(seconds) / 1e9:.1f} GB/s; "
            f"extra memory at most {peak / MB:.1f} MiB ({text})",
            seconds=median(seconds),
            peak=peak,
            written=[found[rank, gather][2] for rank in (0, 1)],
            nbytes=nbytes,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--small", action="store_true", help="a tenth of the bytes")
    parser.add_argument("--gpus", action="store_true", help="only two ranks, on two GPUs")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    count, width = (300, 1024) if not options.small else (30, 1024)
    results = Results()
    if options.gpus:
        two_ranks(results, options.rounds, 120, 4096, gpus=True)
    else:
        plain_module(results, options.rounds, count, width)
        lora(results, options.rounds, count, width)
        two_ranks(results, options.rounds, count * 5 // 6, width)
    table = Table("trainer", "way", "median")
    for row in results.rows:
        table.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table)
    console.print(
        f"{date.today()}, {len(os.sched_getaffinity(0))} cores, torch {torch.__version__}, "
        f"{options.rounds} rounds"
    )
    if options.json:
        options.json.write_text(json.dumps(results.figures, indent=2))


if __name__ == "__main__":
    main()
