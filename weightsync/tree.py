"""The tensors of a module, under its names without wrappers.

Wrappers are known by their class, never by the look of a name: a child that is really called
``module`` keeps its name. What needs more than a look inside (adapters, packed or sharded
parameters) has a *visitor* in the file of ``weightsync/sources/`` that is about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from importlib import import_module
from typing import Any

from torch import nn

from weightsync.errors import SourceError

Visitor = Callable[[nn.Module, str, "Walk"], None]
"""Adds the tensors of a module and all below it to a walk, under names that begin with a prefix."""


class Walk:
    """A walk through a module and its children that collects tensors under their names.

    Args:
        within: the walk of which this is a detour, with a collection of its own.
        merge: whether adapters are merged, or left out; a detour does as its walk.
    """

    def __init__(self, within: Walk | None = None, merge: bool = True) -> None:
        self.merge: bool = merge if within is None else within.merge
        self.found: dict[str, Any] = {}
        self.shared: dict[str, Any] = {} if within is None else within.shared
        """What visitors of one walk and its detours know together, by the kind of trainer."""
        self._replaced: dict[int, dict[str, Any]] = {} if within is None else within._replaced

    def replace(self, module: nn.Module, name: str, value: Any) -> None:
        """Take something else for a parameter of a module that is still to be visited."""
        self._replaced.setdefault(id(module), {})[name] = value

    def add(self, name: str, value: Any) -> None:
        """
        Raises:
            SourceError: there is a tensor of this name already.
        """
        if name in self.found:
            raise SourceError(f"two tensors would be called {name!r}")
        self.found[name] = value

    def visit(self, module: nn.Module, prefix: str, beyond: type | None = None) -> None:
        """Collect a module and all below it. The prefix ends with a dot, or is empty.

        Args:
            beyond: a class that was mixed into the module's own, and is dealt with already.
        """
        kind: Any = type(module)
        visitor_of(kind, beyond)(module, prefix, self)

    def parameters(self, module: nn.Module) -> dict[str, Any]:
        """A module's own parameters, or what is taken for them."""
        found = dict(self._replaced.get(id(module), {}))
        for name, value in module._parameters.items():
            if value is not None and not hasattr(value, "_param_infos"):
                found.setdefault(name, value)
        return found

    def own(self, module: nn.Module, prefix: str) -> None:
        """Collect a module's own parameters and persistent buffers."""
        kind: Any = type(module)
        if _saves_itself(kind):
            state: dict[str, Any] = {}
            module._save_to_state_dict(state, prefix, True)  # by place, as torch does
            state.pop(prefix + "_extra_state", None)
            for name, value in state.items():
                self.add(name, value)
            return
        for name, value in self.parameters(module).items():
            self.add(prefix + name, value)
        transient = module._non_persistent_buffers_set
        for name, value in module._buffers.items():
            if value is not None and name not in transient:
                self.add(prefix + name, value)

    def children(self, module: nn.Module, prefix: str) -> None:
        """Collect what is below a module."""
        for name, child in module._modules.items():
            if child is not None:
                self.visit(child, f"{prefix}{name}.")


def state_of(module: nn.Module, merge: bool = True) -> dict[str, Any]:
    """The parameters and persistent buffers of a module, the objects themselves.

    Under the names of the module without its wrappers (``torch.compile``, DDP, FSDP, activation
    checkpointing, adapters, in any order). What ``get_extra_state`` returns is no weight, and
    left out. What does not exist as a tensor is a :class:`~weightsync.weight.Weight`.

    Args:
        merge: whether adapters are merged into the base, or left out.

    Raises:
        SourceError: two tensors have one name without the wrappers.
    """
    walk = Walk(merge=merge)
    walk.visit(module, "")
    return walk.found


def _plain(module: nn.Module, prefix: str, walk: Walk) -> None:
    walk.own(module, prefix)
    walk.children(module, prefix)


def visit_average(module: nn.Module, prefix: str, walk: Walk) -> None:
    """An ``AveragedModel``: the model, without the count of what was averaged."""
    average: Any = module
    walk.visit(average.module, prefix)


def _wrapper(attribute: str) -> Visitor:
    def visit(module: nn.Module, prefix: str, walk: Walk) -> None:
        walk.own(module, prefix)
        for name, child in module._modules.items():
            if child is not None:
                walk.visit(child, prefix if name == attribute else f"{prefix}{name}.")

    return visit


def modules_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules, each once, under their names without wrappers, and without the wrappers."""
    return _modules(module, "", set())


def _modules(module: nn.Module, name: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    module = inside(module, _KEEPERS)
    if module in seen:
        return
    seen.add(module)
    yield name, module
    for child_name, child in module._modules.items():
        if child is not None:
            yield from _modules(child, f"{name}.{child_name}" if name else child_name, seen)


def inside(module: nn.Module, holders: Mapping[str, str] | None = None) -> nn.Module:
    """The module that wrappers around it hold: what the user calls the model."""
    holders = _HOLDERS if holders is None else holders
    while True:
        attribute = next((holders[kind] for kind in _kinds(type(module)) & holders.keys()), "")
        child = module._modules.get(attribute) if attribute else None
        if child is None:
            return module
        module = child


_WRAPPERS = {
    # class -> the attribute that holds what it wraps
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "deepspeed.runtime.engine.DeepSpeedEngine": "module",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper": (
        "_checkpoint_wrapped_module"
    ),
    "torchrl.modules.llm.policies.transformers_wrapper.TransformersWrapper": "model",
}

_HOLDERS = {
    **_WRAPPERS,
    "torch.optim.swa_utils.AveragedModel": "module",
    "peft.peft_model.PeftModel": "base_model",
    "peft.mixed_model.PeftMixedModel": "base_model",
    "peft.tuners.tuners_utils.BaseTuner": "model",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": (
        "_fsdp_wrapped_module"
    ),
}

_KEEPERS = {
    **_HOLDERS,
    "peft.utils.other.AuxiliaryTrainingWrapper": "original_module",
}

_VISITORS = {
    # class, or package -> module and function that knows it; imported only where it is met
    "torch.optim.swa_utils.AveragedModel": "weightsync.tree:visit_average",
    "peft.peft_model.PeftModel": "weightsync.sources.peft:visit_model",
    "peft.mixed_model.PeftMixedModel": "weightsync.sources.peft:visit_model",
    "peft.tuners.tuners_utils.BaseTuner": "weightsync.sources.peft:visit_tuner",
    "peft.tuners.tuners_utils.BaseTunerLayer": "weightsync.sources.peft:visit_layer",
    "peft.utils.other.AuxiliaryTrainingWrapper": "weightsync.sources.peft:visit_auxiliary",
    "bitsandbytes.nn.modules.Linear4bit": "weightsync.sources.quantised:visit_linear",
    "bitsandbytes.nn.modules.Linear8bitLt": "weightsync.sources.quantised:visit_linear",
    "bitsandbytes.nn.modules.Embedding4bit": "weightsync.sources.quantised:visit_linear",
    "bitsandbytes.nn.modules.Embedding8bit": "weightsync.sources.quantised:visit_linear",
    "bitsandbytes.nn.parametrize.Bnb4bitParametrization": (
        "weightsync.sources.quantised:visit_parametrization"
    ),
    "transformers.modeling_utils.PreTrainedModel": "weightsync.sources.quantised:visit_pretrained",
    # all layers of libraries that pack weights in a way of their own
    "aqlm": "weightsync.sources.quantised:visit_packed_layer",
    "auto_gptq": "weightsync.sources.quantised:visit_packed_layer",
    "awq": "weightsync.sources.quantised:visit_packed_layer",
    "eetq": "weightsync.sources.quantised:visit_packed_layer",
    "gptqmodel": "weightsync.sources.quantised:visit_packed_layer",
    "hqq": "weightsync.sources.quantised:visit_packed_layer",
    "vptq": "weightsync.sources.quantised:visit_packed_layer",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": (
        "weightsync.sources.fsdp1:visit"
    ),
    "torch.distributed.fsdp.FSDPModule": "weightsync.sources.sharded:visit_fsdp2",
    "torch.distributed.fsdp._fully_shard._fully_shard.FSDPModule": (  # torch 2.6, 2.7
        "weightsync.sources.sharded:visit_fsdp2"
    ),
    "torch.distributed._composable.fsdp.fully_shard.FSDPModule": (  # before torch 2.6
        "weightsync.sources.sharded:visit_fsdp2"
    ),
}


def _kinds(kind: type) -> set[str]:
    return {f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__}


@lru_cache(maxsize=4096)
def visitor_of(kind: type, beyond: type | None) -> Visitor:
    """How to collect a module of a class (of what is beyond one of its bases, if that is given).

    The most derived class that is known decides.
    """
    classes = kind.__mro__
    for base in classes[classes.index(beyond) + 1 :] if beyond else classes:
        name = f"{base.__module__}.{base.__qualname__}"
        if name in _WRAPPERS:
            return _wrapper(_WRAPPERS[name])
        package = name.partition(".")[0]
        if name in _VISITORS or package in _VISITORS:
            module, _, function = _VISITORS.get(name, _VISITORS.get(package, "")).partition(":")
            visitor: Visitor = getattr(import_module(module), function)
            return visitor
    return _plain


@lru_cache(maxsize=4096)
def _saves_itself(kind: type) -> bool:
    """Whether a module says in its own way what belongs into a ``state_dict``."""
    return kind._save_to_state_dict is not nn.Module._save_to_state_dict  # type: ignore[attr-defined]
