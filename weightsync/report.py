"""What an update did: the reports that senders and receivers return."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from weightsync.version import Version
from weightsync.words import size

State = Literal["connected", "applied", "rolled back", "unusable", "failed", "dead", "waiting"]
"""Where a receiver stands.

``connected``: holds no version yet; ``applied``: holds the version reported; ``rolled back``: an
update failed and the engine holds the last good version; ``unusable``: an update failed and the
engine holds no whole version; ``failed``: its set-up failed; ``dead``: its process is gone;
``waiting``: it has not answered within the deadline.
"""


@dataclass(frozen=True)
class Seconds:
    """Wall-clock seconds of each phase; phases of several receivers are those of the slowest.

    A sender's report has all of them, ``apply`` and ``pause`` as its receivers have told it until
    then; 0 if none has. A receiver's has 0 for ``extract`` and ``transfer``, which the sender
    knows.
    """

    extract: float = 0.0
    """Trainer: getting the tensors out of the source (gathering, merging, walking the module)."""
    transfer: float = 0.0
    """Trainer: moving the bytes into the transport, digests included, until they are visible."""
    apply: float = 0.0
    """Engine: from beginning with the version to holding it, caches flushed. What it is longer
    than ``pause`` went into staging, while requests ran: opening and verifying the version, and
    once for each model looking how it is loaded."""
    pause: float = 0.0
    """Engine: the part of ``apply`` during which no request made progress."""
    total: float = 0.0
    """Sender: the whole call. Receiver: as ``apply``."""

    def __str__(self) -> str:
        each = {name: taken for name, taken in asdict(self).items() if name != "total" and taken}
        phases = ", ".join(f"{name} {taken * 1e3:.1f}" for name, taken in each.items())
        return f"{self.total * 1e3:.1f} ms" + f" ({phases})" * bool(phases)


@dataclass(frozen=True)
class EngineReport:
    """Where one engine of a receiver stands. Fields as in :class:`ReceiverReport`.

    ``dead`` here is an engine whose process is gone, while its receiver lives.
    """

    engine: str
    state: State
    version: Version | None = None
    attempted: Version | None = None
    error: str | None = None
    seconds: Seconds = field(default_factory=Seconds)

    def __str__(self) -> str:
        held = f"holds {self.version}" if self.version else "holds no version"
        words = f": {self.error}" if self.error else ""
        return f"engine {self.engine!r}: {self.state}, {held}{words}"


@dataclass(frozen=True)
class ReceiverReport:
    """What one receiver says of itself, and of the last version it tried.

    Attributes:
        version: the whole, confirmed version its engine holds, if any; of several engines the
            oldest that a living one holds.
        attempted: the last version it tried to apply, whatever came of it.
        error: its own words, when the last attempt or its set-up failed.
        engines: each of its engines.
    """

    receiver: str
    state: State
    version: Version | None = None
    attempted: Version | None = None
    error: str | None = None
    host: str = ""
    pid: int = 0
    seconds: Seconds = field(default_factory=Seconds)
    engines: tuple[EngineReport, ...] = ()

    @property
    def dead_engines(self) -> frozenset[str]:
        """Names of those of its engines that are gone, while it lives."""
        return frozenset(engine.engine for engine in self.engines if engine.state == "dead")

    @property
    def failed_last(self) -> bool:
        """Whether the last version that it tried is not the one it holds."""
        tried, held = self.attempted, self.version
        return tried is not None and (held is None or held < tried)

    def __str__(self) -> str:
        held = f"holds {self.version}" if self.version else "holds no version"
        words = f": {self.error}" if self.error else ""
        where = f"pid {self.pid} on {self.host}"
        several = self.engines if len(self.engines) > 1 else ()
        each = "; ".join(f"{e.engine!r} {e.state}, holds {e.version}" for e in several)
        engines = f" [{each}]" if each else ""
        return f"receiver {self.receiver!r} ({where}): {self.state}, {held}{engines}{words}"


@dataclass(frozen=True)
class SyncReport:
    """One update, as seen from the end that made it.

    Attributes:
        scheme: its name; of a fallback's, with what was used behind it: ``fallback:disk``.
        nbytes: bytes of the version, padding between tensors not counted.
        tensors: number of tensors sent; a tied pair counts once.
        changed: how many of them may differ from the version before. Counted over 1 MiB
            chunks, so small neighbours of a changed tensor count too; 0 means that not a bit
            changed. ``None`` where there is nothing to compare with, and in a receiver's report,
            which does not look for it.
        missing: names the engine has and the sender did not send (receivers, ``strict=False``).
        unexpected: names that were sent and the engine does not have (likewise).
        skipped: the sender found no free buffer and was told not to wait: nothing was published.
        receivers: what the receivers known at the end of the call said; of a receiver's own
            report, itself.
        notes: what else people should know of it (why a fallback was used, say).
        fell_back: another scheme was used than the first of a fallback's.
        lag: how many versions behind the receiver is that is furthest behind, among those that
            live and hold one. ``None`` where nobody was heard of: without ``wait="applied"``,
            ``max_lag=`` and attached receivers, and in a receiver's report.
    """

    version: Version
    scheme: str
    nbytes: int
    tensors: int
    changed: int | None
    seconds: Seconds
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    skipped: bool = False
    receivers: tuple[ReceiverReport, ...] = ()
    notes: tuple[str, ...] = ()
    fell_back: bool = False
    lag: int | None = None

    def __str__(self) -> str:
        if self.skipped:
            return f"version {self.version} by {self.scheme}: skipped, no buffer was free"
        states = Counter(receiver.state for receiver in self.receivers)
        told = "".join(f"; {count} {state}" for state, count in states.items())
        what = f"{self.tensors} tensors, {size(self.nbytes)}"
        return f"version {self.version} by {self.scheme}: {what}, {self.seconds}{told}"

    def behind(self) -> tuple[ReceiverReport, ...]:
        """The receivers that do not hold this version."""
        return tuple(r for r in self.receivers if r.version is None or r.version < self.version)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-able values, for logs."""
        return asdict(self)

    def metrics(self, prefix: str = "weightsync/") -> dict[str, int | float]:
        """Flat numbers, for wandb, tensorboard and the like.

        ``version`` (its number), ``bytes``, ``tensors``, ``seconds/...`` by phase,
        ``fallback`` and ``skipped`` (0 or 1); ``changed``, ``lag`` and ``receivers/...`` by state
        where they are known.
        """
        states = Counter(receiver.state for receiver in self.receivers)
        values: dict[str, int | float | None] = {
            "version": self.version.number,
            "bytes": self.nbytes,
            "tensors": self.tensors,
            "changed": self.changed,
            "lag": self.lag,
            "fallback": int(self.fell_back),
            "skipped": int(self.skipped),
            **{f"seconds/{phase}": taken for phase, taken in asdict(self.seconds).items()},
        }
        if self.receivers or self.lag is not None:  # else nobody was asked
            for state in get_args(State):
                values[f"receivers/{state.replace(' ', '_')}"] = states[state]
        return {f"{prefix}{name}": value for name, value in values.items() if value is not None}

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> SyncReport:
        """The report that :meth:`to_dict` made, also after a way through JSON."""
        fields = {**document, "version": Version(*document["version"])}
        fields["seconds"] = Seconds(**document["seconds"])
        fields["missing"] = tuple(document["missing"])
        fields["unexpected"] = tuple(document["unexpected"])
        fields["notes"] = tuple(document["notes"])
        fields["receivers"] = tuple(map(_receiver, document["receivers"]))
        return cls(**fields)


def _receiver(document: dict[str, Any]) -> ReceiverReport:
    engines = tuple(EngineReport(**_fields(engine)) for engine in document.get("engines", ()))
    return ReceiverReport(**{**_fields(document), "engines": engines})


def _fields(document: dict[str, Any]) -> dict[str, Any]:
    fields = {**document, "seconds": Seconds(**document["seconds"])}
    for name in ("version", "attempted"):
        fields[name] = Version(*document[name]) if document[name] else None
    return fields
