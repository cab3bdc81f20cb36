"""Counts how often an engine is put to deep sleep through an object of this process.

Deep sleep (level 2) takes the weights away for good. Whether they are still there is asked at every
poll, and must cost no call of the engine: an ``LLM`` may be used by one thread at a time.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

_COUNTS: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def deep_sleeps(core: Any) -> int:
    """How often since the first call for this object.

    Not seen is who reaches the engine another way: ``collective_rpc("sleep")``, another process.

    Args:
        core: vLLM's client of its engine core, through which ``LLM`` and ``AsyncLLM`` pass.
    """
    if core not in _COUNTS:
        _COUNTS[core] = 0
        for name in ("sleep", "sleep_async"):
            if hasattr(core, name):
                setattr(core, name, _counting(core, getattr(core, name)))
    return _COUNTS[core]


def _counting(core: Any, sleep: Any) -> Any:
    here = weakref.ref(core)

    @functools.wraps(sleep)
    def counted(level: int = 1, *arguments: Any, **options: Any) -> Any:
        owner = here()
        if level >= 2 and owner is not None:
            _COUNTS[owner] += 1
        return sleep(level, *arguments, **options)

    return counted
