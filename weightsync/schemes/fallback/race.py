"""Asking several schemes for one version: the first one that has it is taken."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from weightsync.deadline import Deadline
from weightsync.errors import DeadlineError, VersionGoneError
from weightsync.schemes.fallback.faults import FAULTS
from weightsync.schemes.fallback.link import Link
from weightsync.transport import Snapshot
from weightsync.version import Version

_HEAD_START = 0.05
"""Seconds that a scheme has to answer before the next one is asked as well."""

_PAUSE = 0.05
"""Seconds before all are asked once more."""


def first_snapshot(
    links: Sequence[Link], version: Version, deadline: Deadline, patience: float = 0.0
) -> Snapshot:
    """Lease a version through whichever scheme has it.

    Args:
        patience: seconds to go on asking after a scheme that had it has failed.

    Raises:
        VersionGoneError: none has it. DeadlineError: none gave it in time. Otherwise what the
            first scheme that failed has raised.
    """
    if len(links) == 1:
        return links[0].snapshot(version, deadline)
    patient = deadline.at_most(patience)
    while True:
        try:
            return _Race(links, version, deadline).run()
        except VersionGoneError:
            raise
        except FAULTS:
            if patient.expired:
                raise
        time.sleep(min(_PAUSE, deadline.remaining))


class _Race:
    """One question to all. Each may take as long as it likes; nobody waits for the others.

    A scheme that still looks for what it was asked for the last time is asked when it is done.
    """

    def __init__(self, links: Sequence[Link], version: Version, deadline: Deadline) -> None:
        self._links = links
        self._version = version
        self._deadline = deadline
        self._asked = 0
        self._errors: list[tuple[Link, Exception]] = []
        self._won: Snapshot | None = None
        self._over = False
        self._changed = threading.Condition()

    def run(self) -> Snapshot:
        try:
            for link in self._links:
                self._asked += 1
                name = f"weightsync asks {link.name}"
                threading.Thread(target=self._ask, args=(link,), name=name, daemon=True).start()
                if self._wait(_HEAD_START):
                    break
            self._wait(self._deadline.remaining)
            with self._changed:
                won, self._won = self._won, None
                if won is None:
                    raise self._error()
                return won
        finally:
            with self._changed:
                self._over = True
                if self._won is not None:  # and we were interrupted
                    self._won.close()

    def _wait(self, seconds: float) -> bool:
        """Wait until there is a snapshot, or all that were asked have none."""

        def ready() -> bool:
            return self._won is not None or len(self._errors) == self._asked

        with self._changed:
            within = min(seconds, self._deadline.remaining, threading.TIMEOUT_MAX)
            self._changed.wait_for(ready, within)
            return self._won is not None

    def _ask(self, link: Link) -> None:
        while not link.asked.acquire(timeout=_PAUSE):
            if self._over:
                return
        try:
            if self._over:
                return
            snapshot = link.snapshot(self._version, self._deadline)
        except Exception as error:
            with self._changed:
                self._errors.append((link, error))
                self._changed.notify()
        else:
            with self._changed:
                if self._over or self._won is not None:
                    snapshot.close()
                else:
                    self._won = snapshot
                    self._changed.notify()
        finally:
            link.answered()

    def _error(self) -> Exception:
        late = self._asked - len(self._errors)
        others = [error for _, error in self._errors if not isinstance(error, VersionGoneError)]
        if others:
            return others[0]
        if late:
            return DeadlineError(
                f"version {self._version} did not come through "
                f"{', '.join(link.name for link in self._links)} within "
                f"{self._deadline.seconds:.1f} s"
            )
        return VersionGoneError("; ".join(f"{link.name}: {error}" for link, error in self._errors))
