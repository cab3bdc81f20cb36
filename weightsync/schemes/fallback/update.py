"""One update of a fallback, on its way through as many schemes as it takes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from weightsync.deadline import Deadline
from weightsync.errors import (
    DeadlineError,
    NoRoomError,
    SenderBusyError,
    SourceError,
    VersionError,
    WeightSyncError,
)
from weightsync.manifest import Manifest
from weightsync.report import ReceiverReport
from weightsync.schemes.fallback.again import Rereadable
from weightsync.schemes.fallback.answers import (
    Said,
    Sent,
    holds,
    is_alive,
    known_receivers,
    latest,
)
from weightsync.schemes.fallback.faults import FAULTS, Fault, words_of
from weightsync.schemes.fallback.route import Route
from weightsync.transport import Crew, Published
from weightsync.version import Version
from weightsync.words import one_line

log = logging.getLogger("weightsync")


class Update:
    """The attempts to send one version.

    Args:
        routes: all there are, whether they are tried or not: receivers are known there.
        receivers: whom the version is meant for; None for everybody.
        attempt_timeout: seconds for one attempt; None for an equal share of what is left.

    Attributes:
        used: the route that it goes through, or was tried last.
        sent: how it went.
        notes: what people should know of it.
    """

    def __init__(
        self,
        version: Version,
        weights: Rereadable,
        routes: Sequence[Route],
        deadline: Deadline,
        receivers: Sequence[str] | None,
        crew: Crew | None,
        attempt_timeout: float | None,
    ) -> None:
        self._version = version
        self._weights = weights
        self._routes = routes
        self._deadline = deadline
        self._receivers = receivers
        self._crew = crew
        self._attempt_timeout = attempt_timeout
        self._failed: list[tuple[Route, Exception]] = []
        self.used: Route | None = None
        self.sent = Sent()
        self.notes: list[str] = []

    def through(
        self,
        routes: Sequence[Route],
        *,
        reserve: Sequence[Route] = (),
        others: Sequence[Route] = (),
    ) -> Published:
        """Send it through the first route that works.

        Args:
            routes: to be tried in this order. The rest of them also leads to receivers that the
                first one does not lead to.
            reserve: to be tried if all of those fail before the deadline.
            others: not to be tried, but to lead to more receivers.

        Raises:
            SourceError, VersionError: as any publisher.
            WeightSyncError: no route works, of the kind of their errors if they agree.
        """
        for number, route in enumerate([*routes, *reserve]):
            if number >= len(routes) and self._deadline.expired:
                break
            self.used = route
            receivers = self._receivers
            if self._failed:
                known = known_receivers(self._routes)
                self.sent = replace(self.sent, before=known)
                receivers = self._lacking(known)
                if receivers is not None and not receivers:
                    # Nothing was lost but the word that all of them have it.
                    self.used = self._failed[-1][0]
                    return self._nothing_more()
            left = routes[number + 1 :]
            published = self._attempt(route, receivers, len(left))
            if published is not None:
                if not published.skipped:
                    published = self._sent_on(published, route, [*left, *others])
                notes = (*self.notes, *published.notes)
                return replace(
                    published, scheme=self._way(), fell_back=self._fell_back(), notes=notes
                )
        again = ", once more, the way it went before" if others else ""
        raise as_one(self._failed, f"version {self._version.number} could not be sent{again}")

    def note(self, words: str) -> None:
        self.notes.append(words)

    def _lacking(self, known: dict[str, Said]) -> Sequence[str] | None:
        """Those of the receivers that do not hold the version. None for everybody."""
        reports = {id: latest(said.values()) for id, said in known.items()}
        holders = {id for id, report in reports.items() if holds(report, self._version)}
        if not holders:
            return self._receivers
        alive = [id for id, report in reports.items() if is_alive(report)]
        wanted = alive if self._receivers is None else self._receivers
        return [id for id in wanted if id not in holders]

    # ---------------------------------------------------------------- one attempt

    def _attempt(
        self, route: Route, receivers: Sequence[str] | None, left: int
    ) -> Published | None:
        """Send it through a route. None if that failed: the route is broken then.

        Raises:
            SourceError, VersionError, ...: it failed for a reason that is none of the route's.
            WeightSyncError: it failed when other ranks of the trainer had begun to write.
        """
        deadline = self._share(left)
        crew = None if self._crew is None else _Relay(self._crew, route.name)
        try:
            route.make_ready(deadline, self._version.epoch)
        except FAULTS as error:
            self._fail(route, error)
            return None
        try:
            published = route.publisher.publish(
                self._version, self._weights.source, deadline, receivers, crew
            )
        except SourceError as error:
            if not self._failed:
                raise
            raise SourceError("; ".join([*self.notes, f"{route.name}: {error}"])) from error
        except VersionError:
            raise
        except FAULTS as error:
            if error is self._weights.error:
                raise
            self._fail(route, error)
            if crew is not None and crew.started:
                # They have left the update, or would take a second question for the first one.
                raise WeightSyncError(
                    f"{route.name} failed while every rank wrote its rows: {words_of(error)}; the "
                    "next update goes another way"
                ) from error
            return None
        route.fault = None
        if not published.skipped:
            self.sent = replace(self.sent, to={**self.sent.to, route.name: receivers})
        return published

    def _share(self, left: int) -> Deadline:
        """The time of an attempt, if so many other routes are left."""
        if not left:
            return self._deadline
        if self._attempt_timeout is not None:
            return self._deadline.at_most(self._attempt_timeout)
        return self._deadline.at_most(self._deadline.remaining / (left + 1))

    def _fail(self, route: Route, error: Exception) -> None:
        route.fault = Fault(error)
        self._failed.append((route, error))
        self.note(f"{route.name} failed: {route.fault}")
        log.warning("version %s: %s", self._version, one_line(self.notes[-1]))

    # ---------------------------------------------------------------- after it

    def _sent_on(self, published: Published, used: Route, left: list[Route]) -> Published:
        """Send it to those that did not get it: lost on the way, or known elsewhere only."""
        known = known_receivers(self._routes)
        lost = {report.receiver: report for report in published.failures}
        absent = self._absent(known, used, lost, published.served)
        while absent and left:
            route = left.pop(0)
            there = [id for id in absent if _is_there(known, id, route)]
            more = self._attempt_more(route, there, len(left)) if there else None
            if more is not None and not more.skipped:
                lost = {id: report for id, report in lost.items() if id not in there}
                lost.update({report.receiver: report for report in more.failures})
                absent = [id for id in absent if id not in there or id in lost]
        unreached = {id: self._why(known[id]) for id in absent if id not in lost}
        for id, why in unreached.items():
            self.note(f"receiver {id!r} is not reached: {why}")
        words = {id: report.error or "lost on the way" for id, report in lost.items()}
        self.sent = replace(self.sent, lost=words, unreached=unreached)
        return replace(published, failures=tuple(lost.values()))

    def _attempt_more(self, route: Route, receivers: Sequence[str], left: int) -> Published | None:
        """An attempt that raises nothing: the version is visible already."""
        if self._crew is not None:
            self.note(f"{route.name} was not tried: the other ranks write their rows only once")
            return None
        try:
            return self._attempt(route, receivers, left)
        except Exception as error:
            self.note(f"{route.name} was of no use: {words_of(error)}")
            return None

    def _absent(
        self,
        known: dict[str, Said],
        used: Route,
        lost: dict[str, ReceiverReport],
        served: Sequence[str] | None,
    ) -> list[str]:
        """Live receivers that this route did not lead to. Those that were lost and hold the
        version all the same are taken off the list of these."""
        # One that has just come to a transport that hands versions out was not handed this one.
        got = set(known if served is None else served)
        absent = []
        for id, said in known.items():
            report = latest(said.values())
            if self._receivers is not None and id not in self._receivers:
                continue
            if holds(report, self._version):
                lost.pop(id, None)
            elif is_alive(report) and (
                id in lost or id not in got or not _is_there(known, id, used)
            ):
                absent.append(id)
        return absent

    def _why(self, said: Said) -> str:
        """Why a receiver that said something in these ways could not be sent anything."""
        routes = [route for route in self._routes if route.name in said]
        faults = [f"{route.name} failed: {route.fault}" for route in routes if route.fault]
        names = ", ".join(route.name for route in routes)
        return f"it listens to {names} only" + "".join(f"; {fault}" for fault in faults)

    def _nothing_more(self) -> Published:
        manifest: Manifest = self._weights.source.manifest()
        self.note("every receiver has it all the same")
        nbytes, count = manifest.payload, len(manifest.tensors)
        return Published(
            nbytes,
            count,
            None,
            0.0,
            0.0,
            notes=tuple(self.notes),
            scheme=self._way(),
            fell_back=self._fell_back(),
        )

    def _way(self) -> str:
        """What it went through."""
        names = list(self.sent.to) or ([self.used.name] if self.used else [])
        return "+".join(names)

    def _fell_back(self) -> bool:
        return self._way() != self._routes[0].name


def _is_there(known: dict[str, Said], receiver: str, route: Route) -> bool:
    report = known.get(receiver, {}).get(route.name)
    return report is not None and is_alive(report)


class _Relay(Crew):
    """A crew that is told which route its tickets are for."""

    def __init__(self, crew: Crew, route: str) -> None:
        self._crew = crew
        self._route = route
        self.started = False

    def start(self, ticket: dict[str, Any]) -> None:
        self.started = True
        self._crew.start({"through": self._route, "ticket": ticket})

    def finish(self, deadline: Deadline) -> list[dict[str, Any]]:
        return self._crew.finish(deadline)


def as_one(failed: Sequence[tuple[Route, Exception]], what: str) -> WeightSyncError:
    """One error for those of all routes, of their kind if they agree."""
    words = "; ".join(f"{route.name}: {words_of(error)}" for route, error in failed)
    for kind in (DeadlineError, NoRoomError, SenderBusyError, VersionError):
        if all(isinstance(error, kind) for _, error in failed):
            return kind(f"{what}: {words}")
    return WeightSyncError(f"{what}: {words}")
