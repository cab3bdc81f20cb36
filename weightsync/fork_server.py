"""Processes that start in milliseconds, from a server that has imported what they need.

A program has one fork server, and what it imports is settled when its first process starts: each
part that wants modules there adds its own, and takes none of another's away.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable

CONTEXT = multiprocessing.get_context("forkserver")
"""Makes processes, pipes and queues. They hold nothing of this process but what they are given."""

_modules: list[str] = []


def preload(modules: Iterable[str]) -> None:
    """Have these modules imported in the server as well.

    One that fails with an ImportError is left out. Any other error of a module ends the server,
    and with it whatever would come from there.

    Once the server runs, this has no effect: a process then imports what it lacks itself.
    """
    _modules.extend(module for module in modules if module not in _modules)
    CONTEXT.set_forkserver_preload(list(_modules))
