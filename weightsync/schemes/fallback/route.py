"""One scheme of a fallback, as the sender uses it: whether it works, and if not, why."""

from __future__ import annotations

import contextlib

from weightsync.deadline import Deadline
from weightsync.errors import WeightSyncError
from weightsync.report import ReceiverReport
from weightsync.scheme import WeightSyncScheme
from weightsync.schemes.fallback.faults import FAULTS, Fault


class Route:
    """A scheme's publisher. A route that failed has a ``fault`` until it has worked again."""

    def __init__(self, name: str, scheme: WeightSyncScheme) -> None:
        self.name = name
        self._scheme = scheme
        self.publisher = scheme.create_publisher()
        self.is_open = False
        self.fault: Fault | None = None
        self.ended = False

    def open(self, deadline: Deadline, epoch: int | None = None) -> int:
        """As :meth:`weightsync.transport.Publisher.open`."""
        try:
            epoch = self.publisher.open(deadline, epoch)
        except BaseException:
            self.is_open = False
            raise
        self.is_open = True
        self._require_going_on()
        return epoch

    def make_ready(self, deadline: Deadline, epoch: int) -> None:
        """Open what is not open, and after a fault what may have been lost, in a given epoch.

        Raises:
            WeightSyncError, OSError: it cannot be opened. VersionError: its run has seen a later
                sender, or this epoch before it was lost.
        """
        self._require_going_on()
        if self.is_open:
            if self.fault is None:
                return
            with contextlib.suppress(*FAULTS):
                self.open(deadline, epoch)
                return
        # Removed behind our back, or never there: a publisher that knows nothing can begin anew.
        self.close()
        self.publisher = self._scheme.create_publisher()
        self.open(deadline, epoch)

    def is_due(self, retry_after: float) -> bool:
        """Whether it works, as far as is known, or should be tried again."""
        return self.fault is None or self.fault.age >= retry_after

    def receivers(self) -> dict[str, ReceiverReport]:
        """Whom it knows; nobody while it cannot tell."""
        if not self.is_open:
            return {}
        try:
            return {report.receiver: report for report in self.publisher.receivers()}
        except FAULTS:
            return {}

    def _require_going_on(self) -> None:
        if self.ended:
            self.close()
            raise WeightSyncError("the publisher was closed meanwhile")

    def end(self) -> None:
        """Close it for good: an update that is under way opens nothing anew."""
        self.ended = True
        self.close()

    def close(self) -> None:
        self.is_open = False
        with contextlib.suppress(*FAULTS):  # it is given up, whatever it has to say
            self.publisher.close()
