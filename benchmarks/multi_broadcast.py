"""``multi_gpu.py``: updates through NCCLScheme against torch's broadcast; one that is killed.

The trainer is on the first GPU, each receiver (a mapping) on one of its own. Where there are too
few, a receiver shares one: it says then that it is another host, and NCCL goes through sockets.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack, suppress
from typing import Any

import torch
import torch.distributed as dist
from multi_part import (
    PATIENCE,
    Part,
    Sizes,
    ask_all,
    become,
    catch_up,
    change,
    connect,
    disconnect,
    hold,
    in_milliseconds,
    nbytes_of,
    publish,
    ratios,
    settle,
    total,
)

import weightsync as ws
from weightsync.schemes.nccl import reader
from weightsync.testing.processes import Peer, PeerError, eventually

COUNTS = (1, 3, 7)
"""Receivers."""

LOST_SHAPE = "1b"
"""For the receiver that is killed: large enough for a transfer to have a middle."""

BUCKETS = (64, 512)
"""MiB, besides the default; to one receiver."""

KILLED_AT = 10
"""The bucket."""

SILENCE = 5.0
"""Seconds after which one that does not answer is given up."""


# -------------------------------------------------------------------- in another process


def join(state: Any, backend: str, store: str, rank: int, size: int, nbytes: int) -> None:
    """Be one of those that broadcast a flat tensor."""
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    state.flat = torch.ones(nbytes, dtype=torch.uint8, device=state.device)


def broadcast(state: Any) -> tuple[float, float]:
    dist.barrier()
    settle(state)
    began = time.monotonic()
    dist.broadcast(state.flat, 0)
    settle(state)
    return began, time.monotonic()


def part_from_all(state: Any) -> None:
    dist.destroy_process_group()


def receive(state: Any, url: str, sizes: Sizes, name: str) -> None:
    if not hasattr(state, "weights"):
        hold(state, sizes)
    state.receiver = ws.scheme_from_url(url).create_receiver(state.weights, id=name)
    state.receiver.connect(PATIENCE)


def apply(state: Any) -> float:
    """
    Returns:
        Seconds until the engine's tensors had what had arrived.
    """
    began = time.monotonic()
    assert state.receiver.poll_and_apply(PATIENCE) is not None, "no version came"
    settle(state)
    return time.monotonic() - began


def follow(state: Any) -> None:
    state.receiver.follow()


def held(state: Any) -> int | None:
    version = state.receiver.version
    return version and version.number


def stop_receiving(state: Any) -> None:
    receiver = state.__dict__.pop("receiver", None)
    if receiver is not None:
        receiver.shutdown()


def die_at(state: Any, bucket: int) -> None:
    """Be killed as soon as a bucket of the next version has come."""
    take = reader.Reader._take

    def patched(self: reader.Reader, arriving: Any) -> None:
        if arriving.message["number"] == bucket:
            os.kill(os.getpid(), signal.SIGKILL)
        take(self, arriving)

    reader.Reader._take = patched  # type: ignore[method-assign]


def try_to_publish(state: Any, number: int) -> dict[str, Any]:
    """
    Returns:
        Seconds; who holds the version, or what they are; the words of the error, if one came.
    """
    began, words = time.monotonic(), ""
    try:
        report = state.sender.update_weights(version=number, wait="applied", timeout=PATIENCE)
    except ws.ReceiverError as error:
        words, report = str(error), error.report
    seconds = time.monotonic() - began
    told = report.receivers if report else ()
    return {
        "seconds": seconds,
        "states": {each.receiver: each.state for each in told},
        "words": words[:400],
    }


def known(state: Any) -> list[str]:
    return sorted(each.receiver for each in state.sender.receivers() if each.state != "dead")


# -------------------------------------------------------------------- what is measured


def made(part: Part, stack: ExitStack, index: int) -> Peer:
    """A process on a GPU of its own, or on one that others are on as well."""
    peer = Peer()
    stack.callback(peer.dispose)
    shares = index >= part.gpus
    # NCCL refuses two processes on one GPU, unless it takes them for two hosts.
    environment = {"NCCL_HOSTID": f"host-{index}"} if shares else {}
    peer.call(become, environment, part.device, index % part.gpus, within=PATIENCE)
    return peer


def against_torch(part: Part, receivers: int) -> None:
    sizes = part.sizes()
    nbytes = nbytes_of(sizes)
    with ExitStack() as stack:
        peers = [made(part, stack, rank) for rank in range(receivers + 1)]
        trainer, others = peers[0], peers[1:]
        ask_all(peers, hold, sizes)
        store = f"{part.folder}/store-{receivers}"
        for rank, peer in enumerate(peers):
            peer.start(join, part.backend, store, rank, receivers + 1, nbytes)
        for peer in peers:
            peer.result(PATIENCE)
        ways: list[tuple[bool, int | None]] = [(True, None), (False, None)]
        if receivers == 1:
            ways += [(True, size) for size in BUCKETS]
        for verify, bucket_mb in ways:
            path = path_of(receivers, verify, bucket_mb)
            with part.trying(path):
                updates(part, path, trainer, others, sizes, verify, bucket_mb)
        with suppress(Exception):
            ask_all(peers, part_from_all, within=10)


def path_of(receivers: int, verify: bool, bucket_mb: int | None = None) -> str:
    some = f"{receivers} receiver{'s' * (receivers > 1)}"
    buckets = f", buckets of {bucket_mb} MiB" if bucket_mb else ""
    return f"NCCLScheme, {some}, digests {'on' if verify else 'off'}{buckets}"


def updates(
    part: Part,
    path: str,
    trainer: Peer,
    others: list[Peer],
    sizes: Sizes,
    verify: bool,
    bucket_mb: int | None,
) -> None:
    """Updates and plain broadcasts of as many bytes take turns."""
    scheme = ws.NCCLScheme(
        backend=part.backend,  # type: ignore[arg-type]
        num_replicas=len(others),
        verify=verify,
        bucket_mb=bucket_mb,
        buffers=2 if len(others) <= 3 else 1,  # each is the weights once
    )
    ours, flat, applied, both = [], [], [], [trainer, *others]
    try:
        trainer.call(connect, scheme.to_url(), within=PATIENCE)
        for number, other in enumerate(others):
            other.start(receive, scheme.to_url(), sizes, f"receiver-{number}")
        for other in others:
            other.result(PATIENCE)
        for number in range(1, part.rounds + 4):
            trainer.call(change, within=PATIENCE)
            began, ended = trainer.call(publish, number, within=2 * PATIENCE)
            took = max(ask_all(others, apply))
            spans = ask_all(both, broadcast)
            if number > 3:  # both buffers are there, and NCCL is warm
                ours.append(ended - began)
                applied.append(took)
                flat.append(max(end for _, end in spans) - max(begin for begin, _ in spans))
        sums = ask_all(both, total)
        assert len(set(sums)) == 1, f"what has arrived is something else: {sums}"
    finally:
        catch_up(both)
        with suppress(PeerError):
            ask_all(others, stop_receiving, within=20)
            trainer.call(disconnect, within=20)
    part.say(
        path,
        nbytes=nbytes_of(sizes),
        ours=True,
        receivers=len(others),
        digests=verify,
        bucket_mb=bucket_mb,
        shared=len(others) >= part.gpus,
        publish=in_milliseconds(ours),
        written=in_milliseconds(applied),
        flat=in_milliseconds(flat),
        of_flat=ratios(flat, ours),
    )
    part.say(
        f"one flat broadcast beside {path}",
        nbytes=nbytes_of(sizes),
        publish=in_milliseconds(flat),
    )


def lose_one(part: Part) -> None:
    """Two receivers; one is killed in the middle, and comes again."""
    shape = part.shape if part.shape == "tiny" else LOST_SHAPE
    small = Part(shape, part.gpus, part.rounds, part.device, part.folder)
    sizes = small.sizes()
    scheme = ws.NCCLScheme(
        backend=part.backend,  # type: ignore[arg-type]
        num_replicas=2,
        peer_timeout=SILENCE,
        bucket_mb=1 if shape == "tiny" else None,
    )
    with ExitStack() as stack:

        def receiver(index: int, name: str) -> Peer:
            peer = made(small, stack, index)
            peer.call(receive, scheme.to_url(), sizes, name, within=PATIENCE)
            peer.call(follow)
            return peer

        trainer = made(small, stack, 0)
        trainer.call(hold, sizes, within=PATIENCE)
        trainer.call(connect, scheme.to_url(), within=PATIENCE)
        first, second = receiver(1, "first"), receiver(2, "second")
        before = published(trainer, 1)
        assert before["states"] == dict.fromkeys(("first", "second"), "applied"), before
        second.call(die_at, KILLED_AT)
        lost = published(trainer, 2)
        survived = lost["states"].get("first") == "applied" and first.call(held) == 2
        began = time.monotonic()
        again = receiver(2, "second")
        eventually(lambda: trainer.call(known) == ["first", "second"], 30)
        rebuilt = published(trainer, 3)
        seconds = time.monotonic() - began
        sums = ask_all([trainer, first, again], total)
        small.say(
            "a receiver killed in mid-transfer",
            lost={
                "seconds": round(lost["seconds"], 2),
                "silence": SILENCE,
                "named": "'second'" in lost["words"],
                "words": lost["words"],
                "survivor": survived,
                "back after": round(seconds, 2),
                "works": not rebuilt["words"] and len(set(sums)) == 1,
                "next": rebuilt,
            },
        )


def published(trainer: Peer, number: int) -> dict[str, Any]:
    trainer.call(change, within=PATIENCE)
    told: dict[str, Any] = trainer.call(try_to_publish, number, within=2 * PATIENCE)
    return told


def main() -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    part = Part.of_arguments()
    for receivers in COUNTS:
        if receivers == 1 or receivers < part.gpus:
            with part.trying(path_of(receivers, True)):
                against_torch(part, receivers)
    with part.trying("a receiver killed in mid-transfer"):
        lose_one(part)


if __name__ == "__main__":
    main()
