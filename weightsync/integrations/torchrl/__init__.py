"""TorchRL: its collectors and servers over any of our schemes, and drop-ins for its vLLM schemes.

``TorchRLScheme`` goes where a collector or an ``InferenceServer`` takes a weight-sync scheme. The
others have the names and constructor keywords of TorchRL's own, for trainer and vLLM.
"""

from weightsync.integrations.torchrl.scheme import TorchRLScheme
from weightsync.integrations.torchrl.vllm import (
    VLLMDoubleBufferSyncScheme,
    VLLMNCCLWeightSync,
    VLLMWeightSyncScheme,
)

__all__ = [
    "TorchRLScheme",
    "VLLMDoubleBufferSyncScheme",
    "VLLMNCCLWeightSync",
    "VLLMWeightSyncScheme",
]
