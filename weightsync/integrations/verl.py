"""verl: a checkpoint engine that moves weights by any of our schemes.

Named as ``custom_backend_module`` it registers itself under ``weightsync``::

    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=weightsync.integrations.verl
    actor_rollout_ref.rollout.checkpoint_engine.backend=weightsync
    +actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.weightsync.url=shm:///dev/shm/run42
"""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngineRegistry, CheckpointEngineWithCache

from weightsync.errors import ReceiverError, SchemeError
from weightsync.manifest import DTYPES
from weightsync.report import SyncReport
from weightsync.scheme import scheme_from_url
from weightsync.sender import Sender
from weightsync.sources.passing import PassingStreams, walk
from weightsync.stream_receiver import StreamReceiver
from weightsync.version import Version

Weights = Iterable[tuple[str, torch.Tensor]]

_PRECEDENCE = 3.0
"""Seconds by which a rollout's own error comes before what the sender knows of it."""


@CheckpointEngineRegistry.register("weightsync")
class WeightSyncCheckpointEngine(CheckpointEngineWithCache):
    """One end of a scheme: the sender in the actor's rank 0, a receiver in each rollout worker.

    The other ranks of the actor take part in making the weights, and send nothing.

    Args:
        bucket_size: verl's, and of no use here: a version has buffers of its own size.
        url: of the scheme; see :func:`weightsync.scheme_from_url`.
        is_master: whether this is the actor's rank 0.
        timeout: seconds for each wait.
        dtype: the name of a dtype that floating-point weights are cast to on their way
            (``"bfloat16"``); None sends each as it is.
    """

    def __init__(
        self,
        bucket_size: int,
        url: str,
        is_master: bool = False,
        timeout: float = 300.0,
        dtype: str | None = None,
    ) -> None:
        if dtype is not None and dtype not in DTYPES:
            raise SchemeError(f"dtype={dtype!r:.80}: the name of a torch.dtype was expected")
        scheme = scheme_from_url(url)
        if scheme.url_scheme == "cuda-ipc":
            raise SchemeError(
                "cuda-ipc:// is not for verl: a rollout may read what it was handed when the actor "
                "trains again, and this scheme keeps no copy; take shm://, nccl:// or disk://"
            )
        self._timeout = timeout
        self._streams = PassingStreams(None if dtype is None else DTYPES[dtype])
        self._sender: Sender | None = None
        self._receiver = StreamReceiver(scheme)
        if is_master:
            self._sender = scheme.create_sender(timeout=timeout)
            atexit.register(self.shutdown)
        self._receivers: Sequence[str] = ()
        self._at_least: Version | None = None

    # ---------------------------------------------------------------- verl's set-up of an update

    def prepare(self) -> dict[str, Any]:
        """Of the sender the next version, of the others the id that they receive under."""
        self._receiver.release()
        if self._sender is None:
            return {"receiver": self._receiver.id}
        return {"next": tuple(self._connected(self._sender).next_version)}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Who is to receive, and what: the sender hears of the receivers, they of the version."""
        receivers = [worker["receiver"] for worker in metadata[actor_wg_world_size:]]
        return (
            {"receivers": [receivers] * actor_wg_world_size},
            {"at_least": [metadata[0]["next"]] * rollout_world_size},
        )

    def init_process_group(
        self, receivers: Sequence[str] = (), at_least: Sequence[int] | None = None
    ) -> None:
        if at_least is not None:
            self._at_least = Version.parse(at_least)
            self._receiver.connect(self._timeout)
        elif self._sender is not None:
            self._receivers = receivers
            self._sender.wait_connected(receivers, self._timeout)

    def finalize(self) -> None:
        self._receiver.release()
        self._receivers, self._at_least = (), None

    def shutdown(self) -> None:
        """Give everything back. verl does not call it; a process that ends by itself does."""
        self._receiver.shutdown()
        if self._sender is not None:
            self._sender.shutdown()

    # ---------------------------------------------------------------- weights

    async def send_weights(
        self, weights: Weights, global_steps: int | None = None
    ) -> dict[str, float] | None:
        """Publish them; in an update of a ``CheckpointEngineManager`` also wait for the rollouts.

        Raises:
            WeightSyncError: as ``Sender.update_weights``; rollouts that failed, died or are late
                are named.
        """
        if self._sender is None:
            walk(weights)
            return None
        report = self._publish(self._connected(self._sender), weights, global_steps)
        if self._receivers:
            await self._wait_applied(self._sender, self._receivers)
        return {
            "weightsync/version": report.version.number,
            "weightsync/bytes": report.nbytes,
            "weightsync/seconds": report.seconds.total,
        }

    def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """The version that is being sent; outside of an update the newest that was published."""
        return self._receiver.stream(self._timeout, self._at_least)

    def get_weights(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """The newest version that was published, whatever the actor is doing."""
        return self._receiver.stream(self._timeout)

    async def _wait_applied(self, sender: Sender, receivers: Sequence[str]) -> None:
        try:
            await asyncio.to_thread(sender.wait_applied, receivers)
        except ReceiverError as error:
            # A rollout that refused raises too, and knows why. verl raises what comes first.
            if any(report.state == "unusable" for report in error.failures):
                await asyncio.sleep(_PRECEDENCE)
            raise

    @torch.no_grad()
    def _publish(self, sender: Sender, weights: Weights, steps: int | None) -> SyncReport:
        # verl may name no step, or one again; a version is never the same twice.
        number = max(steps or 0, sender.next_version.number)
        with self._streams.source(weights) as source:
            return sender.update_weights(source, version=number)

    def _connected(self, sender: Sender) -> Sender:
        if not sender.connected:
            sender.connect(self._timeout)
        return sender
