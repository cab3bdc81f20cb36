"""The trainer's end of a fallback: each update goes through the first scheme that works."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from weightsync.deadline import Deadline
from weightsync.errors import WeightSyncError
from weightsync.manifest import Manifest
from weightsync.report import ReceiverReport
from weightsync.schemes.fallback.again import Rereadable
from weightsync.schemes.fallback.answers import Answers, Sent, known_receivers, latest
from weightsync.schemes.fallback.faults import FAULTS, Fault
from weightsync.schemes.fallback.route import Route
from weightsync.schemes.fallback.update import Update, as_one
from weightsync.source import Inventory, WeightSource
from weightsync.transport import Crew, Published, Publisher
from weightsync.version import Version, require_newer
from weightsync.words import one_line

log = logging.getLogger("weightsync")


class FallbackPublisher(Publisher):
    """See :class:`~weightsync.transport.Publisher`.

    All schemes are open at the same time, in one epoch, so that versions are ordered whichever way
    they came. One that cannot be opened, or fails, is left aside for ``retry_after`` seconds.
    """

    def __init__(
        self, routes: Sequence[Route], retry_after: float, attempt_timeout: float | None
    ) -> None:
        self._routes = routes
        self._retry_after = retry_after
        self._attempt_timeout = attempt_timeout
        self.takes_rows = all(route.publisher.takes_rows for route in routes)
        self._epoch: int | None = None
        self._last: Version | None = None
        self._used: Route | None = None
        self._sent = Sent()
        self._dead: set[str] = set()

    # ---------------------------------------------------------------- owning the runs

    def open(self, deadline: Deadline, epoch: int | None = None) -> int:
        epochs: dict[Route, int] = {}
        failed: list[tuple[Route, Exception]] = []
        for number, route in enumerate(self._routes):
            share = deadline.at_most(deadline.remaining / (len(self._routes) - number))
            route.ended = False
            try:
                epochs[route] = route.open(share, epoch)
            except FAULTS as error:
                failed.append((route, error))
        common = max(epochs.values(), default=0)
        for route, own in epochs.items():
            try:
                if own < common:
                    route.open(deadline, common)
                route.fault = None
            except FAULTS as error:
                failed.append((route, error))
        for route, cause in failed:
            self._set_aside(route, cause)
        if len(failed) == len(self._routes):
            raise as_one(failed, "no scheme can be used")
        self._epoch = common
        return common

    def prepare(self, manifest: Manifest, deadline: Deadline) -> None:
        for route in self._routes:
            if route.fault is not None:
                continue
            try:
                route.publisher.prepare(manifest, deadline)
                return  # the others make room when they are used
            except FAULTS as error:
                self._set_aside(route, error)
        faults = [(route, route.fault.error) for route in self._routes if route.fault]
        raise as_one(faults, "no scheme can be used")

    @staticmethod
    def _set_aside(route: Route, error: Exception) -> None:
        route.fault = Fault(error)
        log.warning("%s cannot be used: %s", route.name, one_line(route.fault))

    # ---------------------------------------------------------------- publishing

    def publish(
        self,
        version: Version,
        weights: WeightSource,
        deadline: Deadline,
        receivers: Sequence[str] | None = None,
        crew: Crew | None = None,
    ) -> Published:
        require_newer(version, self._require_open(), self._last)
        update = Update(
            version,
            Rereadable(weights.inventory()),
            self._routes,
            deadline,
            receivers,
            crew,
            self._attempt_timeout,
        )
        try:
            published = self._send(update, again=version == self._last)
        except WeightSyncError:
            raise
        except BaseException:
            # It may have become visible just before.
            self._last, self._used, self._sent = version, update.used, update.sent
            raise
        if published.skipped:
            return published
        if update.used is not self._used:  # it compared with another version than the last
            published = replace(published, changed=None)
        self._last, self._used, self._sent = version, update.used, update.sent
        died = self._died(update, receivers)
        return replace(published, failures=(*published.failures, *died))

    def _died(self, update: Update, receivers: Sequence[str] | None) -> list[ReceiverReport]:
        """Those that died since the last update where it was not sent: no scheme speaks of them."""
        known = known_receivers(self._routes)
        dead = {id for id, said in known.items() if latest(said.values()).state == "dead"}
        meant = dead if receivers is None else dead.intersection(receivers)
        unsaid = [id for id in meant - self._dead if not known[id].keys() & update.sent.to.keys()]
        self._dead = (self._dead & dead) | meant
        return [latest(known[id].values()) for id in sorted(unsaid)]

    def _send(self, update: Update, again: bool) -> Published:
        routes = list(self._routes)
        if again and self._used is not None:
            # Only there it is known whether these are the same weights.
            routes.remove(self._used)
            return update.through([self._used], others=routes)
        due = [route for route in routes if route.is_due(self._retry_after)]
        aside = [route for route in routes if route not in due]
        for route in aside:
            update.note(f"{route.name} is left aside: {route.fault}")
        return update.through(due, reserve=aside)

    def contribute(
        self, ticket: dict[str, Any], inventory: Inventory, deadline: Deadline
    ) -> dict[str, Any]:
        for route in self._routes:
            if route.name == ticket["through"]:
                return route.publisher.contribute(ticket["ticket"], inventory, deadline)
        raise WeightSyncError(f"rank 0 writes through {ticket['through']!r:.80}, unknown here")

    # ---------------------------------------------------------------- receivers

    def receivers(self) -> list[ReceiverReport]:
        self._require_open()
        return [latest(said.values()) for said in known_receivers(self._routes).values()]

    def wait_applied(
        self, version: Version, deadline: Deadline, receivers: Sequence[str] | None = None
    ) -> list[ReceiverReport]:
        self._require_open()
        answers = Answers(version, receivers, self._routes, self._sent, deadline)
        found = deadline.wait(answers.look)
        return answers.reports() if found is None else found

    def conclude(
        self, version: Version, deadline: Deadline, answered: Collection[str] = ()
    ) -> list[ReceiverReport]:
        self._require_open()
        said = [route.publisher.conclude(version, deadline, answered) for route in self._routes]
        return [report for reports in said for report in reports]

    # ---------------------------------------------------------------- the end

    def close(self) -> None:
        self._epoch = None
        for route in self._routes:
            route.end()

    def _require_open(self) -> int:
        if self._epoch is None:
            raise WeightSyncError("the publisher is not open")
        return self._epoch
