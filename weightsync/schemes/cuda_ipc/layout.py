"""The files of a run, and what stands in them.

``head.json`` is there while a version may be read: it is made when the weights are final, and
removed before the trainer changes them. ``lease-EPOCH-NUMBER.lock`` is locked by those who read
that version. ``table-EPOCH-NUMBER.json``, of the version it was made for, says where the tensors
lie, and stays the same for as long as they stay where they are.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import xxhash

from weightsync.files import Directory
from weightsync.manifest import Manifest
from weightsync.run.records import (
    MAX_RECORD,
    commit_to_json,
    number,
    read_addressees,
    read_version,
    reading,
    seconds,
    text,
)
from weightsync.run.removal import remove_rest
from weightsync.schemes.cuda_ipc.handles import HANDLE_BYTES
from weightsync.version import Version

HEAD = "head.json"
MAX_TABLE = 1 << 30

_TABLE = re.compile(r"table-\d{1,19}-\d{1,19}\.json\Z", re.ASCII)
_LEASE = re.compile(r"lease-\d{1,19}-\d{1,19}\.lock\Z", re.ASCII)


def table_name(version: Version) -> str:
    return f"table-{version.epoch}-{version.number}.json"


def lease_name(version: Version) -> str:
    return f"lease-{version.epoch}-{version.number}.lock"


def is_table(name: str) -> bool:
    return bool(_TABLE.match(name))


def is_lease(name: str) -> bool:
    return bool(_LEASE.match(name))


@dataclass(frozen=True)
class Head:
    """The version that may be read now.

    Attributes:
        receivers: ids of those it is meant for; None for everybody.
        table: the file that says where its tensors lie. digest: of what stands in it.
        time: seconds since 1970, for people; nothing depends on it.
    """

    version: Version
    receivers: tuple[str, ...] | None
    table: str
    digest: str
    time: float

    def to_json(self) -> bytes:
        return commit_to_json(
            self.version, self.receivers, table=self.table, digest=self.digest, time=self.time
        )

    @classmethod
    def from_json(cls, data: bytes, what: str) -> Head:
        """
        Raises:
            ProtocolError: it is no head; says which file and why.
        """
        with reading(what):
            fields = json.loads(data)
            head = cls(
                read_version(fields),
                read_addressees(fields["receivers"]),
                text(fields["table"]),
                text(fields["digest"]),
                seconds(fields["time"]),
            )
            if not is_table(head.table):
                raise ValueError(f"no table is called {head.table!r:.80}")
        return head


@dataclass(frozen=True)
class Allocation:
    """Memory of the trainer's, as one piece.

    Attributes:
        handle: by which other processes map it; address: where the trainer itself has it.
    """

    handle: bytes
    nbytes: int
    address: int


@dataclass(frozen=True)
class Table:
    """Where the tensors of a manifest lie.

    Attributes:
        device: the identity of the GPU; process: the trainer's.
        places: for each tensor the number of its allocation, and where it begins in that.
            Of a tensor without bytes they mean nothing.
    """

    manifest: Manifest
    device: str
    process: str
    allocations: tuple[Allocation, ...]
    places: tuple[tuple[int, int], ...]

    def to_json(self) -> bytes:
        return json.dumps(
            {
                "manifest": self.manifest.to_json().decode(),
                "device": self.device,
                "process": self.process,
                "allocations": [[a.handle.hex(), a.nbytes, a.address] for a in self.allocations],
                "places": self.places,
            }
        ).encode()

    @classmethod
    def from_json(cls, data: bytes, what: str) -> Table:
        """
        Raises:
            ProtocolError, ManifestError: it is no table, or a tensor lies outside of what is
            shown; says which file and why.
        """
        with reading(what):
            fields = json.loads(data)
            table = cls(
                Manifest.from_json(text(fields["manifest"]).encode()),
                text(fields["device"]),
                text(fields["process"]),
                tuple(_allocation(*entry) for entry in fields["allocations"]),
                tuple((number(which), number(offset)) for which, offset in fields["places"]),
            )
            for spec, (which, offset) in zip(table.manifest.tensors, table.places, strict=True):
                if not spec.nbytes:
                    continue
                if offset % spec.dtype.itemsize:
                    raise ValueError(f"{spec.name!r:.200} begins in the middle of an element")
                if offset + spec.nbytes > table.allocations[which].nbytes:
                    raise ValueError(f"{spec.name!r:.200} does not lie within its memory")
        return table


def _allocation(handle: object, nbytes: object, address: object) -> Allocation:
    given = bytes.fromhex(text(handle))
    if len(given) != HANDLE_BYTES:
        raise ValueError(f"a handle has {HANDLE_BYTES} bytes, not {len(given)}")
    return Allocation(given, number(nbytes), number(address))


def digest_of(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def read_head(run: Directory) -> Head | None:
    """What may be read now; None: nothing."""
    try:
        return Head.from_json(run.read(HEAD, MAX_RECORD), f"{run.path}/{HEAD}")
    except FileNotFoundError:
        return None


def remove_weights(run: Directory) -> None:
    """Remove everything of ours but the records of who takes part."""
    run.discard(HEAD)
    for name in run.names():
        if is_table(name) or is_lease(name):
            run.discard(name)


def remove_run(run: Directory) -> None:
    remove_weights(run)
    remove_rest(run)
