"""Models with PEFT adapters: merged values, computed per tensor into the stream.

The trainer is never merged, not for a moment. PEFT's own arithmetic (each tuner layer's ``merge``)
runs on a *twin* of the layer: an object of the same class whose tensors are copies, gathered where
they are sharded and dense where they are packed, and whose Python state is a copy as well. So
every kind of adapter that PEFT can merge is sent, and a merge that fails half-way leaves nothing
behind. What is sent is what a forward pass of the trainer computes with: the active adapters, and
those that were merged into the base weight already.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from functools import cached_property, lru_cache
from importlib import import_module
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from weightsync.errors import SourceError
from weightsync.source import as_value, log
from weightsync.sources.quantised import as_stored, dense_weight
from weightsync.tree import Walk, inside, state_of, visitor_of
from weightsync.weight import Value, Weight, is_collective, read

# ---- visitors ----


def visit_model(module: nn.Module, prefix: str, walk: Walk) -> None:
    """A ``PeftModel`` or ``PeftMixedModel``."""
    model: Any = module
    for name, config in model.peft_config.items() if walk.merge else ():
        if config.is_prompt_learning or config.is_adaption_prompt:
            _refuse(
                prefix,
                f"its adapter {name!r} ({config.peft_type.value}) is a learned prompt, which no "
                "weight can express; if the base model is meant, pass merge=False",
            )
    walk.visit(model.base_model, prefix)


def visit_tuner(module: nn.Module, prefix: str, walk: Walk) -> None:
    """A ``BaseTuner`` (``LoraModel``, ...)."""
    tuner: Any = module
    if walk.merge and "internal_xlora_classifier" in module._modules:
        _refuse(prefix, "X-LoRA mixes its adapters anew for each token, no weight can express that")
    walk.visit(tuner.model, prefix)


def visit_auxiliary(module: nn.Module, prefix: str, walk: Walk) -> None:
    """An ``AuxiliaryTrainingWrapper``: ``modules_to_save``, trainable tokens."""
    wrapper: Any = module
    if walk.merge:
        _refuse_if_disabled(wrapper, prefix)
    if "token_adapter" in module._modules:
        walk.visit(wrapper.token_adapter, prefix)
    elif "modules_to_save" in module._modules:
        trained = wrapper.modules_to_save
        active = [name for name in wrapper.active_adapters if name in trained and walk.merge]
        walk.visit(trained[active[0]] if active else wrapper.original_module, prefix)
    else:
        _refuse(prefix, f"a {_kind(module)} of PEFT is not known here")


def visit_layer(module: nn.Module, prefix: str, walk: Walk) -> None:
    """A ``BaseTunerLayer`` (``lora.Linear``, ...), which may be around another one."""
    layers = dict(_nested(module))
    if not walk.merge:
        _visit_base(layers, prefix, walk)
        return
    base = list(layers.values())[-1].base_layer
    inner = Walk(walk)
    inner.visit(base, "")
    merged: dict[str, Value] = {}
    parts = _Parts(walk)
    for around, written in _together(layers, inner.found, prefix):
        if not parts.found:
            parts.visit(module, "")
        try:
            values = {name: as_value(prefix + name, inner.found[name]) for name in written}
        except SourceError:
            continue  # the base's own tensors are sent instead: whoever takes them says why not
        base_prefix = "base_layer." * len(layers)
        merge = _Merge(around, inside(base), base_prefix, written, parts.found, prefix)
        merged.update((name, Merged(merge, name, value)) for name, value in values.items())
    for name, value in inner.found.items():
        walk.add(prefix + name, merged.get(name, value))


def _visit_base(layers: dict[str, Any], prefix: str, walk: Walk) -> None:
    """A tuner layer without its adapters."""
    for layer in layers.values():
        if layer.merged_adapters:
            _refuse(prefix, "its adapters are merged into the base: call unmerge_adapter() first")
    walk.visit(list(layers.values())[-1].base_layer, prefix)


def warn_of_broken_ties(found: dict[str, Any]) -> None:
    """Say, once per layer, where tied weights differ since an adapter is on one of them."""
    merged = {name: value for name, value in found.items() if isinstance(value, Merged)}
    bases = {value.base for value in merged.values() if value.base is not None}
    tied: dict[Hashable, list[str]] = {}
    for name, value in found.items():
        place = value.base if isinstance(value, Merged) else _place(value)
        if place in bases:
            tied.setdefault(place, []).append(name)
    for names in tied.values():
        one = next(name for name in names if name in merged)
        weight = merged[one]
        others = [n for n in names if getattr(found[n], "identity", None) != weight.identity]
        if others and weight.layer not in _warned:
            _warned.add(weight.layer)
            log.warning(
                "%r shares its base weight with %s, but an adapter makes them differ: they are "
                "sent as different tensors, and an engine that ties them can hold only one",
                one,
                ", ".join(map(repr, others)),
            )


_warned: WeakSet[nn.Module] = WeakSet()


# ---- what is to be merged ----


def _nested(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """A tuner layer and those directly inside it, outermost first, under their prefixes."""
    prefix = ""
    while isinstance(module, BaseTunerLayer):
        layer: Any = module
        yield prefix, layer
        module, prefix = inside(layer.base_layer), prefix + "base_layer."


def _together(
    layers: dict[str, Any], names: Iterable[str], prefix: str
) -> list[tuple[dict[str, Any], list[str]]]:
    """The layers that write the same tensors of their base, and those tensors."""
    groups: list[tuple[dict[str, Any], set[str]]] = []
    for place, layer in layers.items():
        around, written = {place: layer}, set(_written(layer, names, prefix))
        for group in [group for group in groups if group[1] & written]:
            groups.remove(group)
            around, written = group[0] | around, group[1] | written
        if written:
            groups.append((around, written))
    return [(around, [name for name in names if name in written]) for around, written in groups]


def _written(layer: Any, names: Iterable[str], prefix: str) -> list[str]:
    """Which tensors of the base layer the adapters change; the others are sent as they are.

    Raises:
        SourceError: the layer is in a state that no weight can express.
    """
    if not _is_to_merge(layer, prefix):
        return []
    attention = _is_attention(layer)
    if hasattr(layer, "parameter_name"):
        written = [layer.parameter_name]
    elif isinstance(layer, LoraLayer) and not attention and not _has_bias(layer):
        written = ["weight"]
    else:
        written = list(names)
    missing = sorted(set(written) - set(names))
    if missing or not written:
        kind, what = _kind(layer.get_base_layer()), ", ".join(missing) or "weight"
        _refuse(prefix, f"a {kind} has no {what} that an adapter could be merged into")
    return written


def _is_to_merge(layer: Any, prefix: str) -> bool:
    """Whether a layer has active adapters that are not in its base weight already."""
    _refuse_if_disabled(layer, prefix)
    merged = list(layer.merged_adapters)
    if merged and _is_attention(layer):
        _refuse(prefix, "merged attention has no parameters in PEFT: call unmerge_adapter() first")
    held = _adapters(layer)
    waiting = [name for name in layer.active_adapters if name in held and name not in merged]
    if not waiting:
        return False
    if merged:
        _refuse(
            prefix,
            f"its active adapters {waiting} are left out by its forward pass, since {merged} are "
            "merged: call unmerge_adapter(), or merge_adapter() for all of them",
        )
    kind: Any = type(layer)
    if _twin_class(kind).merge is BaseTunerLayer.merge:
        _refuse(prefix, f"PEFT cannot merge the adapters of a {_kind(layer)}")
    return True


def _adapters(layer: Any) -> set[str]:
    """The names of the adapters that a layer has."""
    return {adapter for _, adapter in _entries(layer, layer.adapter_layer_names)}


def _entries(layer: Any, attributes: Iterable[str]) -> Iterator[tuple[str, str]]:
    """What a layer holds per adapter: attribute and adapter."""
    for attribute in attributes:
        held: Any = getattr(layer, attribute, None)
        if hasattr(held, "keys"):
            yield from ((attribute, adapter) for adapter in list(held.keys()))


def _is_attention(layer: Any) -> bool:
    """Whether a layer merges the adapters of its output projection as well, a layer inside it."""
    return isinstance(inside(layer.get_base_layer()), nn.MultiheadAttention)


def _has_bias(layer: Any) -> bool:
    biases = getattr(layer, "lora_bias", {})
    return any(biases.get(adapter) for adapter in layer.active_adapters)


def _refuse_if_disabled(module: Any, prefix: str) -> None:
    if module.disable_adapters:
        _refuse(
            prefix,
            "its adapters are disabled, so that it is the base model now: send outside of "
            "disable_adapter(), or call enable_adapters() first",
        )


def _refuse(prefix: str, reason: str) -> NoReturn:
    where = f"module {prefix.rstrip('.')!r}" if prefix else "the model"
    raise SourceError(f"{where} cannot be sent: {reason}")


def _kind(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


# ---- merging ----


class Merged(Weight):
    """A tensor of a base layer with the active adapters merged into it.

    Attributes:
        layer: the tuner layer, the outermost if several are nested.
        base: equal for weights whose base is one tensor; None if that is not known.
    """

    def __init__(self, merge: _Merge, name: str, base: Value) -> None:
        self._merge = merge
        self._name = name
        self.layer = merge.layer
        self.base = _place(base)
        self.dtype = base.dtype
        self.shape = tuple(base.shape)

    @property
    def identity(self) -> Hashable | None:
        # One adapter that is merged into one base under two names: PEFT keeps some ties so.
        adapters = self._merge.identity
        return None if self.base is None or adapters is None else (self.base, adapters)

    @property
    def collective(self) -> bool:
        return self._merge.collective

    def read(self) -> torch.Tensor:
        tensor = self._merge.read(self._name)
        if (tensor.dtype, tuple(tensor.shape)) != (self.dtype, self.shape):
            raise SourceError(
                f"merging made {tensor.dtype} {list(tensor.shape)} of {self.dtype} "
                f"{list(self.shape)}"
            )
        return tensor


class _Merge:
    """Tuner layers around one base layer, and those of its tensors that they all write.

    Args:
        layers: outermost first, under their prefixes in what the outermost of all holds.
        base: what the innermost of all holds, without wrappers.
        base_prefix: its prefix.
        names: of the tensors, without that prefix.
        parts: all that the outermost of all holds.
        prefix: its prefix in the model, for errors.
    """

    def __init__(
        self,
        layers: dict[str, Any],
        base: nn.Module,
        base_prefix: str,
        names: list[str],
        parts: dict[str, Any],
        prefix: str,
    ) -> None:
        self.layer: nn.Module = next(iter(layers.values()))
        self._layers = layers
        self._base = base
        self._base_prefix = base_prefix
        self._names = names
        self._values = self._chosen(parts, prefix)
        self._waiting: dict[str, torch.Tensor] = {}
        self.collective = any(map(is_collective, self._values.values()))

    def _chosen(self, parts: dict[str, Any], prefix: str) -> dict[str, Value]:
        """What merging reads, in the order in which it does."""
        read = {self._base_prefix + name for name in self._names}
        for place, layer in self._layers.items():
            idle = tuple(place + name for name in _idle(layer))
            below = () if _is_attention(layer) else place + "base_layer."
            read |= {
                name
                for name in parts
                if name.startswith(place)
                and not name.startswith(below)
                and not f"{name}.".startswith(idle)
            }
        values = {name: part for name, part in parts.items() if name in read}
        if _is_packed(self._base):
            # As the layer computes with it, which need not be how its checkpoint has it.
            values[self._base_prefix + "weight"] = dense_weight(self._base)
        return {name: as_value(prefix + name, value) for name, value in values.items()}

    @cached_property
    def identity(self) -> Hashable | None:
        """Equal for merges of the same adapters with the same settings."""
        inner = self._base_prefix
        adapters = [value for name, value in self._values.items() if not name.startswith(inner)]
        places = frozenset(
            value.identity if isinstance(value, Weight) else value.data_ptr() for value in adapters
        )
        if not places or places & {None, 0}:
            return None
        settings = [
            (name, adapter, repr(held.get(adapter)))
            for layer in self._layers.values()
            for name in layer.other_param_names
            if isinstance(held := getattr(layer, name, None), dict)
            for adapter in layer.active_adapters
            if held.get(adapter) is not None
        ]
        return places, tuple(settings)

    def read(self, name: str) -> torch.Tensor:
        """One of the tensors. Those after it are kept until they are asked for in their turn."""
        if name not in self._waiting:
            merged = self._merged()
            self._waiting = {n: merged[n] for n in self._names[self._names.index(name) :]}
        return self._waiting.pop(name)

    @torch.no_grad()
    def _merged(self) -> dict[str, torch.Tensor]:
        copies = {name: read(value).detach().clone() for name, value in self._values.items()}
        device = copies[self._base_prefix + self._names[0]].device.type
        base = _twin(self._base, self._base_prefix, copies)
        try:
            with torch.autocast(device, enabled=False):
                for place, layer in reversed(self._layers.items()):
                    base = _unloaded(_twin(layer, place, copies, base_layer=base))
        except Exception as error:
            raise SourceError(f"PEFT cannot merge it: {type(error).__name__}: {error}") from error
        merged = state_of(base)
        if _is_packed(self._base):
            merged["weight"] = as_stored(self._base, merged["weight"])
        return {name: merged[name].detach() for name in self._names}


def _unloaded(layer: Any) -> Any:
    """The base layer of a twin, with its adapters merged, as ``merge_and_unload`` leaves it."""
    if hasattr(layer, "unload_and_optionally_merge_module"):
        return layer.unload_and_optionally_merge_module(
            merge=True, safe_merge=False, adapter_names=None
        )
    layer.merge()
    return layer.get_base_layer()


def _idle(layer: Any) -> Iterator[str]:
    """Prefixes of what a layer holds for adapters that are not active."""
    for attribute, adapter in _entries(layer, layer.adapter_layer_names + layer.other_param_names):
        if adapter not in layer.active_adapters:
            yield f"{attribute}.{adapter}."


def _place(value: Any) -> Hashable | None:
    """Equal for what is one tensor; None if there is nothing to know it by."""
    try:
        value = as_value("", value)
    except SourceError:
        return None  # refused later, by whoever knows its name
    if isinstance(value, Weight):
        return value.identity
    address = value.data_ptr()
    return (address, value.dtype, value.shape) if address else None


# ---- twins ----


class _Parts(Walk):
    """All that is below a tuner layer, its adapters as well, as it is."""

    def visit(self, module: nn.Module, prefix: str, beyond: type | None = None) -> None:
        kind: Any = type(module)
        if visitor_of(kind, beyond) is visit_layer:
            self.own(module, prefix)
            self.children(module, prefix)
        else:
            super().visit(module, prefix, beyond)

    def own(self, module: nn.Module, prefix: str) -> None:
        super().own(module, prefix)
        for name in module._non_persistent_buffers_set:
            value = module._buffers[name]
            if value is not None:
                self.add(prefix + name, value)


def _twin(
    module: nn.Module,
    prefix: str,
    tensors: dict[str, torch.Tensor],
    base_layer: nn.Module | None = None,
) -> Any:
    """An object that computes as a module does, and shares nothing with it that it could write.

    Args:
        tensors: those that it needs, each is taken out. It has None for the others.
        base_layer: its child of this name, instead of a twin.
    """
    module = inside(module)
    kind: Any = type(module)
    twin: Any = object.__new__(_twin_class(kind))
    state = vars(nn.Module())
    state |= {name: _copied(value) for name, value in vars(module).items() if name not in _CALLS}
    state["_parameters"] = {
        name: nn.Parameter(tensors.pop(prefix + name), requires_grad=False)
        if prefix + name in tensors
        else None
        for name in module._parameters
    }
    state["_buffers"] = {name: tensors.pop(prefix + name, None) for name in module._buffers}
    state["_modules"] = children = dict(module._modules)
    for name, child in children.items():
        if name == "base_layer" and base_layer is not None:
            children[name] = base_layer
        elif child is not None:
            children[name] = _twin(child, f"{prefix}{name}.", tensors)
    vars(twin).update(state)
    if isinstance(twin, BaseTunerLayer):
        vars(twin).setdefault("fan_in_fan_out", False)  # unknown to layers around packed weights
        twin.quantization_backend = None
    return twin


_CALLS = {name for name in vars(nn.Module()) if "hooks" in name}
_CALLS |= {"forward", "_old_forward", "_hf_hook", "_compiled_call_impl"}
"""Attributes that are about calls of a module, and lead back to the trainer."""


def _copied(value: Any) -> Any:
    """Containers anew, and what is in them as it is."""
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _copied(each)) for key, each in value.items())
    if type(value) in (list, set):
        return type(value)(map(_copied, value)) if type(value) is list else set(value)
    return value


@lru_cache(maxsize=1024)
def _twin_class(kind: type) -> Any:
    """The class of a module's twin: without sharding, packing and finalizers."""
    dense = next(base for base in kind.__mro__ if not _mixed_in(base) and not _packs(base))
    package, _, file = dense.__module__.rpartition(".")
    if issubclass(dense, BaseTunerLayer) and file == "bnb":
        # PEFT's layers around packed weights would pack what they merged anew.
        name = dense.__name__.removesuffix("4bit").removesuffix("8bitLt")
        dense = getattr(import_module(f"{package}.layer"), name)
    if hasattr(dense, "__del__"):
        # It would clean up what is not the twin's own.
        return type(dense.__name__, (dense,), {"__del__": lambda self: None})
    return dense


def _mixed_in(kind: type) -> bool:
    return any(base.__name__ == "FSDPModule" for base in kind.__mro__)


def _packs(kind: type) -> bool:
    return kind.__module__.startswith("bitsandbytes.")


def _is_packed(module: nn.Module) -> bool:
    return any(map(_packs, type(module).__mro__))
