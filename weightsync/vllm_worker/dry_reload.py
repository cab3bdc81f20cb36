"""A reload of which nothing stays: each layer is loaded and processed as in an update, somebody
looks at the outcome where vLLM would copy it into the layer's own tensors, and the layer is put
back.

Depends on a vLLM release, like ``compat``: it takes the place of three functions of the reload.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from weightsync.vllm_worker import compat
from weightsync.vllm_worker.belongings import Memory, tensors

Tensors = Mapping[str, torch.Tensor]


class DryReload(ABC):
    """To be used once, between two steps of the model, which is as before in any case.

    Attributes:
        names: of the model's layers.
        unguarded: the tensors that a reload writes at once, by their ``id``.
        kept: the values that the layer had which is being looked at.
    """

    def __init__(self, model: nn.Module, model_config: Any) -> None:
        self.model, self.config = model, model_config
        self.names = {layer: name for name, layer in model.named_modules()}
        self.memories = {layer: Memory(layer, self.names) for layer in self.names}
        self.unguarded: dict[int, compat.Unguarded] = {}
        self.kept: dict[str, torch.Tensor] = {}
        self._copy_back: Callable[[nn.Module, Any], None] = lambda layer, info: None

    def run(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """
        Raises:
            Exception: vLLM does not load these weights.
        """
        try:
            with self._instead_of_the_reload():
                compat.begin_reload(self.model)
                self._watch()
                self.load(weights)
                for layer in compat.finish_layers(self.model, self.config):
                    self._begin(layer)
                    compat.process(layer)
                    self.tied(layer)
                    self._end(layer)
                self.finished()
        finally:
            compat.abandon_reload(self.model)
            for memory in self.memories.values():
                memory.restore()

    # ------------------------------------------------------------ what is to be seen

    @abstractmethod
    def loads(self, layer: nn.Module) -> list[Any]:
        """What vLLM notes a layer's loads in."""

    @abstractmethod
    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Have the model load the weights."""

    @abstractmethod
    def processed(self, layer: nn.Module, info: Any) -> None:
        """A layer holds new tensors, which vLLM would copy into those in ``info``."""

    @abstractmethod
    def attended(self, layer: nn.Module, info: Any) -> None:
        """An attention layer, one of those that are processed last, was processed in place."""

    @abstractmethod
    def tied(self, layer: nn.Module) -> None:
        """A layer that is tied to another one was processed in place."""

    def put_back(self, layer: nn.Module) -> None:
        """A layer is as it was before."""

    def finished(self) -> None:
        """All layers were seen, and unguarded tensors are not put back yet."""

    # ------------------------------------------------------------ for those who look

    def place_of(self, each: compat.Unguarded) -> tuple[nn.Module, str]:
        layer, _, name = each.name.rpartition(".")
        return self.model.get_submodule(layer), name

    def copied_back(self, layer: nn.Module, info: Any) -> dict[str, torch.Tensor]:
        """What the layer's own tensors would hold at the end of the reload, by vLLM itself.

        To be called once, by ``processed``: the layer has lost its new tensors then.
        """
        parameters, buffers = info.kernel_tensors
        info.kernel_tensors = (
            {
                n: nn.Parameter(p.detach().clone(), requires_grad=False)
                for n, p in parameters.items()
            },
            {name: buffer.detach().clone() for name, buffer in buffers.items()},
        )
        try:
            self._copy_back(layer, info)
            return own_tensors(info)
        finally:
            info.kernel_tensors = parameters, buffers

    def hung_on(self, layer: nn.Module) -> dict[str, torch.Tensor]:
        """See :func:`~.belongings.tensors`."""
        return tensors(layer, self.names)

    # ------------------------------------------------------------ one layer after the other

    @contextmanager
    def _instead_of_the_reload(self) -> Iterator[None]:
        from vllm.model_executor.model_loader.reload import layerwise

        process = layerwise._layerwise_process
        finalize = layerwise._finalize_attention_layer
        self._copy_back = layerwise._copy_and_restore_kernel_tensors

        def dry_process(layer: nn.Module, info: Any) -> None:
            self._begin(layer)
            process(layer, info)
            self._end(layer)

        def dry_finalize(layer: nn.Module, info: Any, model_config: Any) -> None:
            self._begin(layer, info)
            finalize(layer, info, model_config)
            self.attended(layer, info)
            self._end(layer)

        def dry_copy(layer: nn.Module, info: Any) -> None:
            self.processed(layer, info)
            layerwise._place_kernel_tensors(layer, info)

        with (
            patch.object(layerwise, "_layerwise_process", dry_process),
            patch.object(layerwise, "_finalize_attention_layer", dry_finalize),
            patch.object(layerwise, "_copy_and_restore_kernel_tensors", dry_copy),
        ):
            yield

    def _watch(self) -> None:
        from vllm.model_executor.model_loader.reload import layerwise

        self.unguarded = {id(each.tensor): each for each in compat.unguarded(self.model)}
        for layer in self.names:
            layerwise.get_layerwise_info(layer).loaded_weights = self.loads(layer)

    def _begin(self, layer: nn.Module, info: Any = None) -> None:
        """Before a layer is processed: what processing may write in place is kept."""
        own = registered(layer) if info is None else own_tensors(info)
        self.kept = {name: each.detach().clone() for name, each in own.items() if not each.is_meta}
        self.memories[layer].keep_values()
        self.begun(layer)

    def begun(self, layer: nn.Module) -> None:
        """A layer is about to be loaded and processed."""

    def _end(self, layer: nn.Module) -> None:
        with torch._C.DisableTorchFunction():  # nobody who watches loaders takes this for loading
            self.memories[layer].restore()
            for name, tensor in registered(layer).items():
                if id(tensor) in self.unguarded:
                    self.unguarded[id(tensor)].restore()
                elif name in self.kept and not tensor.is_meta:
                    tensor.data.copy_(self.kept[name])
        self.put_back(layer)


def registered(layer: nn.Module) -> dict[str, torch.Tensor]:
    """A layer's own parameters and buffers."""
    both = layer._parameters | layer._buffers
    return {name: tensor for name, tensor in both.items() if tensor is not None}


def own_tensors(info: Any) -> dict[str, torch.Tensor]:
    """Those that a layer in reload had before."""
    parameters, buffers = info.kernel_tensors
    return {**parameters, **buffers}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    flat = [each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
    return torch.equal(*flat)


def is_hidden(path: str) -> bool:
    """Whether a tensor is only the address of what a kernel keeps to itself."""
    return path.endswith("handler_tensor")
