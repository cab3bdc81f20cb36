"""What a run looks like from outside: what is published, where, and who holds what.

What a scheme's ``inspect`` returns. Looking changes nothing, and needs neither end.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from weightsync.report import ReceiverReport
from weightsync.version import Version


@dataclass(frozen=True)
class SlotStatus:
    """A place that holds a version, or is there for one.

    Attributes:
        generation: the directory of the run that it lies in, or the file that describes it.
        slot: its number in there; None where a directory holds one version.
        version: the whole version it holds; None while it is written or was never written.
        state: ``free``, ``leased`` by readers, or ``written``: the sender is at it. Processes of
            other hosts, and of containers that this one does not see into, are not seen.
        nbytes: bytes it occupies; None where that is not known.
    """

    generation: str
    slot: int | None
    version: Version | None
    state: str
    nbytes: int | None

    @property
    def place(self) -> str:
        """Both as one text: ``generation-0001/slot0``."""
        return self.generation if self.slot is None else f"{self.generation}/slot{self.slot}"


@dataclass(frozen=True)
class Lag:
    """How far a receiver is behind the newest version.

    Attributes:
        versions: by their numbers; None: it holds none, or one of another sender's life.
        seconds: since the newest was committed; None: that is not known.
    """

    versions: int | None
    seconds: float | None


@dataclass(frozen=True)
class RunStatus:
    """A run at one moment.

    Attributes:
        scheme: its name in URLs. path: where the run is: a directory, or an address.
        version: the newest whole version; None if there is none yet.
        sender_alive: whether a live process owns the run; None: that cannot be seen.
        sender: which process owns it, or did last, in its own words; empty: not known.
        sender_ended: the last sender has ended by itself, and left the run: it was not killed.
        time: when the newest version was committed, in seconds since 1970.
        tensors, nbytes: of the newest version, padding not counted; 0 where that is not known.
        problems: what could not be read, and why.
        unseen: what cannot be known from outside, and why.
        members: of a fallback: what each of its schemes shows, in order of preference.
    """

    scheme: str
    path: str
    version: Version | None = None
    sender_alive: bool | None = None
    sender: str = ""
    time: float | None = None
    tensors: int = 0
    nbytes: int = 0
    slots: tuple[SlotStatus, ...] = ()
    receivers: tuple[ReceiverReport, ...] = ()
    problems: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    members: tuple[RunStatus, ...] = ()
    sender_ended: bool = False

    def lag(self, receiver: ReceiverReport, now: float) -> Lag | None:
        """How far behind a receiver is at a time; None: it holds the newest, or there is none."""
        newest, held = self.version, receiver.version
        if newest is None or (held is not None and held >= newest):
            return None
        same = held is not None and held.epoch == newest.epoch
        versions = newest.number - held.number if held is not None and same else None
        return Lag(versions, None if self.time is None else max(0.0, now - self.time))

    def to_dict(self, now: float | None = None) -> dict[str, Any]:
        """Plain JSON-able values.

        Args:
            now: seconds since 1970: each receiver has a ``lag`` then, as of that time.
        """
        document = asdict(self)
        document["members"] = [member.to_dict(now) for member in self.members]
        if now is not None:
            for entry, receiver in zip(document["receivers"], self.receivers, strict=True):
                lag = self.lag(receiver, now)
                entry["lag"] = None if lag is None else asdict(lag)
        return document
