"""Files shared between processes: nothing here follows a symlink or leaves its directory.

Whoever reads and whoever writes may be killed at any moment; a file is replaced whole or not at
all, and a lock dies with the process that holds it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
import threading
import weakref
from collections.abc import Iterator
from typing import BinaryIO, ClassVar

from weightsync.errors import NoRoomError, ProtocolError, WeightSyncError

_FILE_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | _FILE_FLAGS
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_HERE, _EXCHANGE = -100, 2
"""AT_FDCWD and RENAME_EXCHANGE."""
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE, errno.ETIMEDOUT)


@contextlib.contextmanager
def _saying(where: str) -> Iterator[None]:
    """Errors of the system say where they happened. What is not there stays a FileNotFoundError."""
    try:
        yield
    except (FileNotFoundError, WeightSyncError):
        raise
    except OSError as error:
        kind = NoRoomError if error.errno in FULL else WeightSyncError
        raise kind(f"{where}: {error.strerror or error}") from error


class Directory:
    """An open directory. All names are single components, relative to it."""

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self._fd = fd
        self._close = weakref.finalize(self, os.close, fd)
        self._close.atexit = False  # others may still need it then; the kernel closes it anyway

    @classmethod
    def open(cls, path: str, *, create: bool = False) -> Directory:
        """Open a directory of our own, made with mode 0700 if asked for.

        Raises:
            FileNotFoundError: it does not exist (or, with ``create``, its parent).
            WeightSyncError: it is a symlink or a file, belongs to somebody else, everybody may
                write to it, it may not be opened, or it cannot be made.
        """
        while create:
            try:
                os.mkdir(path, 0o700)
            except FileExistsError:
                pass
            except FileNotFoundError:
                raise
            except OSError as error:
                raise WeightSyncError(f"{path} cannot be made: {error.strerror}") from None
            try:
                return cls.open(path)
            except FileNotFoundError:
                pass  # somebody removed it between the two: it is made again
        try:
            fd = os.open(path, _DIRECTORY_FLAGS)
        except NotADirectoryError:
            raise WeightSyncError(f"{path} is a symlink or not a directory") from None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise WeightSyncError(f"{path} is a symlink, which is not followed") from None
            if isinstance(error, PermissionError):
                raise WeightSyncError(f"{path} may not be opened: {error.strerror}") from None
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
            NoRoomError: there is no room to create it.
        """
        if create:
            try:
                os.mkdir(name, 0o700, dir_fd=self._fd)
            except FileExistsError:
                pass
            except FileNotFoundError:
                raise
            except OSError as error:
                kind = NoRoomError if error.errno in FULL else WeightSyncError
                raise kind(f"{self.path}/{name}: {error.strerror}") from None
        try:
            fd = os.open(name, _DIRECTORY_FLAGS, dir_fd=self._fd)
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno in _PASSING:
                raise WeightSyncError(f"{self.path}/{name}: {error.strerror}") from None
            raise WeightSyncError(f"{self.path}/{name} is not a directory") from None
        return Directory(f"{self.path}/{name}", fd)

    @property
    def identity(self) -> tuple[int, int]:
        """No other directory that is there has the same."""
        status = os.fstat(self._fd)
        return status.st_dev, status.st_ino

    @property
    def link(self) -> str:
        """A path that leads to it in this process, wherever it was moved."""
        return f"/proc/self/fd/{self._fd}"

    @property
    def exists(self) -> bool:
        """Whether its path still leads to it: it may have been removed, or made anew."""
        try:
            found = os.stat(self.path, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(found, os.fstat(self._fd))

    def names(self) -> list[str]:
        # Two threads that list one descriptor share its position, and miss entries.
        with _saying(self.path):
            fd = os.open(".", _DIRECTORY_FLAGS, dir_fd=self._fd)
            try:
                return sorted(os.listdir(fd))
            finally:
                os.close(fd)

    def open_file(self, name: str, flags: int) -> int:
        """A descriptor of a regular file, created with mode 0600 where the flags say so.

        Raises:
            FileNotFoundError: there is none, or the directory is gone. ProtocolError: it is not a
                regular file. NoRoomError: there is no room to create it. WeightSyncError: it could
                not be opened now, which says nothing of the file.
        """
        try:
            fd = os.open(name, flags | _FILE_FLAGS | os.O_NONBLOCK, 0o600, dir_fd=self._fd)
        except FileNotFoundError:
            raise
        except OSError as error:
            kind: type[WeightSyncError] = ProtocolError
            if error.errno in FULL:
                kind = NoRoomError
            elif error.errno in _PASSING:
                kind = WeightSyncError
            raise kind(f"{self.path}/{name}: {error.strerror}") from None
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

    def replace(self, name: str, data: bytes, *, durable: bool = False) -> None:
        """Write a file whole: readers see the former content or the new one, nothing between.

        Args:
            durable: it is on the disk, under its name, when this returns.

        Raises:
            NoRoomError: there is no room for it. The former content is still there.
            ProtocolError: a directory has the name.
        """
        temporary = f".{name}.{os.getpid()}.{threading.get_ident()}.tmp"
        fd = self.open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            with open(fd, "wb") as file:
                file.write(data)
                if durable:
                    file.flush()
                    os.fsync(fd)
            os.rename(temporary, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
            if durable:
                self.sync()
        except BaseException as error:
            self.remove(temporary)
            if isinstance(error, OSError) and error.errno in FULL:
                raise NoRoomError(f"{self.path}/{name}: {error.strerror}") from None
            if isinstance(error, IsADirectoryError):
                raise ProtocolError(f"{self.path}/{name} is a directory") from None
            raise

    def sync(self) -> None:
        """Have the names in it on the disk when this returns."""
        with _saying(self.path):
            os.fsync(self._fd)

    def sync_name(self) -> None:
        """Have its own name on the disk when this returns."""
        fd = os.open("..", _DIRECTORY_FLAGS, dir_fd=self._fd)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, name: str, other: str) -> None:
        """Give a file or directory another name, if it is there. Needs no room."""
        with contextlib.suppress(FileNotFoundError), _saying(f"{self.path}/{name}"):
            os.rename(name, other, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def discard(self, name: str) -> None:
        """Unlink a file if it is there; a directory of that name is somebody else's, and stays."""
        with contextlib.suppress(ProtocolError):
            self.remove(name)

    def remove(self, name: str) -> None:
        """Unlink a file if it is there.

        Raises:
            ProtocolError: it is a directory, and not ours.
        """
        try:
            os.unlink(name, dir_fd=self._fd)
        except FileNotFoundError:
            pass
        except IsADirectoryError:
            raise ProtocolError(f"{self.path}/{name} is a directory") from None

    def remove_subdirectory(self, name: str) -> None:
        """Remove a directory if it is there and empty; foreign files in it keep it."""
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=self._fd)

    def status(self, name: str) -> os.stat_result | None:
        """What ``stat`` says of a file; None while there is none."""
        try:
            return os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def free_bytes(self) -> int:
        with _saying(self.path):
            status = os.fstatvfs(self._fd)
        return status.f_bavail * status.f_frsize

    def close(self) -> None:
        self._close()


class WatchedFile:
    """A file that others replace, read again only when they did.

    The file read last stays open: as long as it is, its inode number is not given to the next one,
    which on many file systems would otherwise look just like it.
    """

    def __init__(self, directory: Directory, name: str, limit: int) -> None:
        self._directory = directory
        self._name = name
        self._limit = limit
        self._seen: tuple[BinaryIO, bytes] | None = None

    def read(self) -> bytes | None:
        """Its content, the very same object while the file is the same; None if there is none.

        Raises:
            ProtocolError: it is longer than the limit, or not a regular file.
        """
        status = self._directory.status(self._name)
        if status is None:
            return None
        if self._seen is not None and os.path.samestat(status, os.fstat(self._seen[0].fileno())):
            return self._seen[1]
        self.close()
        try:
            fd = self._directory.open_file(self._name, os.O_RDONLY)
        except FileNotFoundError:
            return None
        file = os.fdopen(fd, "rb")
        data = file.read(self._limit + 1)
        if len(data) > self._limit:
            file.close()
            raise ProtocolError(f"{self._directory.path}/{self._name} is too long")
        self._seen = file, data
        return data

    def close(self) -> None:
        # Forgotten first: an interrupt between the two must not leave a closed file behind.
        seen, self._seen = self._seen, None
        if seen is not None:
            seen[0].close()


class Lock:
    """A kernel lock on a file: shared by any number, or exclusive. Dies with its process.

    ``flock`` belongs to the open file, so two Locks of one process exclude each other like those
    of two processes. A forked child would keep its parent's locks alive: it closes them at once.
    """

    _held: ClassVar[weakref.WeakSet[Lock]] = weakref.WeakSet()
    # No fork between the opening of a file and its entry in _held: the child would not close it.
    _opening: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self, directory: Directory, name: str, *, create: bool = False) -> None:
        """
        Raises:
            FileNotFoundError: there is no such file and it was not to be created.
        """
        self.name = f"{directory.path}/{name}"
        with Lock._opening:
            self._fd = directory.open_file(name, os.O_RDWR | (os.O_CREAT if create else 0))
            self._close = weakref.finalize(self, _unlock_and_close, self._fd)
            self._close.atexit = False
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

    @property
    def exists(self) -> bool:
        """Whether its path still leads to the file it locks: that may have been removed."""
        if self.released:
            return False
        try:
            found = os.stat(self.name, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(found, os.fstat(self._fd))

    def write(self, data: bytes) -> None:
        """Say who holds the lock, for whoever cannot have it.

        Not in one step: what was said before may be read until then, or some of both.
        """
        os.pwrite(self._fd, data, 0)
        os.ftruncate(self._fd, len(data))

    @property
    def is_empty(self) -> bool:
        """Whether nobody has said that it holds the lock."""
        return os.fstat(self._fd).st_size == 0

    def release(self) -> None:
        """Unlock and close. Idempotent."""
        Lock._held.discard(self)
        self._close()

    def drop(self) -> None:
        """Close a forked child's copy; the parent's lock stays as it is."""
        Lock._held.discard(self)
        if self._close.detach():
            os.close(self._fd)

    @property
    def released(self) -> bool:
        return not self._close.alive


def _unlock_and_close(fd: int) -> None:
    # Unlocked first: a program that is just being started has a copy of the descriptor until exec.
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def _after_fork_in_child() -> None:
    Lock._opening.release()
    for lock in list(Lock._held):
        lock.drop()


os.register_at_fork(
    before=Lock._opening.acquire,
    after_in_parent=Lock._opening.release,
    after_in_child=_after_fork_in_child,
)


def exchange(path: str, other: str) -> None:
    """Give two files or directories each other's name, in one step (Linux, renameat2(2)).

    Raises:
        OSError: one is not there, or the file system cannot do that.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), path)
    names = os.fsencode(path), os.fsencode(other)
    if libc.renameat2(_HERE, names[0], _HERE, names[1], _EXCHANGE) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)


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
