"""How much memory processes hold, what they share counted once, and how much there is."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from weightsync.bench.weights import size_text

_EVERY = 0.01  # seconds between two looks
_SPARE = 0.9
"""Part of the free memory that is used at most: others live on the machine, too."""


def held(processes: Sequence[int], folder: str) -> int:
    """Bytes that the processes and those they started hold, and files in a memory-backed folder.

    A page that several share counts once, as the kernel's proportional set size does. Files count
    whether or not somebody maps them; the page cache of files on a disk does not.
    """
    private = shared = 0
    for process in _with_children(processes):
        with suppress(OSError):
            found = _rollup(process)
            private += found["Pss_Anon"]
            shared += found["Pss_Shmem"]
    return private + max(shared, _size_of(folder))


def _with_children(processes: Sequence[int]) -> list[int]:
    found = list(processes)
    for process in processes:
        with suppress(psutil.Error):
            found += [child.pid for child in psutil.Process(process).children(recursive=True)]
    return found


def _rollup(process: int) -> dict[str, int]:
    """Bytes by kind."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]
    words = (line.split() for line in lines)
    return {name.rstrip(":"): int(kilobytes) * 1024 for name, kilobytes, *_ in words}


def _size_of(folder: str) -> int:
    total = 0
    for path, _, files in os.walk(folder):
        for name in files:
            with suppress(OSError):
                total += os.lstat(os.path.join(path, name)).st_blocks * 512
    return total


class Peak:
    """The most that was held while it looked."""

    def __init__(self, processes: Sequence[int], folder: str) -> None:
        self.nbytes = 0
        self._where = processes, folder
        self._stop = threading.Event()

    def look(self) -> None:
        self.nbytes = max(self.nbytes, held(*self._where))

    def run(self) -> None:
        while not self._stop.wait(_EVERY):
            self.look()

    def stop(self) -> None:
        self._stop.set()


@contextmanager
def peak(processes: Sequence[int], folder: str) -> Iterator[Peak]:
    """Look from a thread of its own. It slows down what it looks at: nothing is timed meanwhile."""
    found = Peak(processes, folder)
    thread = threading.Thread(target=found.run, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        found.stop()
        thread.join()
        found.look()


@dataclass(frozen=True)
class Needs:
    """Bytes: of memory in all, of them in files that lie in memory, and on a disk."""

    memory: int
    shared: int = 0
    disk: int = 0

    def __add__(self, other: Needs) -> Needs:
        return Needs(self.memory + other.memory, self.shared + other.shared, self.disk + other.disk)

    def lacking(self, shared: str, disk: str) -> str | None:
        """Why so much cannot be had, if it cannot.

        Args:
            shared: the memory-backed folder. disk: the one on a disk.
        """
        return (
            _lacking("memory", self.memory, available())
            or _lacking(f"room in {shared}", self.shared, _room(shared))
            or _lacking(f"room in {disk}", self.disk, _room(disk))
        )


def _lacking(what: str, wanted: int, free: int) -> str | None:
    if wanted <= free * _SPARE:
        return None
    return (
        f"{size_text(wanted)} of {what} are needed; {size_text(free)} are free, of which "
        f"{size_text(free * _SPARE)} may be used"
    )


def _room(folder: str) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def available() -> int:
    """Bytes that this process and others may still take: of the machine, or of its container."""
    free: int = psutil.virtual_memory().available
    limit, used = _number("memory.max"), _number("memory.current")
    return free if limit is None or used is None else max(0, min(free, limit - used))


def _number(name: str) -> int | None:
    with suppress(OSError, ValueError):
        return int(Path("/sys/fs/cgroup", name).read_text())
    return None
