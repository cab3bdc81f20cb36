"""What a run of versions on disk looks like from outside."""

from __future__ import annotations

from functools import lru_cache, partial

from weightsync.files import Directory
from weightsync.inspection import RunStatus, SlotStatus
from weightsync.run.kind import RunKind
from weightsync.run.look import Look, lease_state
from weightsync.schemes.disk import names
from weightsync.schemes.disk.commit import Commit
from weightsync.schemes.disk.layout import Layout
from weightsync.schemes.disk.retention import is_whole, remove_run, sweep, versions
from weightsync.version import Version


class VersionRuns(RunKind):
    """Runs of versions in directories of their own, and a head that says which is newest."""

    keeps = True

    def recognises(self, run: Directory) -> bool:
        found = run.names()
        return any(names.version_of(n) or names.is_unfinished(n) or n == names.HEAD for n in found)

    def inspect(self, run: Directory) -> RunStatus:
        look = Look(run)
        head = look.record(names.HEAD, Commit.from_json)
        size = look.attempt(partial(_size, run, head)) if head else None
        found = [look.attempt(partial(_version, look, version)) for version in versions(run)]
        under_way = filter(names.is_unfinished, run.names())
        unfinished = [SlotStatus(name, None, None, "written", None) for name in under_way]
        slots = [slot for slot in found if slot is not None] + unfinished
        return look.status("disk", head, *(size or (0, 0)), slots)

    def leases(self, run: Directory) -> list[tuple[Directory, str]]:
        found = run.names()
        folders = [n for n in found if names.version_of(n) is not None or names.is_unfinished(n)]
        return [(run.subdirectory(name), names.LEASE) for name in folders]

    def remove(self, run: Directory) -> None:
        remove_run(run)

    def unfinished(self, run: Directory) -> list[str]:
        halves = [names.version_name(v) for v in versions(run) if not is_whole(run, v)]
        return halves + list(filter(names.is_unfinished, run.names()))

    def sweep(self, run: Directory) -> None:
        sweep(run, None)


def _version(look: Look, version: Version) -> SlotStatus:
    name = names.version_name(version)
    directory = look.run.subdirectory(name)
    record = look.record(names.RECORD, Commit.from_json, directory)
    nbytes = record.nbytes if record else None
    state = lease_state(directory, names.LEASE)
    return SlotStatus(name, None, record.version if record else None, state, nbytes)


def _size(run: Directory, head: Commit) -> tuple[int, int]:
    """How many tensors a version has, and their bytes."""
    directory = run.subdirectory(head.directory)
    data = directory.read(names.LAYOUT, names.MAX_LAYOUT)
    return _size_in(data, f"{directory.path}/{names.LAYOUT}")


@lru_cache(maxsize=4)  # one of 20,000 tensors takes longer than all the rest of a look
def _size_in(layout: bytes, where: str) -> tuple[int, int]:
    manifest = Layout.from_json(layout, where).manifest
    return len(manifest.tensors), manifest.payload
