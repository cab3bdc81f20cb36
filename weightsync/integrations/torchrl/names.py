"""How TorchRL's workers are called, and weights as it hands them around, by dotted names.

TorchRL's notion of a module's weights is ``TensorDict.from_module``: parameters and all buffers,
those included that no checkpoint holds, for it builds workers' policies without any memory.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn


def id_of(worker: int) -> str:
    """How the trainer's sender knows a worker."""
    return f"worker-{worker}"


def named(weights: Any) -> dict[str, torch.Tensor]:
    """The tensors of a ``TensorDict``, of a ``state_dict``, or of nested dicts."""
    if not isinstance(weights, TensorDictBase):
        weights = TensorDict(weights)
    leaves = weights.items(include_nested=True, leaves_only=True)
    return {key if isinstance(key, str) else ".".join(key): value for key, value in leaves}


def weights_of(module: nn.Module) -> Any:
    """The ``TensorDict`` of a module's own tensors, by TorchRL's names."""
    return TensorDict.from_module(module).data


def give_memory(module: nn.Module) -> None:
    """Put tensors on the CPU that are on the meta device, their values still to come.

    A collector sends its workers a policy without weights; they are for the scheme to bring.
    """
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.is_meta:
                memory = torch.empty_like(parameter, device="cpu")
                part._parameters[name] = nn.Parameter(memory, parameter.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_meta:
                part._buffers[name] = torch.empty_like(buffer, device="cpu")
