"""The inference end of a fallback: listens to all of its schemes, and takes what is newest."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Sequence

from weightsync.deadline import Deadline
from weightsync.errors import DeadlineError, ProtocolError, VersionGoneError, WeightSyncError
from weightsync.report import ReceiverReport
from weightsync.schemes.fallback.faults import FAULTS
from weightsync.schemes.fallback.link import Link
from weightsync.schemes.fallback.race import first_snapshot
from weightsync.transport import Snapshot, Subscriber
from weightsync.version import Version

_BETTER = 0.5
"""Seconds that ``open`` gives the schemes that are preferred to the one that is there."""

_ALL = 0.05
"""Seconds that it gives the others: what they have is then seen at the first look."""

_ELSEWHERE = 30.0
"""Seconds that a worker waits for a version, of which one scheme has lost its copy, to come by
another one."""


class FallbackSubscriber(Subscriber):
    """See :class:`~weightsync.transport.Subscriber`. Works as soon as one scheme has a sender.

    A version is the same whichever way it comes: one that the receiver holds is not new when it
    comes once more.
    """

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = links
        self._stop = threading.Event()
        self._opened = False

    def delegate(self, workers: int) -> None:
        for link in self._links:
            link.subscriber.delegate(workers)

    def open(self, deadline: Deadline) -> None:
        self._stop.set()
        self._stop = threading.Event()
        # The threads that look for senders know nothing of this object, and end with it.
        weakref.finalize(self, self._stop.set)
        for link in self._links:
            link.look_for_sender(self._stop)

        def attempt() -> bool | None:
            settled = all(link.settled for link in self._links)
            return bool(self._attached()) or settled or None

        deadline.wait(attempt)
        if not self._attached():
            self._stop.set()
            self._raise_unreached(deadline)
        self._opened = True
        better = self._links[: self._links.index(self._attached()[0])]
        deadline.at_most(_BETTER).wait(lambda: all(link.settled for link in better) or None)
        deadline.at_most(_ALL).wait(lambda: all(link.settled for link in self._links) or None)

    def _raise_unreached(self, deadline: Deadline) -> None:
        errors = [f"{link.name}: {link.error}" for link in self._links if link.error]
        if len(errors) == len(self._links):
            raise WeightSyncError("; ".join(errors))
        names = ", ".join(link.name for link in self._links)
        raise DeadlineError(
            f"no live sender through {names} within {deadline.seconds:.1f} s: is its connect() "
            f"done, and are the schemes the same on both sides? {'; '.join(errors)}".rstrip()
        )

    def _attached(self) -> list[Link]:
        return [link for link in self._links if link.attached]

    # ---------------------------------------------------------------- control

    def wait(self, after: Version | None, deadline: Deadline) -> Version | None:
        self._require_open()
        return deadline.wait(lambda: self._newer(after))

    def _newer(self, after: Version | None) -> Version | None:
        offered: list[Version] = []
        errors: list[Exception] = []
        links = self._attached()
        for link in links:
            try:
                version = link.newest()
            except FAULTS as error:
                link.complain(error)
                errors.append(error)
                continue
            if version is not None:
                offered.append(version)
        if errors and len(errors) == len(links):
            raise errors[0]
        newest = max(offered, default=None)
        if newest is None or after is None or newest > after:
            return newest
        # In one scheme it may be what a sender's predecessor left there.
        if newest.epoch < after.epoch and len(offered) == len(self._links):
            raise ProtocolError(
                f"version {newest} comes from a sender whose clock is behind that of {after}, "
                "which is held; start it again with a right clock"
            )
        return None

    def acknowledge(self, report: ReceiverReport) -> None:
        errors: list[Exception] = []
        for link in self._links:
            try:
                link.acknowledge(report)
            except FAULTS as error:
                link.complain(error)
                errors.append(error)
        self._require_open()
        if errors and len(errors) >= len(self._attached()):
            raise errors[0]

    # ---------------------------------------------------------------- data

    def snapshot(self, version: Version, deadline: Deadline) -> Snapshot:
        if not self._opened:  # a reader: who announced the version is not known here
            return first_snapshot(self._links, version, deadline, _ELSEWHERE)
        try:
            return first_snapshot(self._offering(version), version, deadline)
        except FAULTS as error:
            if deadline.expired or isinstance(error, VersionGoneError):
                raise
            # A sender that noticed goes on with the next scheme: it is worth looking again.
            raise VersionGoneError(f"version {version} did not arrive: {error}") from error

    def _offering(self, version: Version) -> list[Link]:
        """The schemes in which it is the newest version; if there are none, any may have it."""
        for look_again in (False, True):
            if look_again:
                with contextlib.suppress(*FAULTS):
                    self._newer(None)
            offering = [link for link in self._links if link.offers(version)]
            if offering:
                return offering
        return self._attached()

    # ---------------------------------------------------------------- the end

    def close(self) -> None:
        self._stop.set()
        self._opened = False
        for link in self._links:
            link.close()

    def _require_open(self) -> None:
        if not self._opened:
            raise WeightSyncError("the subscriber is not open")
