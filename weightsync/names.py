"""The names of a module's tensors, whatever wraps the module.

Wrappers are known by their class, never by the look of a name: a child that is really called
``module`` keeps its name.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from weightsync.errors import SourceError

_WRAPPERS = {
    # class -> the attribute that holds what it wraps, where state_dict shows it
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
}
_HIDDEN = {
    # likewise, but state_dict leaves the attribute's name out by itself
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper": (
        "_checkpoint_wrapped_module"
    ),
}
_SEGMENTS = {f"{name}." for name in _WRAPPERS.values()}


def state_of(module: nn.Module) -> dict[str, Any]:
    """The parameters and persistent buffers of a module, the objects themselves.

    Under the names of the module without its wrappers (``torch.compile``, DDP, activation
    checkpointing, in any order). What ``get_extra_state`` returns is no weight, and left out.

    Raises:
        SourceError: two tensors have one name without the wrappers.
    """
    state: dict[str, Any] = module.state_dict(keep_vars=True)
    extra = [name for name in state if name.rpartition(".")[2] == "_extra_state"]
    for name in extra:
        del state[name]
    if not any(segment in name for name in state for segment in _SEGMENTS):
        return state
    prefixes = dict(_prefixes(module, "", ""))
    named: dict[str, Any] = {}
    for name, value in state.items():
        path, dot, last = name.rpartition(".")
        clean = prefixes.get(path + dot, path + dot) + last
        if clean in named:
            raise SourceError(f"two tensors would be called {clean!r}, one of them is {name!r}")
        named[clean] = value
    return named


def _prefixes(module: nn.Module, shown: str, clean: str) -> list[tuple[str, str]]:
    """For each module below: its prefix in the ``state_dict``, and without wrappers."""
    found = [(shown, clean)]
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__}
    dropped = {_WRAPPERS[kind] for kind in kinds & _WRAPPERS.keys()}
    hidden = {_HIDDEN[kind] for kind in kinds & _HIDDEN.keys()}
    for name, child in module.named_children():
        if name in hidden:
            found += _prefixes(child, shown, clean)
        elif name in dropped:
            found += _prefixes(child, f"{shown}{name}.", clean)
        else:
            found += _prefixes(child, f"{shown}{name}.", f"{clean}{name}.")
    return found
