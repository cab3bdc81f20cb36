"""``multi_gpu.py``: an FSDP2 trainer, a rank on each GPU, into the double buffer.

Each rank its own rows, against gathered; beside what one GPU alone publishes, and what its link to
the host carries.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import Any

import torch
import torch.distributed as dist
from gpu_paths import fastest
from multi_part import (
    PATIENCE,
    Part,
    Sizes,
    ask_all,
    become,
    catch_up,
    disconnect,
    hold,
    in_milliseconds,
    nbytes_of,
    publish,
    settle,
    total,
    total_of,
)
from torch import nn

import weightsync as ws
from weightsync.testing.processes import Peer, PeerError

SHARDED, GATHERED, ALONE = "FSDP2, each rank its rows", "FSDP2, gathered", "one GPU alone"

LINK = "limit: one GPU's link to the host"

PIECE = 1 << 30
"""Bytes of a copy over the link."""


# -------------------------------------------------------------------- in another process


def join(state: Any, backend: str, store: str, rank: int, size: int) -> None:
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)


def shard(state: Any) -> None:
    """Turn the weights into an FSDP2 module, a layer at a time."""
    from torch.distributed.fsdp import fully_shard

    model = nn.Module()
    for name, tensor in state.weights.items():
        *path, last = name.split(".")
        at = model
        for step in path:
            if not hasattr(at, step):
                at.add_module(step, nn.Module())
            at = getattr(at, step)
        at.register_parameter(last, nn.Parameter(tensor))
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer)
    fully_shard(model)
    state.model = model
    state.weights = {name: each.to_local() for name, each in model.named_parameters()}


def connect_module(state: Any, path: str, gather: bool) -> None:
    state.sender = ws.DoubleBufferScheme(path).create_sender(state.model, gather=gather)
    state.sender.connect(timeout=PATIENCE)


def connect_alone(state: Any, path: str) -> None:
    state.sender = ws.DoubleBufferScheme(path).create_sender(state.weights)
    state.sender.connect(timeout=PATIENCE)


def change_own(state: Any) -> None:
    with torch.no_grad():
        for tensor in state.weights.values():
            tensor.mul_(-1.0078125)
    settle(state)
    if dist.is_initialized():
        dist.barrier()
        settle(state)


def to_host(state: Any) -> float:
    """Bytes a second from here into page-locked memory."""
    there = torch.empty(PIECE, dtype=torch.uint8, device="cuda")
    out = torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)
    return PIECE / fastest(lambda: out.copy_(there, non_blocking=True))


# -------------------------------------------------------------------- what is measured


def links(part: Part, ranks: list[Peer]) -> None:
    """What one link carries, and what all carry at the same time."""
    nbytes = nbytes_of(part.sizes())
    alone = ranks[0].call(to_host, within=PATIENCE)
    together = sum(ask_all(ranks, to_host))
    for path, speed in ((LINK, alone), ("limit: all links at once", together)):
        part.say(path, nbytes=nbytes, publish=[nbytes / speed * 1e3])


def publishes(part: Part, path: str, ranks: list[Peer], run: str, connect: Any, *more: Any) -> None:
    """All ranks make the same calls; what a reader gets at the end is what they hold."""
    sizes = part.sizes()
    took = []
    try:
        ask_all(ranks, connect, run, *more)
        for number in range(1, part.rounds + 4):
            ask_all(ranks, change_own)
            spans = ask_all(ranks, publish, number, within=2 * PATIENCE)
            if number > 3:  # both slots are there, and page-locked
                took.append(max(end for _, end in spans) - min(begin for begin, _ in spans))
        right = received(sizes, run) == sum(ask_all(ranks, total))
        assert right, "what a reader gets is something else than what the ranks hold"
    finally:
        catch_up(ranks)
        with suppress(PeerError):
            ask_all(ranks, disconnect, within=30)
    part.say(
        path, nbytes=nbytes_of(sizes), ours=True, ranks=len(ranks), publish=in_milliseconds(took)
    )


def received(sizes: Sizes, run: str) -> int:
    """The sum of what a receiver takes, digests compared."""
    weights = {name: torch.zeros(size, dtype=torch.bfloat16) for name, size in sizes}
    with ws.DoubleBufferScheme(run).create_receiver(weights) as receiver:
        receiver.connect(PATIENCE)
        assert receiver.poll_and_apply(PATIENCE) is not None, "no version came"
    return total_of(weights)


def main() -> None:
    part = Part.of_arguments()
    with part.trying("the rest of fsdp"), ExitStack() as stack:
        ranks = []
        for index in range(part.gpus):
            ranks.append(Peer())
            stack.callback(ranks[-1].dispose)
            ranks[-1].call(become, {}, part.device, index, within=PATIENCE)
        if part.device == "cuda":
            with part.trying(LINK):
                links(part, ranks)
        ask_all(ranks, hold, part.sizes())
        with part.trying(ALONE):
            publishes(part, ALONE, ranks[:1], f"{part.folder}/alone", connect_alone)
        ask_all(ranks, hold, part.sizes())  # equal again
        for rank, peer in enumerate(ranks):
            peer.start(join, part.backend, f"{part.folder}/store", rank, len(ranks))
        for peer in ranks:
            peer.result(PATIENCE)
        ask_all(ranks, shard)
        for path, gather in ((SHARDED, False), (GATHERED, True)):
            with part.trying(path):
                run = f"{part.folder}/{'gathered' if gather else 'sharded'}"
                publishes(part, path, ranks, run, connect_module, gather)


if __name__ == "__main__":
    main()
