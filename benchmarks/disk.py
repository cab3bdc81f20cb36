"""Publish and load through DiskScheme, against dd, safetensors and torch.save on one file system.

    make bench-disk            # or: python benchmarks/disk.py --directory /mnt/shared --json FILE

Every way of writing makes a new file that is on the disk in the end (fsync). Ours makes digests,
and removes an old version, within its time; the others do neither. Loads end in tensors that exist
already; ours compares digests. Cold: the page cache has nothing of the file; warm: all of it.
"""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch
from common import MB, SHAPES, Group, Shape, in_turns, parser, report, timed

import weightsync as ws

BLOCK = 8 * MB
ROOM = 8  # GB: three versions of ours at a time, and one file of each other way

Tensors = dict[str, torch.Tensor]


def dd(*operands: str) -> None:
    subprocess.run(["dd", f"bs={BLOCK}", "status=none", *operands], check=True)


def write_direct(path: Path, nbytes: int, block: mmap.mmap) -> None:
    """The same block again and again, past the page cache, by one thread."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
    with memoryview(block) as view:
        for offset in range(0, nbytes, BLOCK):
            os.pwrite(fd, view[: nbytes - offset], offset)
    os.fsync(fd)
    os.close(fd)


def sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file)


def make_cold(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file)
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def make_warm(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(BLOCK):
                    pass


def copy(into: Tensors, loaded: Tensors) -> None:
    for name, tensor in into.items():
        tensor.copy_(loaded[name])


def written(path: Path, write: Callable[[], object]) -> Callable[[], float]:
    """A way to write a new file, with nothing of the former one left to do."""

    def once() -> float:
        path.unlink(missing_ok=True)
        os.sync()
        return timed(write)

    return once


def read(
    folder: Path, prepare: Callable[[Path], None], load: Callable[[], object]
) -> Callable[[], float]:
    def once() -> float:
        prepare(folder)
        return timed(load)

    return once


def measure(shape: Shape, rounds: int, folder: Path) -> list[Group]:
    weights = shape.weights()
    target = shape.weights(torch.zeros)
    zeros, direct, tensors, pickled = (
        folder / name for name in ("zeros", "direct", "tensors.safetensors", "pickled.pt")
    )
    block = mmap.mmap(-1, BLOCK)
    block[:] = os.urandom(BLOCK)
    scheme = ws.DiskScheme(str(folder / "run"), keep=2, keep_files=False)
    sender = scheme.create_sender(weights)
    sender.connect()
    receiver = scheme.create_receiver(target)
    receiver.connect()

    def publish() -> float:
        for tensor in list(weights.values())[:: max(1, shape.count // 100)]:
            tensor.add_(1)
        os.sync()
        return timed(sender.update_weights)

    def save_file() -> None:
        safetensors.torch.save_file(weights, tensors)
        sync(tensors)

    def save() -> None:
        torch.save(weights, pickled)
        sync(pickled)

    size = [f"count={shape.total}", "iflag=count_bytes"]
    groups: dict[str, dict[str, Callable[[], float]]] = {
        "publish": {
            "dd oflag=direct": written(
                zeros,
                lambda: dd("if=/dev/zero", f"of={zeros}", *size, "oflag=direct", "conv=fsync"),
            ),
            "O_DIRECT, Python": written(direct, lambda: write_direct(direct, shape.total, block)),
            "safetensors.save_file": written(tensors, save_file),
            "torch.save": written(pickled, save),
            "publish": publish,
        }
    }
    for heat, prepare, flags in (("cold", make_cold, ["iflag=direct"]), ("warm", make_warm, [])):
        loads: dict[str, Callable[[], object]] = {
            " ".join(["dd", *flags]): lambda flags=flags: dd(
                f"if={direct}", "of=/dev/null", *flags
            ),
            "safetensors.load_file": lambda: copy(target, safetensors.torch.load_file(tensors)),
            "torch.load": lambda: copy(target, torch.load(pickled)),
            # The first look at a version is a poll; another one is asked for.
            "apply": receiver.poll_and_apply if heat == "cold" else receiver.apply_weights,
        }
        groups[f"load, {heat}"] = {way: read(folder, prepare, load) for way, load in loads.items()}
    if not shutil.which("dd"):
        groups = {
            what: {way: once for way, once in ways.items() if not way.startswith("dd")}
            for what, ways in groups.items()
        }
    with sender, receiver:
        seconds = in_turns(list(groups.values()), rounds)
        receiver.apply_weights()  # the last to write there may have been another way
        assert receiver.verify_weights().ok
        assert receiver.version == sender.version
    return [
        Group(
            f"{shape.title}: {what}", shape.total, "publish" if "publish" in took else "apply", took
        )
        for what, took in zip(groups, seconds, strict=True)
    ]


def main() -> None:
    arguments = parser(__doc__.splitlines()[0], rounds=7)
    arguments.add_argument("--directory", default=".", help=f"on the disk, {ROOM} GB free")
    options = arguments.parse_args()
    free = shutil.disk_usage(options.directory).free / 1e9
    if free < ROOM:
        raise SystemExit(f"{options.directory} has {free:.1f} GB free; {ROOM} are needed")
    groups = []
    for shape in SHAPES:
        print(f"measuring {shape.title} ...", flush=True)
        with tempfile.TemporaryDirectory(dir=options.directory, prefix="weightsync-bench-") as name:
            groups += measure(shape, options.rounds, Path(name).absolute())
    report("DiskScheme, durable, digests on", groups, options.json)


if __name__ == "__main__":
    main()
