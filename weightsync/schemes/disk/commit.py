"""What ``HEAD`` says: which version is newest."""

from __future__ import annotations

import json
from dataclasses import dataclass

import xxhash

from weightsync.chunks import Digests
from weightsync.run.records import (
    commit_to_json,
    number,
    read_addressees,
    read_version,
    reading,
    seconds,
    text,
)
from weightsync.schemes.disk.names import version_name
from weightsync.version import Version


@dataclass(frozen=True)
class Commit:
    """A version that is whole, and lies in the directory that is named after it.

    Attributes:
        digest: 128-bit XXH3 over the layout and the chunk digests.
        nbytes: of all its shards.
        receivers: ids of those the version is meant for; None for everybody.
        time: seconds since 1970, for people; nothing depends on it.
    """

    version: Version
    digest: str
    nbytes: int
    receivers: tuple[str, ...] | None
    time: float

    @property
    def directory(self) -> str:
        return version_name(self.version)

    def to_json(self) -> bytes:
        return commit_to_json(
            self.version,
            self.receivers,
            directory=self.directory,
            digest=self.digest,
            nbytes=self.nbytes,
            time=self.time,
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
                text(fields["digest"]),
                number(fields["nbytes"]),
                read_addressees(fields["receivers"]),
                seconds(fields["time"]),
            )
            if fields["directory"] != commit.directory:
                raise ValueError(f"{fields['directory']!r:.80} is not its directory")
        return commit


def digest_of(layout: bytes, digests: Digests) -> str:
    """One digest for the version: over all chunk digests, and what they are digests of."""
    state = xxhash.xxh3_128(xxhash.xxh3_128_digest(layout))
    state.update(digests.astype("<u8").tobytes())
    return state.hexdigest()
