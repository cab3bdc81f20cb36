"""One look at a run's directory: what can be read of it, and what could not be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from weightsync.errors import WeightSyncError
from weightsync.files import Directory, is_locked, lock_kinds
from weightsync.inspection import RunStatus, SlotStatus
from weightsync.report import ReceiverReport
from weightsync.run.ownership import has_ended, owner_of
from weightsync.run.receivers import read_receivers
from weightsync.run.records import MAX_RECORD, SENDER_LOCK
from weightsync.version import Version

T = TypeVar("T")


class Announced(Protocol):
    """What a head says, as far as it matters here."""

    @property
    def version(self) -> Version: ...

    @property
    def time(self) -> float: ...


class Look:
    """
    Attributes:
        problems: what could not be read so far, and why.
    """

    def __init__(self, run: Directory) -> None:
        self.run = run
        self.problems: list[str] = []

    def attempt(self, function: Callable[[], T]) -> T | None:
        """What a function returns; None: it did not find a file, or has a problem."""
        try:
            return function()
        except FileNotFoundError:
            pass
        except (OSError, WeightSyncError) as error:
            self.problems.append(str(error))
        return None

    def record(
        self, name: str, parse: Callable[[bytes, str], T], directory: Directory | None = None
    ) -> T | None:
        """What stands in a small file, by default of the run's own directory."""
        place = directory or self.run
        where = f"{place.path}/{name}"
        return self.attempt(lambda: parse(place.read(name, MAX_RECORD), where))

    def status(
        self,
        scheme: str,
        head: Announced | None,
        tensors: int = 0,
        nbytes: int = 0,
        slots: Sequence[SlotStatus] = (),
    ) -> RunStatus:
        alive, owner = self._sender()
        receivers: list[ReceiverReport] = self.attempt(lambda: read_receivers(self.run)) or []
        return RunStatus(
            scheme,
            self.run.path,
            head.version if head else None,
            alive,
            sender_words(owner),
            head.time if head else None,
            tensors,
            nbytes,
            tuple(slots),
            tuple(receivers),
            tuple(self.problems),
            sender_ended=has_ended(owner),
        )

    def _sender(self) -> tuple[bool | None, dict[str, Any]]:
        """Whether one is alive, and what the last one wrote of itself."""
        for _ in range(2):  # one that comes between the two questions is no dead one
            alive = self.attempt(lambda: is_locked(self.run, SENDER_LOCK))
            owner = owner_of(self.run)
            if alive is not False or has_ended(owner):
                break
        return alive, owner


def sender_words(owner: dict[str, object]) -> str:
    """Which process a sender says it is; what it wrote is not believed."""
    pid, host = owner.get("pid"), owner.get("host")
    return "" if pid is None else f"pid {pid!s:.20} on {host!s:.80}"


def lease_state(directory: Directory, name: str) -> str:
    """``free``, ``leased`` or ``written``, of a file that readers and writers lock.

    As far as this host's kernel lists locks: no lock is taken that others could run into.
    """
    status = directory.status(name)
    kinds = lock_kinds(status.st_ino) if status else set()
    return "written" if "WRITE" in kinds else "leased" if "READ" in kinds else "free"
