"""Waking up when files of a directory are replaced: a wait ends then, not at its next look.

The kernel's inotify (Linux, inotify(7)) is a hint only: what other hosts write on a network's file
system it does not tell, and how many may be watched is limited. So whoever waits goes on looking
every few milliseconds as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import threading
import time
import weakref

from weightsync.files import Directory

_NONBLOCK, _CLOEXEC = os.O_NONBLOCK, os.O_CLOEXEC
_MOVED_TO = 0x80
"""IN_MOVED_TO: a file got a name in the directory, which is how ours are written."""

_MANY = 1 << 16
"""Bytes of news that are taken at a time; what they say does not matter."""


class Notice:
    """News of one directory at a time."""

    def __init__(self) -> None:
        self._pid = 0
        self._fd = -1
        self._watched: tuple[int, int] | None = None
        self._close: weakref.finalize[[int], Notice] | None = None
        self._using = threading.Lock()

    def wait(self, directory: Directory, seconds: float) -> None:
        """Wait for news of a directory since the last wait, and for so long at most.

        The first time for a directory it does not wait: what came before is not news.
        """
        # Another thread waits here, or did when this process was forked, and never will again.
        if not self._using.acquire(timeout=seconds):
            return
        try:
            self._wait(directory, seconds)
        finally:
            self._using.release()

    def _wait(self, directory: Directory, seconds: float) -> None:
        if self._pid != os.getpid() or self._watched != directory.identity:
            self._turn_to(directory)
        elif self._fd < 0:
            time.sleep(seconds)
        else:
            poll = select.poll()
            poll.register(self._fd, select.POLLIN)
            if poll.poll(seconds * 1000):
                with contextlib.suppress(BlockingIOError):
                    os.read(self._fd, _MANY)

    def _turn_to(self, directory: Directory) -> None:
        if self._close is not None:
            self._close()  # in a child too: it has its parent's descriptor, and takes its news
        self._close = None
        self._pid, self._watched = os.getpid(), directory.identity
        self._fd = _watch(directory)
        if self._fd >= 0:
            self._close = weakref.finalize(self, os.close, self._fd)


def _watch(directory: Directory) -> int:
    """A descriptor that gets readable at news; -1 where there is no such thing."""
    try:
        libc = ctypes.CDLL(None)
        fd = int(libc.inotify_init1(_NONBLOCK | _CLOEXEC))
        if fd < 0:
            return -1
        if libc.inotify_add_watch(fd, directory.link.encode(), _MOVED_TO) < 0:
            os.close(fd)
            return -1
    except (OSError, AttributeError):
        return -1
    return fd
