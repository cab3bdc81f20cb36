"""A worker's side of a scheme: one receiver of ours, which follows versions in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import nn

from weightsync.deadline import Deadline
from weightsync.errors import DeadlineError
from weightsync.integrations.torchrl.names import id_of
from weightsync.integrations.torchrl.policy import PolicyEngine, hold_while_computing
from weightsync.report import SyncReport
from weightsync.scheme import WeightSyncScheme
from weightsync.version import Version


class Worker:
    """
    Args:
        number: the worker's; None: it has none, and gets a name of its own.
        policy: gives the module.
        applied: called for each version after the first one, before the trainer hears of it.
        timeout: seconds for each wait.

    Attributes:
        report: of the last update.
    """

    def __init__(
        self,
        scheme: WeightSyncScheme,
        number: int | None,
        policy: Callable[[], nn.Module | None],
        applied: Callable[[], None],
        timeout: float,
    ) -> None:
        self._timeout = timeout
        self._changed = threading.Condition()
        self._seen: Version | None = None
        self._free: Callable[[], None] = lambda: None
        self._receiver = scheme.create_receiver(
            PolicyEngine(policy, applied),
            id=None if number is None else id_of(number),
            apply_timeout=timeout,
        )
        self.report: SyncReport | None = None

    def connect(self) -> None:
        """Find the trainer, apply the first version, and follow.

        Raises:
            DeadlineError: there is no trainer, or no version. MismatchError, ...: it does not fit.
        """
        deadline = Deadline(self._timeout)
        self._receiver.connect(deadline.remaining)
        if self._receiver.poll_and_apply(deadline.remaining) is None:
            self._receiver.shutdown()
            raise DeadlineError(f"no weights came within {self._timeout:.0f} s of connect()")
        self._seen = self._receiver.version
        self._receiver.follow(on_update=self._tell)

    def hold(self, policy: nn.Module) -> None:
        """Apply nothing while this policy computes. A later call replaces the former."""
        self._free()
        self._free = hold_while_computing(policy, self._receiver.hold)

    def _tell(self, report: SyncReport) -> None:
        with self._changed:
            self.report = report
            self._changed.notify_all()

    def newer(self, timeout: float) -> bool:
        """Whether another version was applied since the last call, once there is one."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._receiver.version != self._seen, timeout):
                return False
            self._seen = self._receiver.version
        return True

    def shutdown(self) -> None:
        self._free()
        self._receiver.shutdown()
