"""A worker's policy, as an engine that a receiver drives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from weightsync.deadline import Deadline
from weightsync.engine import Engine, Fit, Update, Verification
from weightsync.engines.module import ModuleEngine
from weightsync.errors import EngineError, MismatchError
from weightsync.integrations.torchrl.names import give_memory, named, weights_of
from weightsync.manifest import Manifest
from weightsync.version import Version

_EXTRA = "__extra_state__."
"""What TorchRL puts before the names of what ``get_extra_state`` returns."""


class PolicyEngine(Engine):
    """Writes into the tensors of a policy, in place, whichever object it is at the moment.

    A collector may replace a worker's policy by a copy on another device at any time before the
    first rollout. The first version must have all of its tensors; later ones may have some.

    Args:
        policy: gives the module; None once it is gone.
        applied: called when the policy holds a newer version than before; not for the first.
    """

    def __init__(self, policy: Callable[[], nn.Module | None], applied: Callable[[], None]) -> None:
        self._policy = policy
        self._applied = applied
        self._tensors: dict[str, torch.Tensor] = {}
        self._extra: dict[str, torch.Tensor] = {}
        self._module = ModuleEngine(self._tensors, strict=False)
        self._version: Version | None = None

    @property
    def target(self) -> Any:
        return self._policy()

    def _present(self) -> nn.Module:
        policy = self._policy()
        if policy is None:
            raise EngineError("the policy is gone: nothing but this scheme knows it any more")
        return policy

    def check(self, manifest: Manifest) -> Fit:
        policy = self._present()
        give_memory(policy)
        self._extra = {
            spec.name: torch.empty(spec.shape, dtype=spec.dtype)
            for spec in manifest.tensors
            if spec.name.startswith(_EXTRA)
        }
        self._tensors.clear()
        self._tensors.update(named(weights_of(policy)), **self._extra)
        fit = self._module.check(manifest)
        if fit.unexpected or (fit.missing and self._version is None):
            raise MismatchError(
                "the weights sent are not this policy's; nothing was changed. Sent and not here: "
                f"{_some(fit.unexpected)}; here and not sent: {_some(fit.missing)}",
                missing=fit.missing,
                unexpected=fit.unexpected,
            )
        return fit

    def stage(self, update: Update, deadline: Deadline) -> None:
        self._module.stage(update, deadline)

    def apply(self, update: Update, deadline: Deadline) -> None:
        self._module.apply(update, deadline)
        if self._extra:
            state = {name[len(_EXTRA) :]: value.clone() for name, value in self._extra.items()}
            self._present().set_extra_state(state)

    def label(self, version: Version | None) -> None:
        if version is None:
            return
        former, self._version = self._version, max(version, self._version or version)
        if former is not None and version > former:
            self._applied()

    def verify(self, update: Update) -> Verification:
        return self._module.verify(update)


def hold_while_computing(
    policy: nn.Module, hold: Callable[[], AbstractContextManager[Any]]
) -> Callable[[], None]:
    """Have no update applied while the policy computes: its output would be of two versions.

    Where the module is compiled or captured into a graph nothing is held.

    Returns:
        What undoes it.
    """
    entered = threading.local()

    def enter(module: nn.Module, inputs: Any) -> None:
        if not torch.compiler.is_compiling():
            held = hold()
            held.__enter__()
            entered.__dict__.setdefault("stack", []).append(held)

    def leave(module: nn.Module, inputs: Any, outputs: Any) -> None:
        if not torch.compiler.is_compiling() and entered.__dict__.get("stack"):
            entered.stack.pop().__exit__(None, None, None)

    hooks = (
        policy.register_forward_pre_hook(enter, prepend=True),
        policy.register_forward_hook(leave, always_call=True),
    )

    def undo() -> None:
        for hook in hooks:
            hook.remove()

    return undo


def _some(names: tuple[str, ...]) -> str:
    return (", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")) or "none"
