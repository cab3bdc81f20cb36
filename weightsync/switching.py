"""The run that a receiver is about to switch to, for as long as it may still stay where it is."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from weightsync.attempt import words_of
from weightsync.deadline import Deadline
from weightsync.engine import Update
from weightsync.errors import MismatchError, WeightSyncError
from weightsync.fleet import Fleet
from weightsync.manifest import Manifest
from weightsync.report import ReceiverReport
from weightsync.version import Version
from weightsync.words import one_line, without_secrets

if TYPE_CHECKING:
    from weightsync.scheme import WeightSyncScheme

log = logging.getLogger("weightsync")


class Destination:
    """Another run, which a receiver is in beside its own until one of the two is left.

    Args:
        id: of the receiver, in both runs.
        fleet: its engines, in its own run.
    """

    def __init__(self, scheme: WeightSyncScheme, id: str, fleet: Fleet) -> None:
        self.scheme = scheme
        self.url = scheme.for_workers(id).to_url()
        self.where = without_secrets(self.url)
        self.subscriber = scheme.create_subscriber(id)
        self.fleet = fleet.beside(self.url)
        self._from = fleet
        self._entered = self._joined = False

    def require_from(self, fleet: Fleet) -> None:
        """
        Raises:
            WeightSyncError: the receiver has other engines, or is in another run, by now.
        """
        if fleet is not self._from:
            raise WeightSyncError(f"{self.where}: the receiver was rebound, or switched, meanwhile")

    def enter(self, workers: int, deadline: Deadline) -> None:
        """Find the sender, and be known to it once ``join`` is done.

        Raises:
            DeadlineError: there is no live one. WeightSyncError: another receiver has the name.
        """
        self.subscriber.delegate(workers)
        self.subscriber.open(deadline)
        self._entered = True

    def join(self, status: ReceiverReport, deadline: Deadline) -> None:
        """Have the engines get ready, and say that they are.

        Args:
            status: of the receiver, in its own run.
        """
        self._joined = True
        self.fleet.join(deadline)
        self._say(status)

    def _say(
        self, status: ReceiverReport, tried: Version | None = None, words: str | None = None
    ) -> None:
        """It holds nothing of this run, whatever it holds of its own."""
        told = replace(
            status, state="connected", version=None, attempted=tried, error=words, engines=()
        )
        try:
            self.subscriber.acknowledge(told)
        except (WeightSyncError, OSError) as error:
            who = f"receiver {status.receiver}"
            log.warning("%s: %s cannot be told of it: %s", who, self.where, one_line(error))

    def newest(self, deadline: Deadline) -> Version | None:
        """Its newest version, as soon as there is one. None: at the deadline."""
        return self.subscriber.wait(None, deadline)

    def lease(self, version: Version, held: Update | None, deadline: Deadline) -> Update:
        """One of its versions, if it is of the architecture that the engines hold.

        Raises:
            VersionGoneError: there is a newer one. MismatchError: it is of another architecture.
        """
        snapshot = self.subscriber.snapshot(version, deadline)
        try:
            if held is not None:
                require_same_architecture(snapshot.manifest, held.snapshot.manifest, self.where)
        except BaseException:
            snapshot.close()
            raise
        return Update(self.url, version, snapshot)

    def give_up(
        self,
        status: ReceiverReport,
        tried: Version | None,
        error: BaseException,
        fleet: Fleet | None,
    ) -> None:
        """Leave it; its sender hears why, if it waits for an answer.

        Args:
            fleet: the receiver's, now; None if it has ended.
        """
        if self._entered:
            self._say(status, tried, f"it stays in its former run: {words_of(error)}"[:4000])
        self.subscriber.close()
        if self._joined:
            self.fleet.leave()
            if fleet is self._from:  # or the engines are another run's by now, or nobody's
                fleet.stay()


def require_same_architecture(there: Manifest, here: Manifest, where: str) -> None:
    """
    Args:
        there: of a version of another run. here: of the one that is held.

    Raises:
        MismatchError: names or shapes differ. Dtypes may, as far as the engine takes them.
    """
    sent, held = set(there.names()), set(here.names())
    missing = tuple(name for name in here.names() if name not in sent)
    unexpected = tuple(name for name in there.names() if name not in held)
    different = {
        name: (str(there.spec(name)), str(here.spec(name)))
        for name in there.names()
        if name in held and there.spec(name).shape != here.spec(name).shape
    }
    if not (missing or unexpected or different):
        return
    shapes = [f"{name!r}: {its} there, {ours} here" for name, (its, ours) in different.items()]
    parts = [
        _listed("differ in shape", shapes),
        _listed("are not there", list(map(repr, missing))),
        _listed("are not here", list(map(repr, unexpected))),
    ]
    raise MismatchError(
        f"{where} is of another architecture: {'; '.join(filter(None, parts))}",
        missing=missing,
        unexpected=unexpected,
        different=different,
    )


def _listed(what: str, items: list[str]) -> str:
    more = ", ..." if len(items) > 5 else ""
    return f"{len(items)} tensors {what} ({', '.join(items[:5])}{more})" if items else ""
