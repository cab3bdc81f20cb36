"""The trainer's side of a scheme: one sender of ours, and the workers that it is for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from weightsync.deadline import Deadline
from weightsync.errors import ReceiverError, SourceError
from weightsync.integrations.torchrl.names import id_of, named
from weightsync.report import SyncReport
from weightsync.scheme import WeightSyncScheme


class _WorkerEnded(Exception):
    """The process of a worker that is waited for is gone."""


class Trainer:
    """
    Args:
        workers: their numbers.
        processes: gives the workers' processes, as far as they are known.
        timeout: seconds for each wait.
    """

    def __init__(
        self,
        scheme: WeightSyncScheme,
        workers: Iterable[int],
        processes: Callable[[], Iterable[Any]],
        timeout: float,
    ) -> None:
        self._workers = list(workers)
        self._processes = processes
        self._timeout = timeout
        self._sent: dict[str, torch.Tensor] = {}
        self._sender = scheme.create_sender(timeout=timeout)

    def connect(self) -> bool:
        """Take ownership of the run, and wait for the workers. False: one has ended without.

        Raises:
            SenderBusyError: another live sender owns the run. ReceiverError: a worker's set-up
            failed. DeadlineError: some did not come.
        """
        deadline = Deadline(self._timeout)
        self._sender.connect(deadline.remaining)
        wanted = list(map(id_of, self._workers))
        try:
            self._sender.wait_connected(wanted, deadline.remaining, self._require_alive)
        except _WorkerEnded:
            return False
        return True

    def _require_alive(self) -> None:
        if not all(process.is_alive() for process in self._processes()):
            raise _WorkerEnded

    def publish(self, weights: Any, workers: list[int] | None, wait: bool) -> SyncReport:
        """
        Args:
            workers: whom it is for; None: everybody.
            wait: until they have applied it.

        Raises:
            ValueError: there is no such worker. SourceError: there are no weights.
            ReceiverError: a worker failed, died, was late, or has ended before.
        """
        unknown = set(workers or ()) - set(self._workers)
        if unknown:
            raise ValueError(f"worker_ids={workers}: there are {self._workers}")
        self._fill(weights)
        ids = list(map(id_of, self._workers if workers is None else workers))
        waits = wait and bool(ids or self._sender.receivers())
        report = self._sender.update_weights(
            wait="applied" if waits else "published",
            receivers=None if workers is None else ids,
        )
        silent = set(ids) - {receiver.receiver for receiver in report.receivers}
        if waits and silent:
            words = f"version {report.version.number}: {', '.join(sorted(silent))} has ended"
            raise ReceiverError(words, (), report)
        return report

    def _fill(self, weights: Any) -> None:
        """Have the one mapping that the sender knows, and remembers facts about, hold these."""
        self._sent.clear()
        self._sent.update({} if weights is None else named(weights))
        if not self._sent:
            raise SourceError("there are no weights to send: the model has none, or pass some")
        if self._sender.version is None:
            self._sender.register_model(self._sent)

    def shutdown(self) -> None:
        self._sender.shutdown()
