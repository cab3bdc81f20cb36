"""The inference end on disk: watches the head and leases versions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.chunks import Copier
from weightsync.deadline import Deadline
from weightsync.errors import CorruptError, ProtocolError, VersionGoneError
from weightsync.files import Directory, Lock
from weightsync.report import ReceiverReport
from weightsync.run.membership import Membership
from weightsync.run.records import MAX_RECORD
from weightsync.schemes.disk import names
from weightsync.schemes.disk.commit import Commit
from weightsync.schemes.disk.layout import Layout
from weightsync.schemes.disk.snapshot import DiskSnapshot
from weightsync.transport import Snapshot, Subscriber
from weightsync.version import Version

if TYPE_CHECKING:
    from weightsync.schemes.disk import DiskScheme


class DiskSubscriber(Subscriber):
    """See :class:`~weightsync.transport.Subscriber`; the protocol is in docs/architecture.md."""

    def __init__(self, scheme: DiskScheme, receiver: str | None) -> None:
        path = scheme.reader_path or scheme.path
        self._member = Membership(path, receiver, names.HEAD, Commit.from_json)
        self._versions = VersionReader(Copier(scheme.threads), scheme.verify)

    def open(self, deadline: Deadline) -> None:
        self._member.open(deadline)

    def wait(self, after: Version | None, deadline: Deadline) -> Version | None:
        return self._member.wait(after, deadline)

    def acknowledge(self, report: ReceiverReport) -> None:
        self._member.acknowledge(report)

    def snapshot(self, version: Version, deadline: Deadline) -> Snapshot:
        self._member.reach(deadline)
        return self._versions.snapshot(self._member.directory(), version)

    def close(self) -> None:
        self._versions.close()
        self._member.leave()


class VersionReader:
    """Leases versions in a directory. Knows the last layout it has seen."""

    def __init__(self, copier: Copier, verified: bool) -> None:
        self._copier = copier
        self._verified = verified
        self._seen: tuple[bytes, Layout] | None = None

    def snapshot(self, run: Directory, version: Version) -> DiskSnapshot:
        """
        Raises:
            VersionGoneError: it is not there (any more). CorruptError, ProtocolError,
                ManifestError: its files are not what was written.
        """
        name = names.version_name(version)
        try:
            directory = run.subdirectory(name)
            lease = Lock(directory, names.LEASE)
        except FileNotFoundError:
            raise _gone(run, version) from None
        try:
            # Locked first, read then: what is there now stays while the lock is held.
            if not lease.try_shared():
                raise _gone(run, version)
            try:
                return self._open(directory, version, lease)
            except FileNotFoundError as error:
                if directory.status(names.RECORD) is not None:
                    missing = f"{directory.path}/{error.filename}"
                    raise CorruptError(f"{missing} is missing") from None
                raise _gone(run, version) from None
        except BaseException:
            lease.release()
            raise

    def leased(self, run: Directory, version: Version, lease: Lock) -> DiskSnapshot:
        """A version on which the caller has a lease already, which the snapshot takes over."""
        try:
            return self._open(run.subdirectory(names.version_name(version)), version, lease)
        except BaseException:
            lease.release()
            raise

    def _open(self, directory: Directory, version: Version, lease: Lock) -> DiskSnapshot:
        record = f"{directory.path}/{names.RECORD}"
        commit = Commit.from_json(directory.read(names.RECORD, MAX_RECORD), record)
        if commit.version != version:
            raise ProtocolError(f"{record} is of version {commit.version}")
        layout = self._layout(directory)
        return DiskSnapshot(directory, commit, layout, lease, self._copier, self._verified)

    def _layout(self, directory: Directory) -> Layout:
        data = directory.read(names.LAYOUT, names.MAX_LAYOUT)
        if self._seen is None or self._seen[0] != data:
            self._seen = data, Layout.from_json(data, f"{directory.path}/{names.LAYOUT}")
        return self._seen[1]

    def close(self) -> None:
        self._seen = None
        self._copier.close()


def _gone(run: Directory, version: Version) -> VersionGoneError:
    return VersionGoneError(
        f"{run.path} no longer holds version {version} (a greater keep= holds versions longer)"
    )
