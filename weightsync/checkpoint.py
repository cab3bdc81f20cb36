"""A version as a checkpoint of its own: a folder that ``from_pretrained`` and vLLM load.

It is written beside its place, under another name, and renamed when all of it is on the disk.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from weightsync.deadline import Deadline
from weightsync.errors import NoRoomError, SourceError, WeightSyncError
from weightsync.files import Directory, Lock, exchange
from weightsync.manifest import Manifest
from weightsync.schemes.disk import names
from weightsync.schemes.disk.layout import Checkpoint, is_portable
from weightsync.schemes.disk.publisher import write_copier
from weightsync.schemes.disk.version import write_shards
from weightsync.source import Inventory
from weightsync.transport import Snapshot

UNFINISHED = ".weightsync-export-"
"""What the name of a folder begins with while it is written; after it comes a random word."""

LOCK = "weightsync.lock"
"""In such a folder: locked by the process that writes it."""

_COMPANIONS = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
"""What the names of files end with that lie beside weights: configuration, tokenizer, code."""

_MAX_COMPANION = 1 << 28


@dataclass(frozen=True)
class Exported:
    """
    Attributes:
        path: of the folder. files: what is in it.
        nbytes: of all tensors.
    """

    path: str
    files: tuple[str, ...]
    tensors: int
    nbytes: int


def export(
    snapshot: Snapshot,
    path: Path,
    companions: Mapping[str, bytes],
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
    timeout: float = 3600.0,
    wrote: Callable[[int], None] = lambda nbytes: None,
) -> Exported:
    """Write a version, whole or not at all.

    Args:
        companions: small files by name that are to lie beside the weights.
        dtype: what floating-point tensors are cast to; None: they stay as they are.
        shard_bytes: a file of weights holds no more, unless one tensor does.
        overwrite: another checkpoint may lie at the path, and is replaced.
        wrote: called with the bytes that were taken since the last call.

    Raises:
        WeightSyncError: something is in the way. NoRoomError: there is too little room.
        DeadlineError: it took longer than ``timeout`` seconds. SourceError: safetensors has no
            such dtype. Nothing is left behind then.
    """
    _require_free(path, overwrite)
    manifest = _described(snapshot.manifest, dtype, _is_tied(companions))
    checkpoint = Checkpoint.plan(manifest, shard_bytes)
    deadline = Deadline(timeout)
    with _unfinished(path) as folder:
        _require_room(folder, checkpoint.layout.nbytes)
        inventory = _inventory(snapshot, manifest, wrote)
        copier = write_copier(None)
        try:
            write_shards(
                folder, checkpoint, inventory, copier, deadline, direct=_never, durable=True
            )
        finally:
            copier.close()
        files = {**companions, **({names.INDEX: checkpoint.index} if checkpoint.index else {})}
        for name, data in files.items():
            folder.replace(name, data, durable=True)
        found = tuple(name for name in folder.names() if name != LOCK)
        folder.sync()
        _put(folder, path, overwrite)
        folder.discard(LOCK)  # last: a folder that was left on the way can be told from one in use
    return Exported(str(path), found, len(manifest.tensors), manifest.payload)


def companions_in(folder: Path, dtype: torch.dtype | None = None) -> dict[str, bytes]:
    """The files of a model's folder that are not its weights.

    Args:
        dtype: what ``config.json`` is to say of the weights, if it says anything.

    Raises:
        WeightSyncError: there is no ``config.json``, or a file cannot be read.
    """
    found: dict[str, bytes] = {}
    try:
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if _is_companion(entry.name) and entry.is_file():
                if entry.stat().st_size > _MAX_COMPANION:
                    raise WeightSyncError(f"{entry.path} is too long for such a file")
                found[entry.name] = Path(entry.path).read_bytes()
    except OSError as error:
        raise WeightSyncError(f"{folder}: {error.strerror}") from None
    if "config.json" not in found:
        raise WeightSyncError(f"{folder}: there is no config.json")
    if dtype is not None:
        found["config.json"] = _saying(found["config.json"], dtype)
    return found


def _is_companion(name: str) -> bool:
    weights = name.endswith(".index.json") or name.startswith("weightsync.")
    return name.endswith(_COMPANIONS) and not weights


def _saying(config: bytes, dtype: torch.dtype) -> bytes:
    try:
        fields = json.loads(config)
    except (ValueError, RecursionError) as error:
        raise WeightSyncError(f"config.json: {error}") from None
    for name in ("dtype", "torch_dtype"):
        if isinstance(fields, dict) and name in fields:
            fields[name] = str(dtype).removeprefix("torch.")
    return json.dumps(fields, indent=2).encode()


def _never(nbytes: int) -> bool:
    """Direct writes are for trainers, who come back soon; this need not be the fastest."""
    return False


def _described(manifest: Manifest, dtype: torch.dtype | None, tied: bool) -> Manifest:
    """What the files hold: a tied tensor once, where the model that loads it ties it again."""
    specs = [*manifest.tensors]
    if not tied:
        specs += [replace(manifest.spec(name), name=name) for name in manifest.aliases]
    entries = []
    for spec in specs:
        kind = dtype if dtype is not None and spec.dtype.is_floating_point else spec.dtype
        if not is_portable(kind):
            raise SourceError(
                f"tensor {spec.name!r}: safetensors has no {kind}; --dtype casts it to another"
            )
        entries.append((spec.name, kind, spec.shape))
    return Manifest.build(entries, manifest.aliases if tied else {})


def _is_tied(companions: Mapping[str, bytes]) -> bool:
    """Whether a model of this configuration ties its embeddings, or may do so."""
    try:
        fields = json.loads(companions.get("config.json", b"{}"))
    except (ValueError, RecursionError):
        return True
    return not isinstance(fields, dict) or fields.get("tie_word_embeddings") is not False


def _inventory(snapshot: Snapshot, manifest: Manifest, wrote: Callable[[int], None]) -> Inventory:
    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for spec in manifest.tensors:
            yield spec.name, snapshot.tensor(spec.name)
            wrote(spec.nbytes)

    count = len(manifest.tensors)
    return Inventory(manifest, [None] * count, np.zeros(count, dtype=np.int64), stream)


def discard_unfinished(path: str) -> None:
    """Remove what a killed process has left half-written, if no living one is at it.

    Raises:
        WeightSyncError, OSError: it cannot be opened, or removed.
    """
    lock = Lock(Directory.open(path), LOCK)
    if lock.try_exclusive():
        _remove(path)
    lock.release()


# -------------------------------------------------------------------- its place


def _require_free(path: Path, overwrite: bool) -> None:
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        raise WeightSyncError(f"{path} is there, and is not a folder: it is not replaced")
    if not overwrite:
        raise WeightSyncError(f"{path} is there already (--force replaces another checkpoint)")
    entries = list(os.scandir(path))
    if any(entry.is_dir(follow_symlinks=False) for entry in entries):
        raise WeightSyncError(f"{path} has folders in it: no checkpoint, and it is not replaced")
    if entries and not any(entry.name.endswith(".safetensors") for entry in entries):
        raise WeightSyncError(f"{path} holds no safetensors files: it is not replaced")
    if any(entry.name in (names.RECORD, names.LAYOUT) for entry in entries):
        raise WeightSyncError(f"{path} is a version of a run: it is not replaced")


def _require_room(folder: Directory, needed: int) -> None:
    free = folder.free_bytes()
    if free < needed:
        place = os.path.dirname(folder.path)
        raise NoRoomError(f"{place}: the checkpoint needs {needed:,} bytes, {free:,} are free")


@contextmanager
def _unfinished(path: Path) -> Iterator[Directory]:
    """A folder beside the place, which is removed if it is not put there."""
    name = f"{path.parent}/{UNFINISHED}{secrets.token_hex(8)}"
    try:
        folder = Directory.open(name, create=True)
    except FileNotFoundError:
        raise WeightSyncError(f"{path}: there is no folder {path.parent}") from None
    lock = Lock(folder, LOCK, create=True)
    lock.try_exclusive()
    try:
        yield folder
    finally:
        with suppress(OSError):  # if all is well it is gone, or the former one's
            _remove(name)
        lock.release()
        folder.close()


def _put(folder: Directory, path: Path, overwrite: bool) -> None:
    """Give it its name, and let others read it as any folder that this user makes."""
    mask = os.umask(0o077)
    os.umask(mask)
    for name in folder.names():
        os.chmod(f"{folder.path}/{name}", 0o666 & ~mask)
    os.chmod(folder.path, 0o777 & ~mask)
    _require_free(path, overwrite)  # once more: writing takes a while
    try:
        if overwrite and os.path.lexists(path):
            _replace(str(path), folder.path)
        else:
            os.rename(folder.path, path)
    except OSError as error:
        raise WeightSyncError(f"{path}: {error.strerror}") from None
    folder.sync_name()


def _replace(former: str, new: str) -> None:
    """Have a folder take another one's place, which has its name then."""
    lock = Path(former, LOCK)
    lock.touch()  # by which it is known, if this process is killed now, for what nobody uses
    try:
        _change_places(former, new)
    except BaseException:
        lock.unlink(missing_ok=True)
        raise


def _change_places(path: str, other: str) -> None:
    with suppress(OSError):
        exchange(path, other)
        return
    # Not on this file system: for a moment there is nothing at the path. The name aside is none
    # that `clean` knows, as what has it then may be all there is.
    aside = f"{other}.former"
    os.rename(path, aside)
    try:
        os.rename(other, path)
    except BaseException:  # an interrupt too
        os.rename(aside, path)
        raise
    os.rename(aside, other)


def _remove(path: str) -> None:
    """Remove such a folder, its lock last: until then it is known for what it is."""
    for entry in list(os.scandir(path)):
        with suppress(FileNotFoundError):  # `clean` may be at it, too
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            elif entry.name != LOCK:
                os.unlink(entry.path)
    shutil.rmtree(path)
