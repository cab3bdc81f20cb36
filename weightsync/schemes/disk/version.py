"""One version's directory, as it is written."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from weightsync.chunks import Copier, Digests
from weightsync.deadline import Deadline
from weightsync.errors import NoRoomError, WeightSyncError
from weightsync.files import FULL, Directory, Lock
from weightsync.schemes.disk import names
from weightsync.schemes.disk.commit import Commit, digest_of
from weightsync.schemes.disk.feed import write_all
from weightsync.schemes.disk.layout import Checkpoint
from weightsync.schemes.disk.writer import Target, VersionWriter
from weightsync.source import Inventory

if TYPE_CHECKING:
    from weightsync.schemes.disk import DiskScheme


@dataclass(frozen=True)
class Written:
    """A version whose bytes are written, and may not be on the disk yet.

    Attributes:
        extract: the seconds that the source took.
        finish: adds the record, and has everything on the disk.
    """

    digests: Digests
    digest: str
    extract: float
    finish: Callable[[Commit], None]


def write_shards(
    directory: Directory,
    checkpoint: Checkpoint,
    inventory: Inventory,
    copier: Copier,
    deadline: Deadline,
    *,
    direct: Callable[[int], bool],
    durable: bool,
) -> tuple[Digests, float]:
    """Write the files that hold the tensors, and nothing else.

    Args:
        direct: whether a file of so many bytes is written past the page cache.

    Returns:
        The digest of every chunk, and the seconds that the source took.

    Raises:
        NoRoomError: there is too little room. SourceError, DeadlineError: see
            :class:`~weightsync.intake.Intake`.
    """
    with ExitStack() as opened:
        targets = []
        for shard in checkpoint.layout.shards:
            targets.append(Target(directory, shard, direct(shard.size), durable))
            opened.callback(targets[-1].close)
        writer = VersionWriter(checkpoint, targets, copier, deadline)
        extract = write_all(writer, inventory, deadline)
        digests = writer.digests()
        copier.each(len(targets), lambda which: targets[which].finish())
    return digests, extract


def write_version(
    directory: Directory,
    checkpoint: Checkpoint,
    inventory: Inventory,
    copier: Copier,
    scheme: DiskScheme,
    deadline: Deadline,
) -> Written:
    """Write a version's files.

    Raises:
        NoRoomError: there is too little room. SourceError, DeadlineError: see
            :class:`~weightsync.intake.Intake`.
    """
    digests, extract = write_shards(
        directory,
        checkpoint,
        inventory,
        copier,
        deadline,
        direct=scheme.writes_direct,
        durable=scheme.durable,
    )
    files = {name: data for name, data in inventory.extras().items() if names.is_extra(name)}
    if checkpoint.index is not None:
        files[names.INDEX] = checkpoint.index
    files[names.LAYOUT] = checkpoint.layout.json
    files[names.DIGESTS] = digests.astype("<u8").tobytes()
    digest = digest_of(checkpoint.layout.json, digests)
    finish = partial(_finish, directory, files, copier, scheme.durable)
    return Written(digests, digest, extract, finish)


def _finish(
    directory: Directory,
    files: dict[str, bytes],
    copier: Copier,
    durable: bool,
    commit: Commit,
) -> None:
    try:
        Lock(directory, names.LEASE, create=True).release()
    except FileNotFoundError:
        raise removed(directory) from None
    files = {**files, names.RECORD: commit.to_json()}
    write = partial(_write, directory, durable=durable)
    work = list(files.items())
    copier.each(len(work), lambda number: write(*work[number]))
    if durable:
        directory.sync()


def _write(directory: Directory, name: str, data: bytes, durable: bool) -> None:
    """Write a new file. What is begun here is seen by nobody, so it need not be replaced whole."""
    fd = directory.open_file(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        with open(fd, "wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(fd)
    except OSError as error:
        if error.errno in FULL:
            raise NoRoomError(f"{directory.path}/{name}: {error.strerror}") from None
        raise WeightSyncError(f"{directory.path}/{name}: {error.strerror}") from error


def removed(directory: Directory) -> WeightSyncError:
    return WeightSyncError(f"{directory.path} was removed while the version was being written")
