"""What an engine generated, and with which versions of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weightsync.errors import EngineUnusableError
from weightsync.version import Version

UNUSABLE = "unusable"
"""The label of an engine that holds no whole version."""


@dataclass(frozen=True)
class Span:
    """Tokens ``start`` to ``end - 1`` of an answer are of one version.

    Attributes:
        version: None before the first update.
    """

    version: Version | None
    start: int
    end: int


@dataclass(frozen=True)
class Answer:
    """What was generated for one prompt.

    Attributes:
        finish_reason: ``"length"``, ``"stop"``, ``"abort"``, ...
        logprobs: of each token, if they were asked for.
        oldest, newest: no token is of an older, or of a newer version; None before the first
            update, and where the engine knows no versions.
        spans: which tokens are of which version, where the engine reports it.
    """

    tokens: tuple[int, ...]
    finish_reason: str | None
    logprobs: tuple[float, ...] | None = None
    oldest: Version | None = None
    newest: Version | None = None
    spans: tuple[Span, ...] | None = None


def versions_of(labels: Sequence[str], who: str) -> list[Version | None]:
    """The versions that an engine's labels stand for; None for those that are not ours.

    Raises:
        EngineUnusableError: a label says that the engine holds no whole version.
    """
    if UNUSABLE in labels:
        raise EngineUnusableError(
            f"{who} holds no whole version since an update failed, which its receiver's status() "
            "says more of; the next full update recovers it"
        )
    return [_version_of(label) for label in labels]


def _version_of(label: str) -> Version | None:
    try:
        return Version.parse(label)
    except ValueError:
        return None
