"""What a fallback's runs look like from outside, as one."""

from __future__ import annotations

from collections.abc import Sequence

from weightsync.inspection import RunStatus
from weightsync.report import ReceiverReport
from weightsync.schemes.fallback.answers import latest


def as_one(members: Sequence[RunStatus]) -> RunStatus:
    """The newest version, wherever it is, and what each receiver said last, wherever it said it."""
    used = max(members, key=lambda member: (member.version is not None, member.version))
    alive = [member for member in members if member.sender_alive]
    known = any(member.sender_alive is not None for member in members)
    return RunStatus(
        "fallback",
        ", ".join(member.path for member in members),
        used.version,
        bool(alive) if known else None,
        next((member.sender for member in [*alive, *members] if member.sender), ""),
        used.time,
        used.tensors,
        used.nbytes,
        receivers=_receivers(members),
        members=tuple(members),
        sender_ended=not alive and _have_ended(members, used),
    )


def _have_ended(members: Sequence[RunStatus], used: RunStatus) -> bool:
    """Whether the last sender has: other runs may be of one before, if it could not use them."""
    if used.version is not None:
        return used.sender_ended
    said = [member.sender_ended for member in members if member.sender]  # a removed one: nothing
    return bool(said) and all(said)


def _receivers(members: Sequence[RunStatus]) -> tuple[ReceiverReport, ...]:
    said: dict[str, list[ReceiverReport]] = {}
    for member in members:
        for report in member.receivers:
            said.setdefault(report.receiver, []).append(report)
    return tuple(latest(reports) for reports in said.values())
