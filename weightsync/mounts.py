"""What kind of file system a path is on, by the kernel's list of mounts (proc(5), mountinfo)."""

from __future__ import annotations

import os
from dataclasses import dataclass

_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})

_ONE_HOSTS = frozenset(
    _IN_MEMORY
    | {"overlay", "overlayfs", "aufs", "squashfs"}
    | {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "nilfs2", "bcachefs"}
    | {"reiserfs", "vfat", "exfat"}
)
"""File systems that one host has for itself, whose kernel knows all locks on them."""


@dataclass(frozen=True)
class Mount:
    """
    Attributes:
        point: where it is mounted. kind: ``tmpfs``, ``ext4``, ``nfs4``, ...
    """

    point: str
    kind: str


def mount_of(path: str) -> Mount | None:
    """The mount that a path lies on; None if the kernel does not say."""
    where = os.path.realpath(path)
    best: Mount | None = None
    try:
        with open("/proc/self/mountinfo", errors="surrogateescape") as listing:
            for line in listing:
                fields, _, rest = line.partition(" - ")
                point = fields.split()[4].encode("utf-8", "surrogateescape")
                mounted = point.decode("unicode_escape").encode("latin-1", "ignore")
                at = os.fsdecode(mounted)
                inside = where == at or where.startswith(at.rstrip("/") + "/")
                if inside and (best is None or len(at) >= len(best.point)):
                    best = Mount(at, rest.split()[0])
    except (OSError, IndexError, UnicodeError):
        return None
    return best


def is_shared_by_hosts(path: str) -> bool:
    """Whether processes of other hosts may use what is there; so it is where nobody knows."""
    mount = mount_of(path)
    return mount is None or mount.kind not in _ONE_HOSTS


def is_in_memory(path: str) -> bool:
    """Whether it lies in this host's memory, where no other host can reach it by any way."""
    mount = mount_of(path)
    return mount is not None and mount.kind in _IN_MEMORY
