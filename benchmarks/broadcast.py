"""Updates through NCCLScheme on gloo, against torch's own broadcast between the same processes.

    make bench-broadcast       # or: python benchmarks/broadcast.py --receivers 2 --json FILE

A broadcast's time ends when every receiver has all of it; an update's, when every receiver has said
so, and has compared it with its digests unless they are off. Applying comes after that.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from common import SHAPES, Group, Shape, in_turns, parser, report, timed

import weightsync as ws

PATIENCE = 120  # seconds
COPY = "copy_, one thread"


def join(store: str, rank: int, size: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)


def torch_ways(weights: dict[str, torch.Tensor], nbytes: int) -> dict[str, Callable[[], object]]:
    """What all ranks do at the same time: one flat tensor, or each tensor by itself."""
    flat = torch.ones(nbytes, dtype=torch.uint8)

    def each() -> None:
        for work in [dist.broadcast(tensor, 0, async_op=True) for tensor in weights.values()]:
            work.wait()

    return {
        "torch, one flat tensor": lambda: dist.broadcast(flat, 0),
        "torch, tensor by tensor": each,
    }


def receive(url: str, shape: Shape, store: str, rank: int, size: int, pipe: Connection) -> None:
    """A receiver's process: does what it is told; says when it was done, and how long it took."""
    torch.set_num_threads(1)
    join(store, rank, size)
    target, other = shape.weights(torch.zeros), shape.weights(torch.ones)
    receiver = ws.scheme_from_url(url).create_receiver(target)
    receiver.connect(PATIENCE)

    def copy() -> None:
        for name, tensor in target.items():
            other[name].copy_(tensor)

    ways = torch_ways(other, shape.total)
    ways |= {COPY: copy, "apply": lambda: receiver.poll_and_apply(PATIENCE)}
    pipe.send("ready")
    while (order := pipe.recv()) != "end":
        pipe.send("here")
        took = timed(ways[order])
        pipe.send((time.monotonic(), took))
    assert receiver.verify_weights().ok
    receiver.shutdown()
    dist.destroy_process_group()


def answers(pipes: list[Connection]) -> list[Any]:
    assert all(pipe.poll(PATIENCE) for pipe in pipes), "a receiver does not answer"
    return [pipe.recv() for pipe in pipes]


def measure(shape: Shape, receivers: int, verify: bool, rounds: int) -> list[Group]:
    weights = shape.weights()
    scheme = ws.NCCLScheme(backend="gloo", num_replicas=receivers, verify=verify)
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    with tempfile.TemporaryDirectory() as folder, scheme.create_sender(weights) as sender:
        sender.connect()
        for rank in range(1, receivers + 1):
            mine, other = context.Pipe()
            arguments = (scheme.to_url(), shape, f"{folder}/store", rank, receivers + 1, other)
            processes.append(context.Process(target=receive, args=arguments, daemon=True))
            processes[-1].start()
            pipes.append(mine)
        join(f"{folder}/store", 0, receivers + 1)
        answers(pipes)

        def tell(order: str) -> None:
            for pipe in pipes:
                pipe.send(order)

        def together(way: str, function: Callable[[], object]) -> float:
            tell(way)
            answers(pipes)
            began = time.monotonic()
            function()
            return max(time.monotonic(), *(end for end, _ in answers(pipes))) - began

        def update() -> float:
            next(iter(weights.values())).add_(1)
            return timed(sender.update_weights)

        def there(way: str) -> float:
            tell(way)
            answers(pipes)
            return max(took for _, took in answers(pipes))

        transfer: dict[str, Callable[[], float]] = {
            way: lambda way=way, function=function: together(way, function)  # type: ignore[misc]
            for way, function in torch_ways(weights, shape.total).items()
        }
        transfer["update_weights"] = update
        apply = {way: lambda way=way: there(way) for way in (COPY, "apply")}  # type: ignore[misc]
        transferred, applied = in_turns([transfer, apply], rounds)
        tell("end")
        for process in processes:
            process.join(PATIENCE)
            assert process.exitcode == 0, "a receiver's process failed"
        dist.destroy_process_group()
    title = f"{shape.title}, {receivers} receiver{'s' * (receivers > 1)}"
    digests = "digests on" if verify else "digests off"
    return [
        Group(f"{title}, {digests}", shape.total, "update_weights", transferred),
        Group(title, shape.total, "apply", applied),
    ]


def main() -> None:
    arguments = parser(__doc__.splitlines()[0], rounds=9)
    arguments.add_argument("--receivers", type=int, choices=(1, 2), default=1)
    options = arguments.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # where the scheme's own groups are, too
    groups = []
    for shape in SHAPES:
        for verify in (True, False):
            print(f"measuring {shape.title}, verify={verify} ...", flush=True)
            groups += measure(shape, options.receivers, verify, options.rounds)
    report("NCCLScheme on gloo", groups, options.json)


if __name__ == "__main__":
    main()
