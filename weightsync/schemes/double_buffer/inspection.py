"""What a run of slots looks like from outside."""

from __future__ import annotations

import re
from functools import lru_cache, partial

from weightsync.errors import ManifestError
from weightsync.files import Directory
from weightsync.inspection import RunStatus, SlotStatus
from weightsync.manifest import Manifest
from weightsync.run.kind import RunKind
from weightsync.run.look import Look, lease_state
from weightsync.schemes.double_buffer import layout
from weightsync.schemes.double_buffer.layout import Commit
from weightsync.schemes.double_buffer.removal import remove_unread

_SLOT_LOCK = re.compile(r"slot\d{1,2}\.lock\Z", re.ASCII)


class SlotRuns(RunKind):
    """Runs of the double buffer: generations, and a head that says where the newest lies."""

    def recognises(self, run: Directory) -> bool:
        return bool(_generations(run))

    def inspect(self, run: Directory) -> RunStatus:
        look = Look(run)
        head = look.record(layout.HEAD, Commit.from_json)
        size = look.attempt(partial(_size, run, head.generation)) if head else None
        slots: list[SlotStatus] = []
        for name in _generations(run):
            slots += look.attempt(partial(_slots, look, name)) or []
        return look.status("shm", head, *(size or (0, 0)), slots)

    def leases(self, run: Directory) -> list[tuple[Directory, str]]:
        generations = [run.subdirectory(name) for name in _generations(run)]
        return [(g, name) for g in generations for name in g.names() if _SLOT_LOCK.match(name)]

    def remove(self, run: Directory) -> None:
        remove_unread(run)


def _generations(run: Directory) -> list[str]:
    return [name for name in run.names() if layout.generation_number(name) is not None]


def _size(run: Directory, generation: str) -> tuple[int, int]:
    """How many tensors the versions of a generation have, and their bytes."""
    data = run.subdirectory(generation).read(layout.MANIFEST, layout.MAX_MANIFEST)
    try:
        return _size_in(data)
    except ManifestError as error:
        raise ManifestError(f"{run.path}/{generation}/{layout.MANIFEST}: {error}") from None


@lru_cache(maxsize=4)  # one of 20,000 tensors takes longer than all the rest of a look
def _size_in(data: bytes) -> tuple[int, int]:
    manifest = Manifest.from_json(data)
    return len(manifest.tensors), manifest.payload


def _slots(look: Look, name: str) -> list[SlotStatus]:
    generation = look.run.subdirectory(name)
    found = []
    for number in range(layout.MAX_SLOTS):
        status = generation.status(layout.slot_bytes(number))
        if status is None:
            break
        record = look.record(layout.slot_record(number), Commit.from_json, generation)
        version = record.version if record else None
        state = lease_state(generation, layout.slot_lock(number))
        found.append(SlotStatus(name, number, version, state, status.st_size))
    return found
