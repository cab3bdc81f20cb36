"""What receivers say of themselves through several schemes, put together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from weightsync.deadline import Deadline
from weightsync.report import ReceiverReport
from weightsync.schemes.fallback.faults import FAULTS
from weightsync.schemes.fallback.route import Route
from weightsync.version import Version

_GONE = ("dead", "failed")
_NONE = Version(-1, -1)

_ARRIVING = 2.0
"""Seconds that a receiver has to find the scheme that was used: it may have just begun to look."""

Said = dict[str, ReceiverReport]
"""By the route's name: what one receiver said there."""


def known_receivers(routes: Iterable[Route]) -> dict[str, Said]:
    """What each receiver last said, wherever it is known."""
    known: dict[str, Said] = {}
    for route in routes:
        for id, report in route.receivers().items():
            known.setdefault(id, {})[route.name] = report
    return known


def latest(said: Iterable[ReceiverReport]) -> ReceiverReport:
    """The one that says most: of a live receiver, and of the newest version."""

    def order(report: ReceiverReport) -> tuple[bool, Version, Version]:
        held, tried = report.version or _NONE, report.attempted or _NONE
        return report.state not in _GONE, max(held, tried), held

    return max(said, key=order)


def is_alive(report: ReceiverReport) -> bool:
    return report.state not in _GONE


def holds(report: ReceiverReport, version: Version) -> bool:
    return report.version is not None and report.version >= version


@dataclass(frozen=True)
class Sent:
    """How the newest version was sent.

    Attributes:
        to: the routes that it went through, by name, with the receivers it was meant for there;
            None for everybody.
        before: what receivers had said of it before it went through them: no answer to it.
        lost: receivers that did not get it, and why.
        unreached: receivers that no working route led to, and why.
    """

    to: Mapping[str, Collection[str] | None] = field(default_factory=dict)
    before: Mapping[str, Said] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)
    unreached: Mapping[str, str] = field(default_factory=dict)

    def is_sent(self, receiver: str, route: str) -> bool:
        if route not in self.to:
            return False
        addressed = self.to[route]
        return addressed is None or receiver in addressed


class Answers:
    """The answers to one version, as they come in.

    Args:
        wanted: whose; None for those to whom it was sent and who are there.
        deadline: for all of them.
    """

    def __init__(
        self,
        version: Version,
        wanted: Sequence[str] | None,
        routes: Sequence[Route],
        sent: Sent,
        deadline: Deadline,
    ) -> None:
        self._version = version
        self._wanted = wanted
        self._routes = routes
        self._sent = sent
        self._arriving = deadline.at_most(_ARRIVING)
        self._said: dict[str, Said] = {}

    def look(self) -> list[ReceiverReport] | None:
        """All answers, or None while some are missing."""
        self._ask()
        reports = self.reports()
        complete = all(report.state != "waiting" or self._is_lost(report) for report in reports)
        return reports if reports and complete else None

    def reports(self) -> list[ReceiverReport]:
        """What is known now; who has not answered is ``waiting``."""
        wanted = self._wanted
        if wanted is None:
            wanted = [id for id, said in self._said.items() if self._counts(id, said)]
        return [self._judged(id) for id in wanted]

    def _ask(self) -> None:
        for route in self._routes:
            if not route.is_open:
                continue
            try:
                reports = route.publisher.wait_applied(self._version, Deadline(0))
            except FAULTS:
                continue
            there = {report.receiver: report for report in reports}
            for id, said in self._said.items():
                # A dead receiver is told of once, and one that has signed off no more.
                former = said.get(route.name)
                if former is None or id in there or not is_alive(former):
                    continue
                if not holds(former, self._version):
                    del said[route.name]
            for id, report in there.items():
                self._said.setdefault(id, {})[route.name] = report

    def _counts(self, id: str, said: Said) -> bool:
        if not said:
            return False  # signed off
        report = latest(said.values())
        if holds(report, self._version) or not is_alive(report):
            return True
        if id in self._sent.unreached or id in self._sent.lost:
            return True
        return any(self._sent.is_sent(id, route) for route in said)

    def _is_lost(self, report: ReceiverReport) -> bool:
        """Whether nothing is to be expected of it."""
        if report.receiver in self._sent.unreached:
            return self._arriving.expired
        return report.receiver in self._sent.lost

    def _judged(self, id: str) -> ReceiverReport:
        said = self._said.get(id)
        if said is None:
            return ReceiverReport(id, "waiting", error="never connected")
        if not said:
            return ReceiverReport(id, "dead", error="it has signed off")
        report = latest(said.values())
        if holds(report, self._version) or not is_alive(report):
            return report
        refusals = [r for route, r in said.items() if self._is_refusal(id, route, r)]
        if refusals:
            return latest(refusals)
        not_sent = {**self._sent.unreached, **self._sent.lost}.get(id)
        why = not_sent or report.error or "late"
        return replace(report, state="waiting", error=why)

    def _is_refusal(self, id: str, route: str, report: ReceiverReport) -> bool:
        """Whether it tried the version that came this way, and could not apply it."""
        answered = is_alive(report) and report.state != "waiting"
        # Also where it was said the other way: a scheme that it finds later is told again.
        old = report in self._sent.before.get(id, {}).values()
        return answered and not old and self._sent.is_sent(id, route)
