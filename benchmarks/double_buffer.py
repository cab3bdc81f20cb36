"""Publish and apply through the double buffer, against a plain warm copy and TorchRL's transport.

    make bench                 # or: python benchmarks/double_buffer.py --json FILE

Everything is measured in one run, in interleaved rounds, and reported as the median of each
round's ratio to that round's plain copies, because a machine's speed drifts. Digests are on.
Sender and receiver share a process here, so that nothing runs beside what is timed; the time from
commit to visible is taken between two processes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date

import torch
from common import SHAPES as COMMON
from common import Shape, parser, timed
from rich.console import Console
from rich.table import Table

import weightsync as ws
from weightsync.deadline import Deadline

SHARED = "/dev/shm"

SHAPES = [
    *COMMON,
    Shape("300 tensors, 0.33 GB", 300, 20_000 * (16 << 10) // 300 // 64 * 64),
]


def median(values: list[float]) -> float:
    return statistics.median(values)


def measure(shape: Shape, rounds: int, torchrl: bool) -> dict[str, list[float]]:
    """Seconds of each way, one entry for each round."""
    weights = shape.weights()
    target = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    sources, targets = list(weights.values()), list(target.values())
    flat_source, flat_target = torch.randn(shape.total // 4), torch.zeros(shape.total // 4)
    scheme = ws.DoubleBufferScheme(f"{SHARED}/weightsync-bench-{os.getpid()}")
    sender = scheme.create_sender(weights)
    sender.connect()
    receiver = scheme.create_receiver(target)
    receiver.connect()

    def plain() -> None:
        for into, tensor in zip(targets, sources, strict=True):
            into.copy_(tensor)

    ways: dict[str, Callable[[], object]] = {
        "plain copy": plain,
        "flat copy": lambda: flat_target.copy_(flat_source),
        "publish": lambda: sender.update_weights(),
        "apply": lambda: receiver.poll_and_apply(),
    }
    folder = tempfile.TemporaryDirectory(dir=SHARED, prefix="weightsync-bench-torchrl-")
    if torchrl:
        ways.update(torchrl_ways(weights, target, folder.name))
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    with folder, sender, receiver:
        for number in range(rounds + 2):
            for tensor in sources[:: max(1, shape.count // 100)]:
                tensor.add_(1)
            for way, function in ways.items():
                took = timed(function)
                if number >= 2:  # two rounds to warm up: both slots are written once
                    seconds[way].append(took)
        assert receiver.verify_weights().ok
    return seconds


def torchrl_ways(
    weights: dict[str, torch.Tensor], target: dict[str, torch.Tensor], folder: str
) -> dict[str, Callable[[], object]]:
    """TorchRL's VLLMDoubleBufferTransport: memmap, load_memmap, copy into the model.

    With one thread, its default, and with two, one for each core.
    """
    from torchrl.weight_update.llm.vllm_double_buffer import VLLMDoubleBufferTransport

    ways: dict[str, Callable[[], object]] = {}
    for threads in (1, 2):
        transport = VLLMDoubleBufferTransport(f"{folder}/{threads}", num_threads=threads)

        def send(transport: VLLMDoubleBufferTransport = transport) -> None:
            transport.send_weights("policy", weights)

        def receive(transport: VLLMDoubleBufferTransport = transport) -> None:
            for name, tensor in transport.receive_weights().items():
                target[name].copy_(tensor)

        ways[f"torchrl {threads} thr. publish"] = send
        ways[f"torchrl {threads} thr. apply"] = receive
    return ways


def watch(url: str, count: int, pipe: multiprocessing.connection.Connection) -> None:
    """In a process of its own: when did each version become visible?"""
    subscriber = ws.scheme_from_url(url).create_subscriber("watcher")
    subscriber.open(Deadline(60))
    pipe.send("ready")
    seen = None
    times = []
    for _ in range(count):
        seen = subscriber.wait(seen, Deadline(60))
        times.append(time.time())
    pipe.send(times)
    subscriber.close()


def commit_to_visible(count: int = 200) -> list[float]:
    """Seconds from the moment before the commit's rename until a waiting process has seen it."""
    scheme = ws.DoubleBufferScheme(f"{SHARED}/weightsync-bench-seen-{os.getpid()}")
    context = multiprocessing.get_context("spawn")
    mine, other = context.Pipe()
    weights = {"w": torch.zeros(1 << 20)}
    with scheme.create_sender(weights) as sender:
        sender.connect()
        process = context.Process(target=watch, args=(scheme.to_url(), count, other))
        process.start()
        assert mine.poll(60), "the watching process did not start"
        mine.recv()
        commits = []
        for _ in range(count):
            sender.update_weights()
            commits.append(scheme.inspect().time)
            time.sleep(0.01)
        assert mine.poll(60), "the watching process saw too few versions"
        times = mine.recv()
        process.join(10)
    return [seen - committed for seen, committed in zip(times, commits, strict=True)]


def main() -> None:
    options = parser(__doc__.splitlines()[0], rounds=9).parse_args()
    console = Console()
    try:
        import torchrl  # noqa: F401

        with_torchrl = True
    except ImportError:
        with_torchrl = False
    figures: dict[str, object] = {"date": str(date.today()), "cores": os.cpu_count()}
    table = Table(title=f"double buffer, digests on, {os.cpu_count()} cores, {date.today()}")
    for column in ("weights", "way", "ms", "GB/s", "of plain copy", "of flat copy"):
        table.add_column(column, justify="left" if column in ("weights", "way") else "right")
    by_shape = {}
    for shape in SHAPES:
        console.print(f"measuring {shape.title} ...")
        seconds = by_shape[shape.title] = measure(shape, options.rounds, with_torchrl)
        figures[shape.title] = seconds
        for way, took in seconds.items():
            ratios = [
                median([base / t for base, t in zip(seconds[copy], took, strict=True)])
                for copy in ("plain copy", "flat copy")
            ]
            table.add_row(
                shape.title,
                way,
                f"{median(took) * 1e3:.1f}",
                f"{shape.total / median(took) / 1e9:.1f}",
                *(f"{ratio:.2f}" for ratio in ratios),
            )
        table.add_section()
    console.print(table)
    many, few = by_shape[SHAPES[1].title], by_shape[SHAPES[2].title]
    for way in ("publish", "apply"):
        console.print(
            f"{way}: 20,000 tensors take {median(many[way]) / median(few[way]):.2f} times the "
            "time of the same bytes in 300"
        )
    for shape in SHAPES:
        seconds = by_shape[shape.title]
        ours = [p + a for p, a in zip(seconds["publish"], seconds["apply"], strict=True)]
        for threads in (1, 2) if with_torchrl else ():
            way = f"torchrl {threads} thr."
            theirs = zip(seconds[f"{way} publish"], seconds[f"{way} apply"], strict=True)
            ratio = median([(p + a) / mine for (p, a), mine in zip(theirs, ours, strict=True)])
            console.print(
                f"{shape.title}: publish + apply is {ratio:.1f} times as fast as TorchRL's "
                f"with {threads} threads"
            )
    visible = sorted(commit_to_visible())
    figures["commit to visible"] = visible
    console.print(
        f"commit to visible in another process: median {median(visible) * 1e3:.2f} ms, "
        f"99 % under {visible[int(len(visible) * 0.99)] * 1e3:.2f} ms"
    )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
