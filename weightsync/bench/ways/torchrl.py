"""TorchRL's transports that work without its collectors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from weightsync.bench.measures import timed
from weightsync.bench.memory import Needs
from weightsync.bench.way import Notices, ReceivingEnd, SendingEnd, Setting, Tensors, Way
from weightsync.deadline import Deadline


@dataclass
class Sends(SendingEnd):
    """Publishing is one call."""

    call: Callable[[], object]

    def publish(self, version: int) -> None:
        self.call()


@dataclass
class Takes(ReceivingEnd):
    """Receiving is one call, after the notice that something is there."""

    call: Callable[[], object]
    notices: Notices

    def receive(self, version: int, deadline: Deadline) -> float:
        self.notices.wait(version, deadline)
        return timed(self.call)


@dataclass(frozen=True)
class TorchRLDoubleBuffer(Way):
    name: ClassVar[str] = "TorchRL double buffer"
    modules: ClassVar[tuple[str, ...]] = ("torchrl.weight_update.llm.vllm_double_buffer",)
    about: ClassVar[str] = (
        "VLLMDoubleBufferTransport in shared memory with its default of one thread (a second helps "
        "large tensors a little and hurts small ones much); what it maps is copied into the "
        "receiver's weights"
    )

    def needs(self, nbytes: int, receivers: int) -> Needs:
        return Needs(nbytes, nbytes)

    def _transport(self, setting: Setting) -> Any:
        from torchrl.weight_update.llm.vllm_double_buffer import VLLMDoubleBufferTransport

        return VLLMDoubleBufferTransport(f"{setting.shared}/weights")

    def send(self, weights: Tensors, setting: Setting) -> SendingEnd:
        transport, plain = self._transport(setting), dict(weights)
        return Sends(lambda: transport.send_weights("policy", plain))

    def receive(
        self, target: Tensors, setting: Setting, index: int, notices: Notices
    ) -> ReceivingEnd:
        transport = self._transport(setting)

        def take() -> None:
            for name, tensor in transport.receive_weights().items():
                target[name].copy_(tensor)

        return Takes(take, notices)


@dataclass(frozen=True)
class TorchRLShared(Way):
    name: ClassVar[str] = "TorchRL shared memory"
    modules: ClassVar[tuple[str, ...]] = ("torchrl.weight_update", "tensordict")
    about: ClassVar[str] = (
        "SharedMemTransport with one buffer for all receivers, handed over when they start; a "
        "receiver copies it into its own weights with TensorDict.update_"
    )

    def needs(self, nbytes: int, receivers: int) -> Needs:
        return Needs(nbytes, nbytes)

    def channels(self, context: Any, receivers: int) -> Any:
        return {index: context.Queue() for index in range(receivers)}

    def send(self, weights: Tensors, setting: Setting) -> SendingEnd:
        import torch
        from tensordict import TensorDict
        from torchrl.weight_update import SharedMemTransport

        # One file for each tensor instead of one descriptor: 20,000 of these are too many.
        torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
        plain = TensorDict(dict(weights), batch_size=[]).unflatten_keys(".")
        buffer = plain.clone().share_memory_()
        transport = SharedMemTransport()
        transport.register_weights(dict.fromkeys(setting.channels, buffer), setting.channels)
        transport.setup_connection_and_weights_on_sender()
        return Sends(lambda: transport.send_weights(plain))

    def receive(
        self, target: Tensors, setting: Setting, index: int, notices: Notices
    ) -> ReceivingEnd:
        import torch
        from tensordict import TensorDict
        from torchrl.weight_update import SharedMemTransport

        torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
        transport = SharedMemTransport()
        transport._weight_queues = setting.channels  # what its scheme hands to a worker
        buffer = transport.setup_connection_and_weights_on_receiver(
            worker_idx=index, timeout=setting.timeout
        )
        own = TensorDict(dict(target), batch_size=[]).unflatten_keys(".")
        return Takes(lambda: own.update_(buffer), notices)
