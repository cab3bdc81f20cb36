"""What goes wrong in a scheme, and is therefore no reason to stop."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic

FAULTS = (RuntimeError, OSError)
"""What a scheme raises when it cannot do its work: all errors of this library and of torch, and
those of the system. Anything else is an error in a program, and goes its way."""


def words_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:2000]


@dataclass(frozen=True)
class Fault:
    """What went wrong, and when, in seconds of the monotonic clock."""

    error: Exception
    since: float = field(default_factory=lambda: monotonic())

    @property
    def age(self) -> float:
        return monotonic() - self.since

    def __str__(self) -> str:
        return words_of(self.error)
