"""TorchRL's weight-sync protocol over any of our schemes.

TorchRL pickles one scheme object to all workers of a collector, and calls it on both sides:
``init_on_sender``, ``connect`` and ``send`` in the trainer, ``init_on_receiver`` and ``connect``
in the workers. Each side makes one of our ends of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from torch import nn
from torchrl.weight_update import WeightSyncScheme

from weightsync import scheme as schemes
from weightsync.errors import DeadlineError, SourceError, WeightSyncError
from weightsync.integrations.torchrl.names import weights_of
from weightsync.integrations.torchrl.trainer import Trainer
from weightsync.integrations.torchrl.worker import Worker
from weightsync.report import SyncReport


class TorchRLScheme(WeightSyncScheme):
    """Goes where TorchRL takes a ``WeightSyncScheme``, one for each model.

    Args:
        scheme: one of ours, or its URL.
        strategy: how TorchRL extracts weights from a model: ``"tensordict"`` or ``"state_dict"``.
        sync: whether ``send`` waits until the workers have applied the weights. Otherwise a
            worker's failure is to be seen in its log only.
        timeout: seconds for each wait: for workers to come up, and for one update.

    Attributes:
        report: of this side's last update; None before the first one.
    """

    _trainer: Trainer | None
    _worker: Worker | None
    _workers: list[int]
    _given: dict[Any, Any]
    _report: SyncReport | None

    def __init__(
        self,
        scheme: schemes.WeightSyncScheme | str,
        strategy: Literal["tensordict", "state_dict"] = "tensordict",
        *,
        sync: bool = True,
        timeout: float = 300.0,
    ) -> None:
        super().__init__(strategy)
        self.scheme = schemes.as_scheme(scheme)
        self.sync = sync
        self.timeout = timeout
        self.__dict__.update(_of_this_process())

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **_of_this_process()}

    @property
    def report(self) -> SyncReport | None:
        return self._report if self._worker is None else self._worker.report

    def create_transport(self, **options: Any) -> Any:
        """
        Raises:
            NotImplementedError: always: ``send`` and ``receive`` move everything at once.
        """
        raise NotImplementedError(f"{self.scheme.shown()} has no transport for each worker")

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
        self._trainer = Trainer(self.scheme, self._workers, self._processes, self.timeout)
        # Should one have ended already, the others get on, and TorchRL tells what it had to say.
        came = self._trainer.connect()
        self._publish(self._given if weights is None else {None: weights}, None, wait=came)

    def _processes(self) -> Iterable[Any]:
        return getattr(self.context, "procs", ())

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
        each: dict[Any, Any] = {None: weights}
        if isinstance(weights, dict) and weights and all(type(key) is int for key in weights):
            each = {worker: weights[worker] for worker in chosen or weights}
        elif weights is None and self.context is None and chosen is None:
            each = self._given
        self._publish(each, chosen, self.sync)

    def _publish(self, each: Mapping[Any, Any], workers: list[int] | None, wait: bool) -> None:
        """Weights for each worker, or under None for the workers given (None: all)."""
        if self._trainer is None:
            raise WeightSyncError("the scheme was shut down")
        for worker, weights in each.items():
            prepared = self.prepare_weights(weights, self._model_id, self._strategy, self.context)
            chosen = workers if worker is None else [worker]
            self._report = self._trainer.publish(prepared, chosen, wait)

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
        number = self._worker_idx if worker_idx is None else worker_idx
        worker = Worker(self.scheme, number, lambda: self.model, self._cascade, self.timeout)
        worker.connect()
        worker.hold(self.model)
        self._worker = worker

    @property
    def model(self) -> Any:
        """The module whose weights are synchronized; a weak reference is kept."""
        return WeightSyncScheme.model.fget(self)

    @model.setter
    def model(self, model: Any) -> None:
        WeightSyncScheme.model.fset(self, model)
        if self._worker is not None and model is not None:
            self._worker.hold(model)

    def _cascade(self) -> None:
        """Pass on that the model has other weights: policy versions rise, sub-collectors follow."""
        update = getattr(self.context, "update_policy_weights_", None)
        if update is not None:
            update(model_id=self._model_id, policy_or_weights=weights_of(self.model))

    def receive(self, timeout: float | None = None) -> Any:
        """The weights, if newer ones were applied since the last call (or since ``connect``).

        They are applied as soon as they are there, whether this is called or not.

        Args:
            timeout: seconds to wait for newer ones; None: the scheme's own.

        Raises:
            DeadlineError: no timeout was given, and none came.
        """
        if self._worker is None:
            raise RuntimeError("receive() comes after init_on_receiver() and connect()")
        if self._worker.newer(self.timeout if timeout is None else timeout):
            return weights_of(self.model)
        if timeout is None:
            raise DeadlineError(f"no newer weights within {self.timeout:.0f} s")
        return None

    # ---------------------------------------------------------------- the end

    def shutdown(self) -> None:
        """Give everything back; policies keep their weights. Idempotent."""
        for end in (self.__dict__.get("_worker"), self.__dict__.get("_trainer")):
            if end is not None:
                end.shutdown()
        self.__dict__.update(_worker=None, _trainer=None)
        super().shutdown()


def _of_this_process() -> dict[str, Any]:
    """What does not travel to another process, as it is at first. ``_given`` is by worker."""
    return {"_trainer": None, "_worker": None, "_workers": [], "_given": {}, "_report": None}


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
