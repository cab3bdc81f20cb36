"""Several schemes in order of preference: each update goes through the first one that works.

A scheme that fails, or is late, is left aside for a while and the update goes on with the next one
in the same call. Receivers listen to all of them, so nobody has to tell them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import quote, unquote

from weightsync.errors import SchemeError, WeightSyncError
from weightsync.inspection import RunStatus
from weightsync.scheme import (
    WeightSyncScheme,
    register_scheme,
    scheme_from_dict,
    scheme_from_url,
)
from weightsync.schemes.fallback.faults import FAULTS, words_of
from weightsync.schemes.fallback.inspection import as_one
from weightsync.schemes.fallback.link import Link
from weightsync.schemes.fallback.publisher import FallbackPublisher
from weightsync.schemes.fallback.route import Route
from weightsync.schemes.fallback.subscriber import FallbackSubscriber
from weightsync.transport import Publisher, Subscriber
from weightsync.words import a_kind, one_line, without_secrets

__all__ = ["FallbackScheme"]

log = logging.getLogger("weightsync")

_SEPARATORS = {",": "%2C", ";": "%3B"}


@register_scheme
@dataclass(frozen=True)
class FallbackScheme(WeightSyncScheme):
    """The first scheme that works, per update.

    URL: ``fallback://nccl://10.0.0.5:29500,disk:///mnt/run42?keep=3;retry_after=30``. The URLs of
    the schemes are written as they are, with a comma between them; a comma or semicolon inside one
    is written ``%2C`` or ``%3B``. Options of the fallback's own follow a semicolon.

    Attributes:
        schemes: the most preferred first; schemes, their URLs, or their dicts.
        retry_after: seconds after which a scheme that failed is tried again.
        attempt_timeout: seconds that one scheme may take for an update before the next one is
            tried. None: an equal share of what is left of the update's own deadline.
    """

    url_scheme: ClassVar[str] = "fallback"

    schemes: Sequence[WeightSyncScheme]
    retry_after: float = 60.0
    attempt_timeout: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.schemes, (str, bytes)) or not isinstance(self.schemes, Sequence):
            raise SchemeError(f"schemes={self.schemes!r:.80}: a list of schemes was expected")
        schemes = tuple(map(_scheme, self.schemes))
        if not schemes:
            raise SchemeError("schemes=[]: at least one was expected")
        if len(set(schemes)) < len(schemes):
            raise SchemeError("schemes=: the same one is given twice")
        object.__setattr__(self, "schemes", schemes)
        _require_seconds("retry_after", self.retry_after)
        if self.attempt_timeout is not None:
            _require_seconds("attempt_timeout", self.attempt_timeout)
            if self.attempt_timeout == 0:
                raise SchemeError("attempt_timeout=0: no scheme could do anything")

    @property
    def names(self) -> tuple[str, ...]:
        """What reports call the schemes: ``nccl``, ``disk``; ``shm#2`` is the second of a kind."""
        kinds = [scheme.url_scheme for scheme in self.schemes]
        return tuple(
            kind if kind not in kinds[:n] else f"{kind}#{kinds[: n + 1].count(kind)}"
            for n, kind in enumerate(kinds)
        )

    # ---------------------------------------------------------------- ends

    def purpose(self) -> str:
        return "fallback://" + ",".join(scheme.purpose() for scheme in self.schemes)

    def create_publisher(self) -> Publisher:
        routes = [Route(n, s) for n, s in zip(self.names, self.schemes, strict=True)]
        return FallbackPublisher(routes, self.retry_after, self.attempt_timeout)

    def create_subscriber(self, receiver: str | None = None) -> Subscriber:
        subscribers = [scheme.create_subscriber(receiver) for scheme in self.schemes]
        return FallbackSubscriber(list(map(Link, self.names, subscribers)))

    def for_workers(self, receiver: str) -> FallbackScheme:
        schemes = [scheme.for_workers(receiver) for scheme in self.schemes]
        return FallbackScheme(schemes, self.retry_after, self.attempt_timeout)

    def create_reader(self, rank: int, size: int) -> Subscriber:
        links: list[Link] = []
        failed: list[Exception] = []
        for name, scheme in zip(self.names, self.schemes, strict=True):
            try:
                links.append(Link(name, scheme.create_reader(rank, size)))
            except FAULTS as error:  # a worker without a GPU, say
                log.warning("%s is of no use here: %s", name, one_line(words_of(error)))
                failed.append(error)
        if not links:
            raise failed[0]
        return FallbackSubscriber(links)

    def inspect(self) -> RunStatus:
        """What each of its schemes shows, and all of them together. See ``RunStatus.members``."""
        return as_one([_shown(scheme) for scheme in self.schemes])

    # ---------------------------------------------------------------- URL and dict

    def _options(self) -> dict[str, Any]:
        return {**super()._options(), "schemes": [scheme.to_dict() for scheme in self.schemes]}

    def address(self) -> tuple[str, str]:
        return ",".join(_escaped(scheme.to_url()) for scheme in self.schemes), ""

    def where(self) -> str:
        return f"{self.url_scheme}://{','.join(scheme.where() for scheme in self.schemes)}"

    def to_url(self) -> str:
        beginning = f"{self.url_scheme}://{self.address()[0]}"
        options = super().to_url().removeprefix(beginning)
        return beginning + options.replace("?", ";", 1)

    @classmethod
    def from_url(cls, url: str) -> WeightSyncScheme:
        schemes, _, options = url.partition(":")[2].removeprefix("//").partition(";")
        # What follows is read like any scheme's URL, with all of the schemes for its host.
        return super().from_url(f"{cls.url_scheme}://{quote(schemes, safe='')}?{options}")

    @classmethod
    def from_address(cls, host: str, path: str, options: dict[str, Any]) -> FallbackScheme:
        return cls([scheme_from_url(url) for url in unquote(host).split(",")], **options)


def _scheme(value: object) -> WeightSyncScheme:
    if isinstance(value, str):
        value = scheme_from_url(value)
    elif isinstance(value, dict):
        value = scheme_from_dict(value)
    if not isinstance(value, WeightSyncScheme):
        raise SchemeError(f"{a_kind(value)} is not a scheme: {value!r:.80}")
    if isinstance(value, FallbackScheme):
        raise SchemeError("a fallback in a fallback: list its schemes in the outer one")
    return value


def _shown(scheme: WeightSyncScheme) -> RunStatus:
    try:
        return scheme.inspect()
    except (OSError, WeightSyncError) as error:
        where = without_secrets("".join(scheme.address()))
        if isinstance(error, FileNotFoundError):
            return RunStatus(scheme.url_scheme, where, sender_alive=False)
        return RunStatus(scheme.url_scheme, where, problems=(str(error),))


def _escaped(url: str) -> str:
    for character, code in _SEPARATORS.items():
        url = url.replace(character, code)
    return url


def _require_seconds(name: str, value: object) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or math.isnan(value) or value < 0:  # type: ignore[arg-type, operator]
        raise SchemeError(f"{name}={value!r}: a number of seconds, not negative")
