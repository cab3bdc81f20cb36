"""Watches a vLLM worker fall asleep and wake, and keeps what sleep would lose and nothing restores.

vLLM's sleep gives memory away: at level 1 weights are copied out of it and come back on waking, at
level 2 they are gone until the next full load. There vLLM itself keeps the buffers of the model,
and neither tensors that are no buffers (workspaces, adapters, derived matrices) nor, in older
releases, anything of a draft model. Whatever no update brings back is kept here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from weightsync.vllm_worker import compat
from weightsync.vllm_worker.belongings import tensors

TAGS = frozenset({"weights", "kv_cache"})
"""The kinds of memory that can be woken one by one."""

_WATCH = "_weightsync_sleep"
"""Attribute of a worker: its watch."""


class SleepWatch:
    """
    Attributes:
        asleep: the tags of memory that is given away.
        lost: which of the ``"model"`` and the ``"draft"`` hold no weights since deep sleep.
        deep: how often the worker slept deeply.
        invalid: names of tensors that were lost and that no update brings back.
        before_sleep: called when memory is about to be given away.
        targets: the models that updates load; of the others everything is kept.
    """

    def __init__(self, worker: Any) -> None:
        self.asleep: set[str] = compat.sleeping_tags()
        self.lost: set[str] = set()
        self.deep = 0
        self.invalid: set[str] = set()
        self.targets: frozenset[str] = frozenset({"model"})
        self.before_sleep: Callable[[], None] = lambda: None
        self._worker = worker
        self._kept: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def around_sleep(self, sleep: Callable[..., Any]) -> Callable[..., Any]:
        def watched(level: int = 1, *arguments: Any, **options: Any) -> Any:
            if level >= 1:
                self.before_sleep()
            if level >= 2 and "weights" not in self.asleep:
                self._keep()
            result = sleep(level, *arguments, **options)
            if level >= 2 and "weights" not in self.asleep:
                self.lost = set(compat.models(self._worker)) & self.targets
                self.deep += 1
            if level >= 1:
                self.asleep |= TAGS
            return result

        return watched

    def around_wake(self, wake: Callable[..., Any]) -> Callable[..., Any]:
        def watched(tags: list[str] | None = None, *arguments: Any, **options: Any) -> Any:
            result = wake(tags, *arguments, **options)
            self.asleep -= set(TAGS if tags is None else tags)
            if "weights" not in self.asleep:
                self._restore()
            return result

        return watched

    def loaded(self, target: str) -> None:
        """A full update of the model, or of the draft, has succeeded."""
        self.lost.discard(target)

    def _keep(self) -> None:
        self._kept = {
            name: (tensor, tensor.detach().cpu().clone())
            for name, tensor in _unrestored(self._worker, self.targets)
        }

    @torch.no_grad()
    def _restore(self) -> None:
        for name, (tensor, value) in self._kept.items():
            try:
                tensor.data.copy_(value)
            except RuntimeError:  # another shape: it was replaced meanwhile
                self.invalid.add(name)
        self._kept = {}


def watch(worker: Any) -> SleepWatch:
    """The watch of a worker, which begins with the first call."""
    found: SleepWatch | None = vars(worker).get(_WATCH)
    if found is None:
        found = SleepWatch(worker)
        setattr(worker, _WATCH, found)
        # vLLM calls them by name on this very object.
        worker.sleep = found.around_sleep(worker.sleep)
        worker.wake_up = found.around_wake(worker.wake_up)
    return found


def _unrestored(worker: Any, targets: frozenset[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors on the device that deep sleep loses, and that neither vLLM nor an update brings.

    By name; those of one memory once.
    """
    loaded: set[int] = set()
    models = compat.models(worker)
    for target in targets & models.keys():
        loaded |= {_place(parameter) for parameter in models[target].parameters()}
    for target, model in models.items():
        layers = set(model.modules())
        for prefix, layer in model.named_modules():
            found = tensors(layer, layers)
            if target != "model":  # whose buffers every release keeps itself
                found |= {n: b for n, b in layer._buffers.items() if b is not None}
            if target not in targets:
                found |= {n: p for n, p in layer._parameters.items() if p is not None}
            for path, tensor in found.items():
                if tensor.device.type == worker.device.type and _place(tensor) not in loaded:
                    loaded.add(_place(tensor))
                    yield f"{target}: {prefix}.{path}", tensor


def _place(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())
