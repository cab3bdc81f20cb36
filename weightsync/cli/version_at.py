"""A version that a run holds, leased for a command that reads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from weightsync.cli.target import require_scheme
from weightsync.errors import SchemeError, VersionGoneError, WeightSyncError

if TYPE_CHECKING:
    from weightsync.inspection import RunStatus
    from weightsync.scheme import WeightSyncScheme
    from weightsync.transport import Snapshot
    from weightsync.version import Version

Number = Annotated[
    str | None,
    typer.Option("--version", metavar="N", help="Which: its number, or EPOCH:NUMBER. [newest]"),
]

_SECONDS = 60.0
"""For a lease, and for an object store to hand out a version."""


@dataclasses.dataclass(frozen=True)
class Leased:
    """
    Attributes:
        folder: of this host, in which the version's files lie; None: it is in memory, or far away.
    """

    snapshot: Snapshot
    folder: str | None


@contextmanager
def version_at(target: str, wanted: str | None) -> Iterator[Leased]:
    """Lease a version of a run.

    Args:
        wanted: its number, or ``epoch:number``; None: the newest.

    Raises:
        SchemeError: runs of that scheme hold no version that could be read.
        VersionGoneError: there is no such version (any more); says which there are.
        CorruptError, ProtocolError, ManifestError: its records are not what was written.
    """
    from weightsync.deadline import Deadline

    scheme, status = _holder(require_scheme(target))
    version = _choose(status, wanted)
    if any(field.name == "verify" for field in dataclasses.fields(scheme)):  # type: ignore[arg-type]
        scheme = dataclasses.replace(scheme, verify=True)  # type: ignore[type-var]
    subscriber = scheme.create_subscriber()
    try:
        with subscriber.snapshot(version, Deadline(_SECONDS)) as snapshot:
            yield Leased(snapshot, _folder(scheme, version))
    finally:
        subscriber.close()


def _folder(scheme: WeightSyncScheme, version: Version) -> str | None:
    from weightsync.schemes.disk import DiskScheme

    local = isinstance(scheme, DiskScheme) and not scheme.is_remote
    return scheme.directory(version) if local else None  # type: ignore[attr-defined]


def _holder(scheme: WeightSyncScheme) -> tuple[WeightSyncScheme, RunStatus]:
    """The scheme whose run holds the newest version: of a fallback, one of its own.

    Raises:
        SchemeError: nothing but memory of its processes holds versions.
    """
    from weightsync.schemes.fallback import FallbackScheme

    if isinstance(scheme, FallbackScheme):
        readable = [each for each in scheme.schemes if each.url_scheme not in _KEEP_NO_COPY]
        found = [(each, status) for each in readable if (status := _shown(each)) is not None]
        if not found:
            raise VersionGoneError("none of the fallback's schemes holds a version to read")
        return max(found, key=lambda pair: (pair[1].version is not None, pair[1].version))
    if scheme.url_scheme in _KEEP_NO_COPY:
        raise SchemeError(f"{scheme.url_scheme}: {_KEEP_NO_COPY[scheme.url_scheme]}")
    return scheme, scheme.inspect()


_KEEP_NO_COPY = {
    "nccl": "versions are nowhere but in the memory of the receivers; receiver.verify_weights() "
    "looks there",
    "cuda-ipc": "the weights are the trainer's own, on its GPU; no copy is kept that could be read",
}


def _shown(scheme: WeightSyncScheme) -> RunStatus | None:
    try:
        return scheme.inspect()
    except (OSError, WeightSyncError):
        return None


def _choose(status: RunStatus, wanted: str | None) -> Version:
    from weightsync.version import Version

    if wanted is None:
        if status.version is None:
            words = "; ".join(status.problems) or "nothing was published there yet"
            raise VersionGoneError(f"{status.path}: {words}")
        return status.version
    held = {slot.version for slot in status.slots if slot.version is not None}
    if ":" in wanted:
        fits = {Version.parse(wanted)} & held
    else:
        fits = {version for version in held if str(version.number) == wanted}
    if not fits:
        there = ", ".join(str(version.number) for version in sorted(held)) or "none"
        raise VersionGoneError(f"{status.path} holds no version {wanted}; it holds: {there}")
    return max(fits)
