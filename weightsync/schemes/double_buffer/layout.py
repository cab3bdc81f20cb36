"""The files of a run, and the small records in them. The format is in docs/architecture.md."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import xxhash

from weightsync.chunks import Digests
from weightsync.manifest import Manifest
from weightsync.run.records import (
    commit_to_json,
    is_temporary,
    number,
    read_addressees,
    read_version,
    reading,
    seconds,
    text,
)
from weightsync.version import Version

HEAD = "head.json"
MANIFEST = "manifest.json"
CREW = "crew"
"""Marks a generation into which several processes write: one of them may outlive the sender."""

MAX_MANIFEST = 1 << 30
MAX_SLOTS = 64

_GENERATION = re.compile(r"generation-(\d{4,9})\Z", re.ASCII)
_SLOT_FILE = re.compile(r"slot\d{1,2}\.(bin|lock|json|digests|progress)\Z", re.ASCII)


def generation_name(number: int) -> str:
    return f"generation-{number:04d}"


def generation_number(name: str) -> int | None:
    """The number in a generation's name; None for any other name."""
    match = _GENERATION.match(name)
    return int(match[1]) if match else None


def slot_bytes(slot: int) -> str:
    return f"slot{slot}.bin"


def slot_lock(slot: int) -> str:
    return f"slot{slot}.lock"


def slot_record(slot: int) -> str:
    """A copy of the commit that filled the slot. Removed before the slot is written again."""
    return f"slot{slot}.json"


def slot_digests(slot: int) -> str:
    """One little-endian 64-bit XXH3 for each chunk."""
    return f"slot{slot}.digests"


def slot_progress(slot: int) -> str:
    """How much of it is written; see :mod:`~weightsync.schemes.double_buffer.progress`."""
    return f"slot{slot}.progress"


def is_generation_file(name: str) -> bool:
    """Whether a file in a generation's directory is one of ours."""
    return name in (MANIFEST, CREW) or bool(_SLOT_FILE.match(name)) or is_temporary(name)


@dataclass(frozen=True)
class Commit:
    """What ``head.json`` says: the newest version, and where it lies.

    Attributes:
        digest: 128-bit XXH3 over the chunk digests and the manifest's fingerprint.
        receivers: ids of those the version is meant for; None for everybody.
        time: seconds since 1970, for people; nothing depends on it.
        attempt: of the write that it ends; see :mod:`~.progress`. 0: not known.
    """

    version: Version
    generation: str
    slot: int
    digest: str
    nbytes: int
    receivers: tuple[str, ...] | None
    time: float
    attempt: int = 0

    def to_json(self) -> bytes:
        return commit_to_json(
            self.version,
            self.receivers,
            generation=self.generation,
            slot=self.slot,
            digest=self.digest,
            nbytes=self.nbytes,
            time=self.time,
            attempt=self.attempt,
        )

    @classmethod
    def from_json(cls, data: bytes, what: str) -> Commit:
        """
        Raises:
            ProtocolError: it is not a commit; says which file and why.
        """
        with reading(what):
            fields = json.loads(data)
            commit = cls(
                read_version(fields),
                text(fields["generation"]),
                number(fields["slot"]),
                text(fields["digest"]),
                number(fields["nbytes"]),
                read_addressees(fields["receivers"]),
                seconds(fields["time"]),
                number(fields["attempt"]),
            )
            if generation_number(commit.generation) is None or commit.slot >= MAX_SLOTS:
                raise ValueError(f"no such place: {commit.generation!r:.80} slot {commit.slot}")
        return commit


def digest_of(manifest: Manifest, digests: Digests) -> str:
    """One digest for the version: over all chunk digests, and what they are digests of."""
    state = xxhash.xxh3_128(manifest.fingerprint.encode())
    state.update(digests.astype("<u8").tobytes())
    return state.hexdigest()
