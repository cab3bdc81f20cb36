"""TorchRL's weight-sync protocol over any of our schemes.

TorchRL pickles one scheme object to all workers of a collector, and calls it on both sides:
``init_on_sender``, ``connect`` and ``send`` in the trainer, ``init_on_receiver`` and ``connect``
in the workers. Each side makes one of our ends of it; a worker's follows new versions in the
background, and answers for itself.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import torch
from torch import nn
from torchrl.weight_update import WeightSyncScheme

from weightsync import scheme as schemes
from weightsync.deadline import Deadline
from weightsync.errors import DeadlineError, ReceiverError, SourceError, WeightSyncError
from weightsync.integrations.torchrl.names import named, weights_of
from weightsync.integrations.torchrl.policy import PolicyEngine, hold_while_computing
from weightsync.receiver import Receiver
from weightsync.report import SyncReport
from weightsync.sender import Sender


class _WorkerEnded(Exception):
    """The process of a worker that is waited for is gone."""


class TorchRLScheme(WeightSyncScheme):
    """Goes where TorchRL takes a ``WeightSyncScheme``, one for each model.

    Args:
        scheme: one of ours, or its URL.
        strategy: how TorchRL extracts weights from a model: ``"tensordict"`` or ``"state_dict"``.
        sync: whether ``send`` waits until the workers have applied the weights. Otherwise a
            worker's failure is to be seen in its log only.
        timeout: seconds for each wait: for workers to come up, and for one update.
    """

    def __init__(
        self,
        scheme: schemes.WeightSyncScheme | str,
        strategy: Literal["tensordict", "state_dict"] = "tensordict",
        *,
        sync: bool = True,
        timeout: float = 300.0,
    ) -> None:
        super().__init__(strategy)
        self.scheme = schemes.scheme_from_url(scheme) if isinstance(scheme, str) else scheme
        self.sync = sync
        self.timeout = timeout
        self.report: SyncReport | None = None
        self._forget()

    def _forget(self) -> None:
        """What belongs to this process, and does not travel to another one."""
        self._sender: Sender | None = None
        self._receiver: Receiver | None = None
        self._given: dict[Any, Any] = {}  # by worker; None: for all
        self._sent: dict[str, torch.Tensor] = {}
        self._workers: list[int] = []
        self._undo_hold = _nothing
        self._changed: threading.Condition | None = None
        self._seen: Any = None

    def __getstate__(self) -> dict[str, Any]:
        copy = type(self).__new__(type(self))
        copy.__dict__ = super().__getstate__()
        copy._forget()
        return copy.__dict__

    def create_transport(self, **options: Any) -> Any:
        """
        Raises:
            NotImplementedError: always: ``send`` and ``receive`` move everything at once.
        """
        raise NotImplementedError(f"{self.scheme.to_url()} has no transport for each worker")

    # ---------------------------------------------------------------- the trainer

    def _init_on_sender_impl(
        self,
        *,
        model_id: str | None = None,
        context: Any = None,
        model: nn.Module | None = None,
        weights: Any = None,
        params_map: Mapping[int, Any] | None = None,
        devices: Sequence[Any] | None = None,
        device_map_fn: Any = None,
        num_workers: int | None = None,
        **options: Any,
    ) -> None:
        self.model_id = model_id or "policy"
        self.context = context
        if num_workers is None:
            num_workers = getattr(context, "num_workers", None)
        if num_workers is None:
            num_workers = len(params_map or devices or ())
        self._workers = list(params_map or range(num_workers))
        if params_map is not None:
            self._given = _merged(params_map)
        elif model is not None or weights is not None:
            self._given = {None: model if weights is None else weights}
        else:
            self._given = self._given_by(context)

    def _given_by(self, context: Any) -> dict[Any, Any]:
        """What the workers begin with: one set of weights for all, or one for each."""
        with suppress(AttributeError):  # there is none, or it is None
            return {None: self.model}
        factories = list(filter(None, getattr(context, "policy_factory", None) or ()))
        if self.model_id != "policy" or not factories:
            raise SourceError(f"there is no model {self.model_id!r} to take weights from")
        return {worker: make() for worker, make in _merged(dict(enumerate(factories))).items()}

    def _setup_connection_and_weights_on_sender_impl(
        self, *, worker_idx: int | None = None, weights: Any = None
    ) -> None:
        deadline = Deadline(self.timeout)
        self._sender = self.scheme.create_sender(timeout=self.timeout)
        self._sender.connect(deadline.remaining)
        # Should one have ended already, the others get on, and TorchRL tells what it had to say.
        came = self._await_workers(deadline)
        self._publish_all(self._given if weights is None else {None: weights}, came)

    def _await_workers(self, deadline: Deadline) -> bool:
        """Whether all came. False: one has ended without.

        Raises:
            DeadlineError: some did not come. ReceiverError: one cannot be set up.
        """
        assert self._sender is not None
        wanted = [_id_of(worker) for worker in self._workers]
        try:
            self._sender.wait_for_receivers(wanted, deadline.remaining, self._require_alive)
        except _WorkerEnded:
            return False
        return True

    def _require_alive(self) -> None:
        if not all(process.is_alive() for process in getattr(self.context, "procs", ())):
            raise _WorkerEnded

    def send(self, weights: Any = None, worker_ids: int | list[int] | None = None) -> None:
        """Publish weights, and wait until they are applied (``sync=True``).

        Args:
            weights: a module, a ``TensorDict``, a ``state_dict``; None: the model's own. A dict
                with workers' numbers as keys has one of these for each of them.
            worker_ids: whom they are for; None: everybody.

        Raises:
            ReceiverError: a worker failed, died or was late; names it, and has its words.
            SourceError, DeadlineError, ...: as :meth:`weightsync.Sender.update_weights`.
        """
        if not self.initialized_on_sender or not self.synchronized_on_sender:
            raise RuntimeError("send() comes after init_on_sender() and connect()")
        chosen = _numbers(worker_ids)
        if isinstance(weights, dict) and weights and all(type(key) is int for key in weights):
            each = {worker: weights[worker] for worker in chosen or weights}
        elif weights is None and self.context is None and chosen is None:
            each = self._given
        else:
            each = {None: weights}
        self._publish_all(each, self.sync, chosen)

    def _publish_all(
        self, each: Mapping[Any, Any], wait: bool, workers: list[int] | None = None
    ) -> None:
        for worker, weights in each.items():
            prepared = self.prepare_weights(
                weights, self._model_id or "policy", self._strategy, self.context
            )
            self._publish(prepared, workers if worker is None else [worker], wait)

    def _publish(self, weights: Any, workers: list[int] | None, wait: bool) -> None:
        if self._sender is None:
            raise WeightSyncError("the scheme was shut down")
        self._fill(weights)
        unknown = set(workers or ()) - set(self._workers)
        if unknown:
            raise ValueError(f"worker_ids={workers}: there are {self._workers}")
        ids = [_id_of(worker) for worker in (self._workers if workers is None else workers)]
        waits = wait and (ids or self._sender.receivers())
        self.report = self._sender.update_weights(
            wait="applied" if waits else "published",
            receivers=None if workers is None else ids,
        )
        silent = set(ids) - {receiver.receiver for receiver in self.report.receivers}
        if waits and silent:
            words = f"version {self.report.version.number}: {', '.join(sorted(silent))} has ended"
            raise ReceiverError(words, (), self.report)

    def _fill(self, weights: Any) -> None:
        """Have the one mapping that the sender knows, and remembers facts about, hold these.

        Raises:
            SourceError: there are none.
        """
        assert self._sender is not None
        self._sent.clear()
        self._sent.update({} if weights is None else named(weights))
        if not self._sent:
            raise SourceError(f"model {self._model_id!r} has no weights to send; pass some")
        if self._sender.version is None:
            self._sender.register_model(self._sent)

    # ---------------------------------------------------------------- a worker

    def _init_on_receiver_impl(
        self,
        model_id: str,
        context: Any = None,
        model: nn.Module | None = None,
        worker_idx: int | None = None,
        **options: Any,
    ) -> None:
        self.model_id = model_id
        if context is not None:
            self.context = context
            worker_idx = getattr(context, "worker_idx", worker_idx)
            if hasattr(context, "get_model"):
                model = context.get_model(model_id)
        self.worker_idx = worker_idx
        if model is not None:
            self.model = model

    def _setup_connection_and_weights_on_receiver_impl(
        self, *, worker_idx: int | None = None
    ) -> None:
        deadline = Deadline(self.timeout)
        number = self._worker_idx if worker_idx is None else worker_idx
        receiver = self.scheme.create_receiver(
            PolicyEngine(lambda: self.model, self._cascade),
            id=None if number is None else _id_of(number),
            apply_timeout=self.timeout,
        )
        receiver.connect(deadline.remaining)
        if receiver.poll_and_apply(deadline.remaining) is None:
            receiver.shutdown()
            raise DeadlineError(f"no weights came within {self.timeout:.0f} s of connect()")
        self._receiver, self._seen = receiver, receiver.version
        self._changed = threading.Condition()
        self._hold(self.model)
        receiver.follow(on_update=self._tell)

    @property
    def model(self) -> Any:
        """The module whose weights are synchronized; a weak reference is kept."""
        return WeightSyncScheme.model.fget(self)

    @model.setter
    def model(self, model: Any) -> None:
        WeightSyncScheme.model.fset(self, model)
        if self._receiver is not None and model is not None:
            self._hold(model)

    def _hold(self, model: nn.Module) -> None:
        assert self._receiver is not None
        self._undo_hold()
        self._undo_hold = hold_while_computing(model, self._receiver.hold)

    def _cascade(self) -> None:
        """Pass on that the model has other weights: policy versions rise, sub-collectors follow."""
        update = getattr(self.context, "update_policy_weights_", None)
        if update is not None:
            update(model_id=self._model_id, policy_or_weights=weights_of(self.model))

    def _tell(self, report: SyncReport) -> None:
        assert self._changed is not None
        self.report = report
        with self._changed:
            self._changed.notify_all()

    def receive(self, timeout: float | None = None) -> Any:
        """The weights, if newer ones were applied since the last call (or since ``connect``).

        They are applied as soon as they are there, whether this is called or not.

        Args:
            timeout: seconds to wait for newer ones; None: the scheme's own.

        Raises:
            DeadlineError: no timeout was given, and none came.
        """
        if self._receiver is None or self._changed is None:
            raise RuntimeError("receive() comes after init_on_receiver() and connect()")
        receiver = self._receiver
        seconds = self.timeout if timeout is None else timeout
        with self._changed:
            if not self._changed.wait_for(lambda: receiver.version != self._seen, seconds):
                if timeout is None:
                    raise DeadlineError(f"no newer weights within {seconds:.0f} s")
                return None
            self._seen = receiver.version
        return weights_of(self.model)

    # ---------------------------------------------------------------- the end

    def shutdown(self) -> None:
        """Give everything back; policies keep their weights. Idempotent."""
        state = self.__dict__
        receiver, sender = state.get("_receiver"), state.get("_sender")
        if receiver is not None:
            self._receiver = None
            self._undo_hold()
            receiver.shutdown()
        if sender is not None:
            self._sender = None
            sender.shutdown()
        super().shutdown()


def _id_of(worker: int) -> str:
    """How the sender knows a worker."""
    return f"worker-{worker}"


def _merged(each: Mapping[int, Any]) -> dict[Any, Any]:
    """What is given for each worker; under None if it is the same for all."""
    if len({id(weights) for weights in each.values()}) == 1:
        return {None: next(iter(each.values()))}
    return dict(each)


def _numbers(workers: int | Sequence[int] | None) -> list[int] | None:
    if workers is None:
        return None
    numbers = [workers] if isinstance(workers, int) else list(workers)
    if not all(isinstance(number, int) for number in numbers):
        raise TypeError(f"worker_ids={workers!r}: numbers of workers")
    return numbers


def _nothing() -> None:
    pass
