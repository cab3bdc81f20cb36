"""Faults, to be injected into processes and files: what goes wrong in real runs.

``kill``                    a process is gone at once
``stop``, ``stalled``       a process stands still
``corrupt``, ``truncate``,  a stored file is not what was written
``replace``
``Bomb``                    a pickle that shows whether somebody loaded it
``refused``                 a path that one may not look into
``file_size_limit``,        a disk that takes no more
``small_disk``
``clock_back``              a machine whose clock is behind
:mod:`weightsync.testing.engines` has engines that are slow, stuck or fail.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from weightsync.deadline import Deadline

Where = str | os.PathLike[str]

_NOBODY = 65534


class UnavailableError(Exception):
    """The fault cannot be injected here; says what it takes."""


# -------------------------------------------------------------------- processes


def kill(pid: int) -> None:
    """End a process wherever it is, and wait until it is gone; its parent may have to reap it."""
    os.kill(pid, signal.SIGKILL)
    gone = Deadline(10.0).wait(lambda: _kernel_state(pid) in ("Z", "X", "") or None)
    assert gone, f"pid {pid} does not end"


def stop(pid: int) -> None:
    """Stop a process where it is, and wait until it stands; ``SIGCONT`` lets it go on."""
    os.kill(pid, signal.SIGSTOP)
    standing = Deadline(10.0).wait(lambda: _kernel_state(pid) == "T" or None)
    assert standing, f"pid {pid} does not stop"


@contextmanager
def stalled(pid: int) -> Iterator[None]:
    """A process stands still."""
    stop(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _kernel_state(pid: int) -> str:
    """A letter of proc_pid_stat(5); nothing if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


# -------------------------------------------------------------------- stored files


def corrupt(path: Where, byte: int | None = None, bit: int = 0) -> None:
    """Flip one bit of a file, by default in the middle of it."""
    with open(path, "r+b") as file:
        at = os.fstat(file.fileno()).st_size // 2 if byte is None else byte
        file.seek(at)
        value = file.read(1)[0]
        file.seek(at)
        file.write(bytes([value ^ 1 << bit]))


def truncate(path: Where, nbytes: int | None = None) -> None:
    """Cut a file off, by default at half its length."""
    os.truncate(path, os.stat(path).st_size // 2 if nbytes is None else nbytes)


def replace(path: Where, data: bytes) -> None:
    """Put another file in the place of one, as a hostile neighbour would."""
    temporary = f"{os.fspath(path)}.replaced"
    with open(temporary, "wb") as file:
        file.write(data)
    os.rename(temporary, path)


class Bomb:
    """A pickle that makes a file where it is loaded: nobody is to load what they received."""

    def __init__(self, marker: Where) -> None:
        self._marker = os.fspath(marker)

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (self._marker, "w")

    def __bytes__(self) -> bytes:
        return pickle.dumps(self)

    @property
    def exploded(self) -> bool:
        return os.path.exists(self._marker)


# -------------------------------------------------------------------- access


@contextmanager
def refused(path: Where) -> Iterator[None]:
    """A file or directory that nobody may open; not even root, if it is :func:`unprivileged`."""
    mode = os.stat(path).st_mode
    os.chmod(path, 0)
    try:
        yield
    finally:
        os.chmod(path, mode)


@contextmanager
def unprivileged() -> Iterator[None]:
    """This process may do what any user may, and no more, if it is root's."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(_NOBODY)
    try:
        yield
    finally:
        if user == 0:
            os.seteuid(user)


# -------------------------------------------------------------------- room


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """The kernel lets this process write no file longer than that (``EFBIG``)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    former = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, former)


@contextmanager
def small_disk(path: Path, nbytes: int) -> Iterator[Path]:
    """A memory file system of that size, mounted on an empty directory.

    Raises:
        UnavailableError: mounting takes privileges that this process has not.
    """
    options = f"size={nbytes},mode=700"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "weightsync-test", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise UnavailableError(f"mounting is not permitted: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@contextmanager
def filled(path: Path, leave: int = 0) -> Iterator[None]:
    """A file takes all room of a (small) file system but ``leave`` bytes."""
    status = os.statvfs(path)
    filler = path / "filler"
    fd = os.open(filler, os.O_RDWR | os.O_CREAT)
    try:
        os.posix_fallocate(fd, 0, status.f_bavail * status.f_frsize - leave)
        yield
    finally:
        os.close(fd)
        filler.unlink()


# -------------------------------------------------------------------- time


@contextmanager
def clock_back(seconds: float) -> Iterator[None]:
    """This process's clock of the day is behind; the monotonic one goes on."""
    now = time.time

    def earlier() -> float:
        return now() - seconds

    with mock.patch("time.time", earlier):
        yield
