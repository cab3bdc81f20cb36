"""The LoRA adapter of a PEFT model by itself, for an engine that holds the base already.

What is sent are the two files that ``save_pretrained`` writes: the adapter's tensors under their
names there, and its configuration as one more tensor, so that any scheme carries it.
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from torch import nn

from weightsync.errors import SourceError
from weightsync.source import SourceOptions
from weightsync.sources.mapping import ResidentSource
from weightsync.tree import Walk

CONFIG_NAME = "adapter_config.json"
"""The name of the uint8 tensor that holds the configuration's bytes, as that file would."""


class AdapterSource(ResidentSource):
    """The adapter of a ``PeftModel``, in the form in which engines load adapters.

    Names, dtypes and values are those of ``adapter_model.safetensors``, as PEFT writes it with
    ``save_embedding_layers=False``: the embedding of the base is not part of an adapter, and vLLM
    does not look at it. Plain parameters are sent from where they lie.

    Args:
        model: a ``PeftModel``, or a module that wraps one (``torch.compile``, DDP, FSDP).
        adapter: its name; None for the one that is active now.
        dtype: cast the tensors to this dtype while they are copied.
        base_sent: some kinds of initialisation (PiSSA, OLoRA, ...) change the base as well. True
            says that the engine has this trainer's base, sent with ``merge=False``.

    Raises:
        SourceError: there is no such adapter, or no vLLM can load adapters of its kind.
    """

    def __init__(
        self,
        model: nn.Module,
        adapter: str | None = None,
        *,
        dtype: torch.dtype | None = None,
        base_sent: bool = False,
    ) -> None:
        super().__init__(SourceOptions(dtype=dtype))
        self.model = model
        self._peft = _peft_model(model)
        self.adapter = _active(self._peft) if adapter is None else adapter
        self._base_sent = base_sent
        self._config = torch.empty(0, dtype=torch.uint8)
        self.manifest()  # refused here rather than at the first update

    def entries(self) -> tuple[list[str], list[Any]]:
        config = _configuration(self._peft, self.adapter, self._base_sent)
        walk = _AdapterWalk(self._peft, self.adapter, config)
        walk.visit(self.model, "")
        if not walk.found:
            raise SourceError(f"adapter {self.adapter!r} has no LoRA layer in this model")
        return [*walk.found, CONFIG_NAME], [*walk.found.values(), self._as_tensor(config)]

    def _as_tensor(self, config: dict[str, Any]) -> torch.Tensor:
        text = bytearray(json.dumps(config, indent=2, sort_keys=True).encode())
        tensor = torch.frombuffer(text, dtype=torch.uint8)
        if not torch.equal(tensor, self._config):
            self._config = tensor
        return self._config


class _AdapterWalk(Walk):
    """Collects what belongs to one adapter, under the names of PEFT's own checkpoints."""

    def __init__(self, model: nn.Module, adapter: str, config: dict[str, Any]) -> None:
        super().__init__()
        self._model = model
        self._adapter = adapter
        self._config = config
        self._collecting = False

    def visit(self, module: nn.Module, prefix: str, beyond: type | None = None) -> None:
        if self._collecting:
            super().visit(module, prefix, beyond)
        elif module is self._model:
            self.children(module, "")  # whatever the module is called that holds the model
        elif _is_a(module, "peft.tuners.tuners_utils.BaseTuner"):
            self.children(module, prefix)
        elif _is_a(module, "peft.tuners.lora.layer.LoraLayer"):
            self._layer(module, prefix)
        elif _is_a(module, "peft.utils.other.AuxiliaryTrainingWrapper"):
            self._take(getattr(module, "modules_to_save", {}), prefix)
        elif module._modules:  # whatever else has nothing below it is the base's
            super().visit(module, prefix, beyond)

    def add(self, name: str, value: Any) -> None:
        if self._collecting:
            super().add(name, value)

    def own(self, module: nn.Module, prefix: str) -> None:
        if self._collecting:
            super().own(module, prefix)

    def _take(self, modules: Any, prefix: str) -> None:
        """Collect the adapter's own among modules that are kept by adapter."""
        if self._adapter in modules:
            self._collecting = True
            self.visit(modules[self._adapter], prefix)
            self._collecting = False

    def _layer(self, layer: Any, prefix: str) -> None:
        if self._adapter in layer.scaling:
            self._check(layer, prefix)
        for part in ("lora_A", "lora_B"):
            self._take(getattr(layer, part), f"{prefix}{part}.")
        for part in ("lora_embedding_A", "lora_embedding_B"):
            parameters = Walk(within=self)
            parameters.own(getattr(layer, part), "")
            if self._adapter in parameters.found:
                super().add(prefix + part, parameters.found[self._adapter])
        if hasattr(layer.base_layer, "base_layer"):  # two parameters of one module
            self.visit(layer.base_layer, f"{prefix}base_layer.")

    def _check(self, layer: Any, prefix: str) -> None:
        """
        Raises:
            SourceError: the layer computes something else than an engine would.
        """
        name, adapter = prefix.removesuffix("."), self._adapter
        variant = getattr(layer, "lora_variant", {}).get(adapter)
        if variant is not None:
            kind = getattr(variant, "__name__", type(variant).__name__)
            raise SourceError(f"layer {name!r} is no plain LoRA layer ({kind}): no vLLM loads it")
        rank = layer.r[adapter]
        divisor = math.sqrt(rank) if self._config.get("use_rslora") else rank
        # Of the configuration, which is what engines get; patterns make layers differ.
        one = not self._config.get("alpha_pattern")
        alpha = self._config["lora_alpha"] if one else layer.lora_alpha[adapter]
        said = alpha / divisor
        if not math.isclose(layer.scaling[adapter], said):
            raise SourceError(
                f"layer {name!r} scales its adapter by {layer.scaling[adapter]:g}, where an engine "
                f"would scale by {said:g}, as lora_alpha and r say"
            )


def _peft_model(model: nn.Module) -> Any:
    for module in model.modules():
        if _is_a(module, "peft.peft_model.PeftModel"):
            return module
    raise SourceError(f"there is no PeftModel in this {type(model).__name__}")


def _is_a(module: nn.Module, kind: str) -> bool:
    """Whether a module is of a class, known by its full name."""
    return any(f"{base.__module__}.{base.__qualname__}" == kind for base in type(module).__mro__)


def _active(model: Any) -> str:
    active = list(model.active_adapters)
    if len(active) != 1:
        raise SourceError(f"which adapter? {', '.join(active) or 'none'} is active: pass adapter=")
    name: str = active[0]
    return name


_REFUSED = {
    "bias": "trained biases",
    "lora_bias": "biases of the adapter",
    "use_dora": "DoRA",
    "trainable_token_indices": "trainable tokens",
    "alora_invocation_tokens": "activated LoRA",
    "layer_replication": "replicated layers",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
}
"""Options of a LoRA configuration with which no vLLM loads an adapter."""


_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Kinds of ``init_lora_weights`` that change the base's weights too."""


def _configuration(model: Any, adapter: str, base_sent: bool) -> dict[str, Any]:
    """What ``adapter_config.json`` says, without what is true on this machine only.

    Raises:
        SourceError: there is no such adapter, or no vLLM loads it.
    """
    if adapter not in model.peft_config:
        there = ", ".join(map(repr, model.peft_config))
        raise SourceError(f"there is no adapter {adapter!r}; there is {there}")
    options = model.peft_config[adapter].to_dict()
    config: dict[str, Any] = {option: _plain(value) for option, value in options.items()}
    if config["peft_type"] != "LORA":
        raise SourceError(f"adapter {adapter!r} is of type {config['peft_type']}: vLLM loads LoRA")
    for option, words in _REFUSED.items():
        value = config.get(option)
        if value and value != "none":
            raise SourceError(
                f"adapter {adapter!r} cannot be sent by itself, as no vLLM loads {words} "
                f"({option}={value!r:.80}); send the model, merged"
            )
    start = str(config.get("init_lora_weights")).lower()
    if start.startswith(_CHANGES_BASE):
        if not base_sent:
            raise SourceError(
                f"adapter {adapter!r} began with a changed base (init_lora_weights={start!r}): an "
                "engine with the original one would compute another model. Send the base as well "
                "(create_sender(model, merge=False)) and pass base_sent=True, or send it merged"
            )
        config["init_lora_weights"] = True  # what vLLM asks for where the base is the right one
    return {**config, "inference_mode": True, "base_model_name_or_path": None, "revision": None}


def _plain(value: Any) -> Any:
    """A value as JSON has it; sets in one order, whatever the process."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return getattr(value, "value", value)  # of an enumeration
