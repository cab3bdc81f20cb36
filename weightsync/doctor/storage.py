"""Where a run lies: the room there, and whether its locks and mappings work."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import tempfile
from collections.abc import Iterator

from weightsync.doctor.child import ask
from weightsync.doctor.finding import Finding, Subject, ok, problem, warning
from weightsync.files import lock_kinds
from weightsync.mounts import is_shared_by_hosts, mount_of
from weightsync.words import size

_SMALL = 1 << 30
"""Bytes. Shared memory of less is a container's default (64 MB), not anybody's decision."""

_SECONDS = 5.0

EXAMINED, EXAMINED_FILE = "weightsync-doctor-", "file"
"""What a folder that is made for a moment is called, before a random word; and what is in it."""

_MORE = (
    "Give the container more with --shm-size=64g or --ipc=host, or in Kubernetes by an emptyDir "
    "with medium: Memory at /dev/shm."
)
_LESS = "Use fewer slots= or keep=, a smaller dtype=, or another path with more room."
_MORE_OR_LESS = f"{_MORE[:-1]}; or use fewer slots=, a smaller dtype=, or DiskScheme."


def place_of(path: str) -> str:
    """The directory in which a run's directory would be made; of a run, the one it is in.

    Raises:
        FileNotFoundError: there is no such directory.
    """
    run = os.path.lexists(f"{path}/sender.lock")
    place = path if os.path.isdir(path) and not run else os.path.dirname(path)
    if not os.path.isdir(place):
        raise FileNotFoundError(f"{place}: there is no such directory")
    return place


def room(subject: Subject) -> Finding:
    """How much memory or disk there is for slots or versions."""
    place = place_of(subject.path)
    status = os.statvfs(place)
    total, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    mount = mount_of(place)
    kind = mount.kind if mount else "unknown"
    words = f"{place} ({kind}): {size(free)} free of {size(total)}"
    limit = _cgroup_room() if kind in ("tmpfs", "ramfs") else None
    if limit is not None and limit < free:
        free = limit
        words += f"; this container may use {size(limit)} more memory, of which that is a part"
    copies = _copies(subject)
    if subject.nbytes is not None:
        needed = copies * subject.nbytes
        reusable = _occupied(subject.path)
        words += f"; {copies} copies of {size(subject.nbytes)} need {size(needed)}"
        if needed > free + reusable:
            contained = kind == "tmpfs" and total < needed
            return problem("room", words, _MORE_OR_LESS if contained else _LESS)
        return ok("room", words)
    if kind == "tmpfs" and total < _SMALL:
        return warning("room", words, _MORE)
    return ok("room", words)


def _copies(subject: Subject) -> int:
    slots = getattr(subject.scheme, "slots", None)
    keep = getattr(subject.scheme, "keep", None)
    # While a version is written, those that are kept are there too.
    return int(slots) if slots else int(keep) + 1 if keep else 2


def _occupied(run: str) -> int:
    """What a run that is there already has, and would use again."""
    if not os.path.lexists(f"{run}/sender.lock"):
        return 0
    found = 0
    for folder, _, names in os.walk(run):
        for name in names:
            with contextlib.suppress(OSError):
                found += os.lstat(f"{folder}/{name}").st_blocks * 512
    return found


def _cgroup_room() -> int | None:
    """Bytes that this control group may still use; None: it is not limited, or that is unknown."""
    pairs = (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    )
    for most, used in pairs:
        with contextlib.suppress(OSError, ValueError), open(most) as limit, open(used) as usage:
            limited = int(limit.read())
            return max(0, limited - int(usage.read())) if limited < 1 << 60 else None
    return None


# -------------------------------------------------------------------- locks and mappings

_TRY = """
import fcntl, json, struct, sys
found = {}
with open(sys.argv[1], "r+b") as file:
    for name, kind in (("shared", fcntl.LOCK_SH), ("exclusive", fcntl.LOCK_EX)):
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            fcntl.flock(file, fcntl.LOCK_UN)
            found[name] = True
        except BlockingIOError:
            found[name] = False
    whole = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0)
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, whole)
        found["ofd"] = True
    except BlockingIOError:
        found["ofd"] = False
print(json.dumps(found))
"""
"""Which locks another process can have on a file."""


def locks(subject: Subject) -> Finding:
    """Whether a lock of one process is seen by another one, by which everybody knows who lives."""
    place = place_of(subject.path)
    with _file_in(place) as path, open(path, "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return problem(
                "locks",
                f"{place}: no flock: {error.strerror}",
                "Use a path on another file system, like /dev/shm or a local disk.",
            )
        listed = "WRITE" in lock_kinds(os.fstat(file.fileno()).st_ino)
        whole = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0)
        ofd = True
        try:
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, whole)
        except OSError:
            ofd = False
        held = ask(_TRY, path, seconds=_SECONDS, isolated=True)
        fcntl.flock(file, fcntl.LOCK_SH)
        shared = ask(_TRY, path, seconds=_SECONDS, isolated=True)
    seen = not held["shared"] and shared["shared"] and not shared["exclusive"]
    ofd = ofd and not held["ofd"]
    words = f"{place}: flock {'is' if seen else 'is not'} seen by another process"
    words += f", OFD locks {'are' if ofd else 'are not'} (not used)"
    if not seen:
        return problem(
            "locks",
            words,
            "Use a path on another file system; a mount option like nolock or local_lock= hides "
            "locks.",
        )
    if is_shared_by_hosts(place):
        return warning(
            "locks",
            f"{words}; other hosts may have it mounted, and what they see is not known here",
            "Run this on the other hosts too, and see that `weightsync inspect` there shows the "
            "sender alive.",
        )
    if not listed:
        return warning(
            "locks",
            f"{words}; /proc/locks does not list them",
            "Nothing is wrong for runs, but `weightsync inspect` cannot say who reads.",
        )
    return ok("locks", words)


def mapping(subject: Subject) -> Finding:
    """Whether room can be taken ahead, and files be mapped."""
    place = place_of(subject.path)
    with _file_in(place) as path, open(path, "r+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, mmap.PAGESIZE)
            with mmap.mmap(file.fileno(), mmap.PAGESIZE) as mapped:
                mapped[:4] = b"here"
            seen = file.read(4) == b"here"
        except OSError as error:
            seen, why = False, error.strerror or str(error)
        else:
            why = "what is written by a mapping is not read back"
    if not seen:
        return problem(
            "mapping",
            f"{place}: {why}",
            "Use a path on another file system: /dev/shm, or DiskScheme, which maps nothing to "
            "write.",
        )
    return ok("mapping", f"{place}: files can be mapped and shared")


@contextlib.contextmanager
def _file_in(place: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix=EXAMINED, dir=place) as folder:
        path = f"{folder}/{EXAMINED_FILE}"
        with open(path, "wb"):
            pass
        yield path
