"""Other processes for a test, what they do, and what they leave behind."""

import contextlib
import ctypes
import os

from weightsync.testing.processes import CONTEXT, WAIT, Peer, PeerError, eventually
from weightsync.testing.roles import (
    end_receiver,
    end_sender,
    follow,
    held,
    held_while_following,
    poll,
    publish,
    publish_range,
    publish_until,
    read_until,
    receive_in,
    send_from,
    summary,
)
from weightsync.testing.weights import constants, fill, value_of

__all__ = [
    "CONTEXT",
    "WAIT",
    "Peer",
    "PeerError",
    "bytes_of",
    "constants",
    "end_receiver",
    "end_sender",
    "eventually",
    "files_of",
    "fill",
    "follow",
    "held",
    "held_while_following",
    "open_files",
    "poll",
    "publish",
    "publish_range",
    "publish_until",
    "read_until",
    "receive_in",
    "resident_bytes",
    "return_memory_at_once",
    "send_from",
    "summary",
    "value_of",
]


# -------------------------------------------------------------------- what is left


def files_of(path):
    """Every file below a directory, relative to it."""
    return sorted(
        os.path.relpath(os.path.join(root, name), path)
        for root, _, names in os.walk(path)
        for name in names
    )


def bytes_of(path):
    total = 0
    for name in files_of(path):
        with contextlib.suppress(FileNotFoundError):  # it may be replaced while we look
            total += os.lstat(os.path.join(path, name)).st_blocks * 512
    return total


def open_files(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


def return_memory_at_once():
    """Have large tensors come straight from the kernel: what the allocator keeps is no leak."""
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD of mallopt(3), fixed from now on


def resident_bytes(pid):
    """Private memory of a process; pages that it shares with others are not counted."""
    with open(f"/proc/{pid}/status") as status:
        lines = dict(line.split(":", 1) for line in status)
    return int(lines["RssAnon"].split()[0]) << 10
