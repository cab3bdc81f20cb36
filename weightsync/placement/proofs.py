"""Which ends share a directory with the trainer, or reach it: found out by doing it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from weightsync.deadline import Deadline
from weightsync.errors import WeightSyncError
from weightsync.placement.ends import Answer, End, ask_all

_REACHING = 5.0
"""Seconds for one connection, which a firewall that drops packets would let wait for ever."""

_UNDOING = 5.0
"""Seconds to undo what was done, also when the time is up."""


@dataclass(frozen=True)
class Proof:
    """
    Attributes:
        holds: for each of the others, in order; True too for those that nobody could ask.
        words: what was done, and who said what of it.
        failed: the trainer did not get as far as the others.
        free: bytes of room in a directory; None: not known.
        port: where the trainer listened; None: nowhere.
    """

    holds: tuple[bool, ...]
    words: tuple[str, ...]
    free: int | None = None
    port: int | None = None
    failed: bool = False


def prove_shared(directory: str, sender: End, others: Sequence[End], deadline: Deadline) -> Proof:
    """Who reads in a directory what the trainer writes there."""
    question = {"directory": directory, "word": secrets.token_hex(16)}
    with _told(sender, {"op": "leave", **question}, "remove", deadline) as told:
        return _ask_others(
            others,
            {"op": "find", **question},
            told,
            deadline,
            did=f"wrote into {directory}",
            good="read it",
            bad="does not find it",
        )


def prove_reached(
    host: str, port: int | None, sender: End, others: Sequence[End], deadline: Deadline
) -> Proof:
    """Who connects to the trainer, at the very port that a scheme would use."""
    question = {"host": host, "port": port, "word": secrets.token_hex(16)}
    with _told(sender, {"op": "listen", **question}, "hush", deadline) as told:
        port = (told or {}).get("port", port)
        seconds = deadline.at_most(_REACHING).remaining
        return _ask_others(
            others,
            {"op": "reach", **question, "port": port, "seconds": seconds},
            told,
            deadline,
            did=f"listened at {host}",
            good="heard it",
            bad="does not",
        )


@contextmanager
def _told(
    sender: End, question: Answer, afterwards: str, deadline: Deadline
) -> Iterator[Answer | None]:
    """What the trainer's process says, in whose name something is undone at the end."""
    said = ask_all([sender], question, deadline)[0]
    try:
        yield None if said is None else said[0]
    finally:
        if said is not None:
            with suppress(WeightSyncError):  # who is gone has undone it, or nobody can
                ask_all([sender], {**question, "op": afterwards}, Deadline(_UNDOING))


def _ask_others(
    others: Sequence[End],
    question: Answer,
    told: Answer | None,
    deadline: Deadline,
    *,
    did: str,
    good: str,
    bad: str,
) -> Proof:
    if told is None:
        return Proof(
            (True,) * len(others),
            (f"nobody proved that the trainer {did}: it cannot be asked",),
            port=question.get("port"),
        )
    if "error" in told:
        why = f"it is not so that the trainer {did}: {told['error']}"
        return Proof((False,) * len(others), (why,), failed=True)
    holds, words = [], [f"the trainer {did}"]
    for end, said in zip(others, ask_all(others, question, deadline), strict=True):
        errors = [str(one["error"]) for one in said or () if "error" in one]
        holds.append(not errors)
        if said is None:
            words.append(f"{end.name} cannot be asked, and is trusted to")
        else:
            words.append(f"{end.name} {bad}: {errors[0]}" if errors else f"{end.name} {good}")
    return Proof(tuple(holds), tuple(words), told.get("free"), told.get("port"))
