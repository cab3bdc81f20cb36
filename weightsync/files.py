"""Files shared between processes: nothing here follows a symlink or leaves its directory.

Whoever reads and whoever writes may be killed at any moment; a file is replaced whole or not at
all, and a lock dies with the process that holds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import threading
import weakref
from typing import ClassVar

from weightsync.errors import ProtocolError, WeightSyncError

_FILE_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | _FILE_FLAGS


class Directory:
    """An open directory. All names are single components, relative to it."""

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self._fd = fd
        self._close = weakref.finalize(self, os.close, fd)

    @classmethod
    def open(cls, path: str, *, create: bool = False) -> Directory:
        """Open a directory of our own, made with mode 0700 if asked for.

        Raises:
            FileNotFoundError: it does not exist (or, with ``create``, its parent).
            WeightSyncError: it is a symlink or a file, belongs to somebody else, or everybody may
                write to it.
        """
        if create:
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
        try:
            fd = os.open(path, _DIRECTORY_FLAGS)
        except NotADirectoryError:
            raise WeightSyncError(f"{path} is a symlink or not a directory") from None
        except OSError as error:
            if error.errno == 40:  # ELOOP
                raise WeightSyncError(f"{path} is a symlink, which is not followed") from None
            raise
        directory = cls(path, fd)
        status = os.fstat(fd)
        if status.st_uid != os.geteuid():
            raise WeightSyncError(f"{path} belongs to user {status.st_uid}, not to this one")
        if status.st_mode & stat.S_IWOTH:
            raise WeightSyncError(f"{path} can be written by everybody: use a directory inside it")
        return directory

    def subdirectory(self, name: str, *, create: bool = False) -> Directory:
        """Open a directory inside this one.

        Raises:
            FileNotFoundError: there is none. WeightSyncError: the name is something else.
        """
        if create:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self._fd)
        try:
            fd = os.open(name, _DIRECTORY_FLAGS, dir_fd=self._fd)
        except FileNotFoundError:
            raise
        except OSError:
            raise WeightSyncError(f"{self.path}/{name} is not a directory") from None
        return Directory(f"{self.path}/{name}", fd)

    @property
    def exists(self) -> bool:
        """Whether its path still leads to it: it may have been removed, or made anew."""
        try:
            found = os.stat(self.path, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(found, os.fstat(self._fd))

    def names(self) -> list[str]:
        return sorted(os.listdir(self._fd))

    def open_file(self, name: str, flags: int) -> int:
        """A descriptor of a regular file, created with mode 0600 where the flags say so.

        Raises:
            FileNotFoundError: there is none. ProtocolError: it is not a regular file.
        """
        try:
            fd = os.open(name, flags | _FILE_FLAGS | os.O_NONBLOCK, 0o600, dir_fd=self._fd)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise ProtocolError(f"{self.path}/{name}: {error.strerror}") from None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise ProtocolError(f"{self.path}/{name} is not a regular file")
        return fd

    def read(self, name: str, limit: int) -> bytes:
        """The content of a file.

        Raises:
            FileNotFoundError: there is none. ProtocolError: it is longer than ``limit`` bytes.
        """
        with open(self.open_file(name, os.O_RDONLY), "rb") as file:
            data = file.read(limit + 1)
        if len(data) > limit:
            raise ProtocolError(f"{self.path}/{name} is longer than {limit} bytes")
        return data

    def replace(self, name: str, data: bytes) -> None:
        """Write a file whole: readers see the former content or the new one, nothing between."""
        temporary = f".{name}.{os.getpid()}.{threading.get_ident()}.tmp"
        fd = self.open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            with open(fd, "wb") as file:
                file.write(data)
            os.rename(temporary, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except BaseException:
            self.remove(temporary)
            raise

    def remove(self, name: str) -> None:
        """Unlink a file if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)

    def remove_subdirectory(self, name: str) -> None:
        """Remove a directory if it is there and empty; foreign files in it keep it."""
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=self._fd)

    def signature(self, name: str) -> tuple[int, int, int] | None:
        """Changes whenever the file is replaced; None while there is none."""
        try:
            status = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size

    def free_bytes(self) -> int:
        status = os.fstatvfs(self._fd)
        return status.f_bavail * status.f_frsize

    def close(self) -> None:
        self._close()


class Lock:
    """A kernel lock on a file: shared by any number, or exclusive. Dies with its process.

    ``flock`` belongs to the open file, so two Locks of one process exclude each other like those
    of two processes. A forked child would keep its parent's locks alive: it closes them at once.
    """

    _held: ClassVar[weakref.WeakSet[Lock]] = weakref.WeakSet()

    def __init__(self, directory: Directory, name: str, *, create: bool = False) -> None:
        """
        Raises:
            FileNotFoundError: there is no such file and it was not to be created.
        """
        self.name = f"{directory.path}/{name}"
        self._fd = directory.open_file(name, os.O_RDWR | (os.O_CREAT if create else 0))
        self._close = weakref.finalize(self, os.close, self._fd)
        Lock._held.add(self)

    def try_exclusive(self) -> bool:
        return self._try(fcntl.LOCK_EX)

    def try_shared(self) -> bool:
        return self._try(fcntl.LOCK_SH)

    def _try(self, kind: int) -> bool:
        try:
            fcntl.flock(self._fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        """Unlock, and stay ready to lock again."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def is_file(self, directory: Directory, name: str) -> bool:
        """Whether the lock is on the file that has this name now, not on a removed one."""
        found = directory.signature(name)
        return found is not None and found[0] == os.fstat(self._fd).st_ino

    def write(self, data: bytes) -> None:
        """Say who holds the lock, for whoever cannot have it."""
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, data, 0)

    def release(self) -> None:
        """Unlock by closing. Idempotent."""
        Lock._held.discard(self)
        self._close()

    @property
    def released(self) -> bool:
        return not self._close.alive


def _drop_inherited_locks() -> None:
    # Closing a copy of the descriptor leaves the parent's lock as it is; unlocking would not.
    for lock in list(Lock._held):
        lock.release()


os.register_at_fork(after_in_child=_drop_inherited_locks)


def is_locked(directory: Directory, name: str) -> bool:
    """Whether a live process holds the file's lock exclusively."""
    try:
        lock = Lock(directory, name)
    except FileNotFoundError:
        return False
    free = lock.try_shared()
    lock.release()
    return not free


def lock_kinds(inode: int) -> set[str]:
    """``READ`` or ``WRITE`` for each kernel lock that this host's processes hold on a file.

    Reads the kernel's list (proc_locks(5)), so looking takes no lock that others could run into.
    """
    kinds = set()
    with contextlib.suppress(OSError), open("/proc/locks") as listing:
        for line in listing:
            fields = line.split()
            if "FLOCK" in fields and "->" not in fields and f":{inode}" in line:
                kinds.add(fields[3])
    return kinds
