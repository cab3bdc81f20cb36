"""The files of a run, and the small records in them. The format is in docs/architecture.md."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from typing import Any

import xxhash

from weightsync.chunks import Digests
from weightsync.errors import ProtocolError
from weightsync.manifest import Manifest
from weightsync.report import ReceiverReport, Seconds
from weightsync.version import Version

HEAD = "head.json"
SENDER_LOCK = "sender.lock"
RECEIVERS = "receivers"
MANIFEST = "manifest.json"
CREW = "crew"
"""Marks a generation into which several processes write: one of them may outlive the sender."""

MAX_HEAD = 1 << 20
MAX_MANIFEST = 1 << 30
MAX_RECORD = 1 << 20
MAX_SLOTS = 64

_GENERATION = re.compile(r"generation-(\d{4,9})\Z", re.ASCII)
_SLOT_FILE = re.compile(r"slot\d{1,2}\.(bin|lock|json|digests)\Z", re.ASCII)
_TEMPORARY = re.compile(r"\..*\.\d+\.\d+\.tmp\Z", re.ASCII | re.DOTALL)
_ID = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
_RECEIVER_ID = re.compile(rf"{_ID}\Z", re.ASCII)
_RECEIVER_FILE = re.compile(
    rf"({_ID})\.(?:json|left|lock)\Z|\.({_ID})\.json\.\d+\.\d+\.tmp\Z", re.ASCII
)

_STATES = ("connected", "applied", "rolled back", "unusable", "failed")


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


def is_generation_file(name: str) -> bool:
    """Whether a file in a generation's directory is one of ours."""
    return name in (MANIFEST, CREW) or bool(_SLOT_FILE.match(name)) or is_temporary(name)


def is_temporary(name: str) -> bool:
    return bool(_TEMPORARY.match(name))


def is_receiver_id(text: str) -> bool:
    """Ids become file names, so only letters, digits, '.', '_' and '-'."""
    return bool(_RECEIVER_ID.match(text))


def receiver_of(name: str) -> str | None:
    """Whose record, lock or half-written record a file is; None if it is none of these."""
    match = _RECEIVER_FILE.match(name)
    return (match[1] or match[2]) if match else None


@dataclass(frozen=True)
class Commit:
    """What ``head.json`` says: the newest version, and where it lies.

    Attributes:
        digest: 128-bit XXH3 over the chunk digests and the manifest's fingerprint.
        receivers: ids of those the version is meant for; None for everybody.
        time: seconds since 1970, for people; nothing depends on it.
    """

    version: Version
    generation: str
    slot: int
    digest: str
    nbytes: int
    receivers: tuple[str, ...] | None
    time: float

    def to_json(self) -> bytes:
        return json.dumps(
            {
                "epoch": self.version.epoch,
                "number": self.version.number,
                "generation": self.generation,
                "slot": self.slot,
                "digest": self.digest,
                "nbytes": self.nbytes,
                "receivers": None if self.receivers is None else list(self.receivers),
                "time": self.time,
            }
        ).encode()

    @classmethod
    def from_json(cls, data: bytes, what: str) -> Commit:
        """
        Raises:
            ProtocolError: it is not a commit; says which file and why.
        """
        with _reading(what):
            fields = json.loads(data)
            receivers = fields["receivers"]
            if receivers is not None and not isinstance(receivers, list):
                raise TypeError(f"a list was expected, not {receivers!r:.80}")
            commit = cls(
                Version.parse([fields["epoch"], fields["number"]]),
                _text(fields["generation"]),
                _number(fields["slot"]),
                _text(fields["digest"]),
                _number(fields["nbytes"]),
                None if receivers is None else tuple(_text(name) for name in receivers),
                float(fields["time"]),
            )
            if generation_number(commit.generation) is None or commit.slot >= MAX_SLOTS:
                raise ValueError(f"no such place: {commit.generation!r:.80} slot {commit.slot}")
        return commit


def digest_of(manifest: Manifest, digests: Digests) -> str:
    """One digest for the version: over all chunk digests, and what they are digests of."""
    state = xxhash.xxh3_128(manifest.fingerprint.encode())
    state.update(digests.astype("<u8").tobytes())
    return state.hexdigest()


def report_to_json(report: ReceiverReport) -> bytes:
    return json.dumps(
        {
            "id": report.receiver,
            "host": report.host,
            "pid": report.pid,
            "state": report.state,
            "version": report.version,
            "attempted": report.attempted,
            "error": report.error,
            "apply": report.seconds.apply,
            "pause": report.seconds.pause,
            "time": time.time(),
        }
    ).encode()


def report_from_json(data: bytes, what: str) -> ReceiverReport:
    """
    Raises:
        ProtocolError: it is not a receiver's record; says which file and why.
    """
    with _reading(what):
        fields = json.loads(data)
        error = fields["error"]
        if fields["state"] not in _STATES:
            raise ValueError(f"no such state: {fields['state']!r:.80}")
        return ReceiverReport(
            _text(fields["id"]),
            fields["state"],
            _version(fields["version"]),
            _version(fields["attempted"]),
            None if error is None else _text(error),
            _text(fields["host"]),
            _number(fields["pid"]),
            Seconds(apply=float(fields["apply"]), pause=float(fields["pause"])),
        )


class _reading:
    """Turns whatever goes wrong with foreign JSON into one error that names the file."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        if isinstance(error, (ValueError, LookupError, TypeError, ArithmeticError, RecursionError)):
            name = type(error).__name__
            raise ProtocolError(f"{self._what} is malformed: {name}: {error!s:.200}") from None


def _version(value: Any) -> Version | None:
    return None if value is None else Version.parse(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a text was expected, not {value!r:.80}")
    return value


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise TypeError(f"a number was expected, not {value!r:.80}")
    return value
