"""Counts how often an engine is paused or put to sleep through an object of this process.

Deep sleep (level 2) takes the weights away for good. Whether they are still there is asked at every
poll, and must cost no call of the engine: an ``LLM`` may be used by one thread at a time. And an
engine that nobody put to sleep, which is how an ``LLM`` is paused too, need not be asked whether it
is paused.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from typing import Any


@dataclass
class Sleeps:
    """How often an engine was paused, or put to sleep at any level; and at level 2."""

    all: int = 0
    deep: int = 0


_COUNTS: weakref.WeakKeyDictionary[Any, Sleeps] = weakref.WeakKeyDictionary()


def sleeps(core: Any) -> Sleeps:
    """Since the first call for this object.

    Not seen is who reaches the engine another way: ``collective_rpc("sleep")``, another process.

    Args:
        core: vLLM's client of its engine core, through which ``LLM`` and ``AsyncLLM`` pass.
    """
    if core not in _COUNTS:
        _COUNTS[core] = Sleeps()
        for name in ("sleep", "sleep_async", "pause_scheduler", "pause_scheduler_async"):
            if hasattr(core, name):
                sleeps_at = 1 if name.startswith("sleep") else 0
                setattr(core, name, _counting(core, getattr(core, name), sleeps_at))
    return _COUNTS[core]


def _counting(core: Any, pause: Any, level: int) -> Any:
    """
    Args:
        level: of sleep, if the call names none; 0: it has no levels.
    """
    here = weakref.ref(core)

    @functools.wraps(pause)
    def counted(*arguments: Any, **options: Any) -> Any:
        owner = here()
        if owner is not None:
            said = arguments[0] if arguments else options.get("level", level)
            _COUNTS[owner].all += 1
            _COUNTS[owner].deep += bool(level) and said >= 2
        return pause(*arguments, **options)

    return counted
