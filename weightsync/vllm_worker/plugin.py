"""Registers the ``weightsync`` backend. vLLM calls ``register`` in each of its processes."""

from __future__ import annotations

BACKEND = "weightsync"


def register() -> None:
    """Entry point of the group ``vllm.general_plugins``. May be called more than once.

    Registered by name: the engine's module is imported in the workers only, when a model is
    loaded with ``WeightTransferConfig(backend="weightsync")``.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "weightsync.vllm_worker.transfer_engine", "WeightSyncTransferEngine"
        )
