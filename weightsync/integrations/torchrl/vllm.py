"""Drop-ins for TorchRL's schemes between a trainer and vLLM: their names, keywords and methods.

The engine has to be made with ``WeightTransferConfig(backend="weightsync")``. What else is
different is better: names are the checkpoint's whatever wraps the model, an engine holds whole
versions only, and a failure is an exception that names the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torchrl.weight_update import WeightSyncScheme

from weightsync.deadline import Deadline
from weightsync.engines.vllm import llm
from weightsync.errors import WeightSyncError
from weightsync.receiver import Receiver
from weightsync.report import SyncReport
from weightsync.scheme import WeightSyncScheme as Scheme
from weightsync.schemes.double_buffer import DoubleBufferScheme
from weightsync.schemes.nccl import NCCLScheme
from weightsync.version import Version

Strategy = Literal["tensordict", "state_dict"]
"""How TorchRL extracts weights. Taken for the sake of its keywords; ours are a checkpoint's."""


class VLLMDoubleBufferSyncScheme(WeightSyncScheme):
    """In place of ``torchrl.weight_update.llm.VLLMDoubleBufferSyncScheme``: engines poll.

    Args:
        remote_addr: a directory of this run's own; the fastest is below ``/dev/shm``.
        local_addr: where the receivers find it, if the mount point differs there.
        num_threads: for copies and digests; None: one for each core, at most 8.
        timeout: seconds for each wait.
    """

    def __init__(
        self,
        remote_addr: str,
        local_addr: str | None = None,
        num_threads: int | None = None,
        strategy: Strategy = "tensordict",
        *,
        timeout: float = 180.0,
    ) -> None:
        super().__init__(strategy)
        self.remote_addr = str(remote_addr)
        self.local_addr = self.remote_addr if local_addr is None else str(local_addr)
        self.timeout = timeout
        elsewhere = None if self.local_addr == self.remote_addr else self.local_addr
        self.scheme = DoubleBufferScheme(
            self.remote_addr, reader_path=elsewhere, threads=num_threads
        )

    def create_transport(self, **options: Any) -> Any:
        """As :meth:`TorchRLScheme.create_transport`."""
        raise NotImplementedError(f"{self.scheme.shown()} has no transport for each worker")

    def create_sender(self) -> VLLMWeightSender:
        return VLLMWeightSender(self.scheme, "published", self.timeout)

    def create_receiver(self, vllm_engine: Any, **options: Any) -> VLLMWeightReceiver:
        """
        Args:
            vllm_engine: as :class:`VLLMWeightReceiver` takes it. **options: of the engine.
        """
        return VLLMWeightReceiver(self.scheme, vllm_engine, False, self.timeout, options)


class VLLMWeightSyncScheme(WeightSyncScheme):
    """In place of ``torchrl.weight_update.llm.VLLMWeightSyncScheme``: the trainer broadcasts.

    Args:
        master_address, master_port: where the trainer listens; None: this host, a free port.
        gpus_per_replica, num_replicas: as the engines are; checked when they connect.
        device: the trainer's, for collectives.
        backend: ``"gloo"`` where there are no GPUs.
        timeout: seconds for each wait.
    """

    def __init__(
        self,
        master_address: str | None = None,
        master_port: int | None = None,
        gpus_per_replica: int = 1,
        num_replicas: int = 1,
        strategy: Strategy = "tensordict",
        device: torch.device | str | int = 0,
        *,
        backend: Literal["nccl", "gloo"] = "nccl",
        timeout: float = 180.0,
    ) -> None:
        super().__init__(strategy)
        self.device = device
        self.timeout = timeout
        self.scheme = NCCLScheme(
            master_address or "localhost",
            master_port,
            num_replicas=num_replicas,
            gpus_per_replica=gpus_per_replica,
            backend=backend,
        )

    def create_transport(self, **options: Any) -> Any:
        """As :meth:`TorchRLScheme.create_transport`."""
        raise NotImplementedError(f"{self.scheme.shown()} has no transport for each worker")

    def create_sender(self) -> VLLMWeightSender:
        device = self.device if self.scheme.backend == "nccl" else None
        return VLLMWeightSender(self.scheme, "applied", self.timeout, device)

    def create_receiver(self, vllm_engine: Any, **options: Any) -> VLLMWeightReceiver:
        """
        Args:
            vllm_engine: as :class:`VLLMWeightReceiver` takes it. **options: of the engine.
        """
        return VLLMWeightReceiver(self.scheme, vllm_engine, True, self.timeout, options)


VLLMNCCLWeightSync = VLLMWeightSyncScheme


class VLLMWeightSender:
    """The trainer's end, with the methods of TorchRL's senders.

    Args:
        wait: for what ``update_weights`` waits.
        device: made the current one before collectives are set up; None: left alone.
    """

    def __init__(
        self,
        scheme: Scheme,
        wait: Literal["published", "applied"],
        timeout: float,
        device: Any = None,
    ) -> None:
        self._sender = scheme.create_sender(timeout=timeout)
        self._scheme = scheme
        self._wait = wait
        self._timeout = timeout
        self._device = device
        self._connected = False
        self._driven: VLLMWeightReceiver | None = None
        self._collectors: list[Any] = []

    def register_model(self, model: Any) -> None:
        """Say where the weights come from."""
        self._sender.register_model(model)

    def register_collector(self, collector: Any) -> None:
        """Have ``collector.increment_version()`` called after each update."""
        self._collectors.append(collector)

    def init_all_workers_group(self, model_metadata: Any = None, vllm_engine: Any = None) -> None:
        """Take ownership of the run; ``update_weights`` does it too.

        Args:
            model_metadata: not needed: each version says what it consists of.
            vllm_engine: to be driven from this process, by ``update_weights``; None: it has a
                receiver of its own.

        Raises:
            SenderBusyError, NoRoomError: as :meth:`weightsync.Sender.connect`.
            EngineError: the engine is not set up for it; says what to change.
        """
        self._connect()
        if vllm_engine is not None and self._driven is None:
            driven = VLLMWeightReceiver(self._scheme, vllm_engine, False, self._timeout, {})
            for receiver in driven.receivers:
                self._sender.attach(receiver, self._timeout)
            self._driven = driven

    def update_weights(self, weights: Any = None) -> SyncReport:
        """Publish the registered model's weights, or these.

        Raises:
            ReceiverError: an engine failed, died or was late; names it.
            SourceError, DeadlineError, ...: as :meth:`weightsync.Sender.update_weights`.
        """
        self._connect()
        report = self._sender.update_weights(weights, wait=self._wait)
        for collector in self._collectors:
            collector.increment_version()
        return report

    def shutdown(self) -> None:
        """Give everything back. Idempotent."""
        if self._driven is not None:
            self._driven.shutdown()
        self._sender.shutdown()
        self._connected = False

    def _connect(self) -> None:
        if not self._connected:
            if self._device is not None:
                torch.cuda.set_device(self._device)
            self._sender.connect(self._timeout)
            self._connected = True


class VLLMWeightReceiver:
    """The inference end, with the methods of TorchRL's receivers. One of ours for each replica.

    Args:
        engine: what :meth:`weightsync.WeightSyncScheme.create_receiver` takes, a list of such, or
            an object with a list of Ray handles in ``actors``, as TorchRL's ``AsyncVLLM``.
        follows: whether versions are applied in the background, once it is connected. An ``LLM``
            must not be called from two threads: it is left to ``poll_and_apply``.
    """

    def __init__(
        self, scheme: Scheme, engine: Any, follows: bool, timeout: float, options: dict[str, Any]
    ) -> None:
        engines = _replicas(engine)
        self.receivers: list[Receiver] = [
            scheme.create_receiver(one, apply_timeout=timeout, **options) for one in engines
        ]
        self._follows = follows and not any(map(llm.accepts, engines))
        self._timeout = timeout
        self._seen: list[Version | None] = [None] * len(self.receivers)

    def init_all_workers_group(self, model_metadata: Any = None) -> None:
        """Check the engine and find the sender; ``poll_and_apply`` does it too.

        Args:
            model_metadata: not needed: each version says what it consists of.

        Raises:
            EngineError, DeadlineError: as :meth:`weightsync.Receiver.connect`.
        """
        deadline = Deadline(self._timeout)
        for receiver in self.receivers:
            if not receiver.connected:
                receiver.connect(deadline.remaining)
                if self._follows:
                    receiver.follow()

    def poll_and_apply(self, timeout: float = 180.0) -> bool:
        """Apply the newest version, if it is another than before.

        Args:
            timeout: seconds to wait for the first one; later ones are there or not.

        Returns:
            Whether the engine holds another version than after the last call.

        Raises:
            WeightSyncError: as :meth:`weightsync.Receiver.poll_and_apply`.
        """
        self.init_all_workers_group()
        deadline = Deadline(timeout)
        for receiver in self.receivers:
            first = receiver.version is None
            receiver.poll_and_apply(deadline.remaining if first else 0.0)
        former, self._seen = self._seen, [receiver.version for receiver in self.receivers]
        return former != self._seen

    def apply_weights(self, weights: None = None, inplace: bool = True) -> None:
        """Apply the newest version, also if the engine holds it already.

        Raises:
            ValueError: ``inplace=False``. TypeError: weights were passed: they come by the sender.
        """
        if not inplace:
            raise ValueError("an engine's weights are written in place")
        if weights is not None:
            raise TypeError("an engine takes whole versions only: sender.update_weights(weights)")
        for receiver in self.receivers:
            receiver.apply_weights()

    def shutdown(self) -> None:
        """Sign off; the engine keeps its weights. Idempotent."""
        for receiver in self.receivers:
            receiver.shutdown()


def _replicas(engine: Any) -> Sequence[Any]:
    if isinstance(engine, Sequence):
        engines = list(engine)
    else:
        engines = list(getattr(engine, "actors", ())) or [engine]
    if not engines:
        raise WeightSyncError("no engine: an empty list")
    return engines
