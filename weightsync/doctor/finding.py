"""What a check is asked, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from weightsync.scheme import WeightSyncScheme

State = Literal["ok", "warning", "problem", "not applicable"]
"""``warning``: it works, and something may surprise. ``problem``: something will not work."""


@dataclass(frozen=True)
class Subject:
    """What is examined.

    Attributes:
        path: of a run's directory, which need not exist yet.
        scheme: the one that is going to be used; None: any.
        nbytes: of the model's weights; None: not known.
    """

    path: str = "/dev/shm"
    scheme: WeightSyncScheme | None = None
    nbytes: int | None = None


@dataclass(frozen=True)
class Finding:
    """
    Attributes:
        check: what was looked at, in two or three words.
        words: what was found.
        remedy: what to do about it, in one sentence; None: nothing is to be done.
    """

    check: str
    state: State
    words: str
    remedy: str | None = None


def ok(check: str, words: str) -> Finding:
    return Finding(check, "ok", words)


def warning(check: str, words: str, remedy: str) -> Finding:
    return Finding(check, "warning", words, remedy)


def problem(check: str, words: str, remedy: str) -> Finding:
    return Finding(check, "problem", words, remedy)


def not_applicable(check: str, words: str) -> Finding:
    return Finding(check, "not applicable", words)
