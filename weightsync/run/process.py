"""Which process it is: told apart from all others, those of other containers and hosts included."""

from __future__ import annotations

import os
import secrets
import socket
from typing import Any

_SECRET = secrets.token_hex(8)


def this_process() -> str:
    """As no other process calls itself, not even a forked child."""
    return f"{os.getpid()}-{_SECRET}"


def self_description() -> dict[str, Any]:
    """Of the process that owns something, for a record that others read."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "process": this_process()}


def busy_words(owner: dict[str, Any], elsewhere: str) -> str:
    """What is said of a run whose sender is alive, and what to do.

    Args:
        owner: what that sender's process wrote of itself; not believed.
        elsewhere: what to do if it is another process.
    """
    pid, host = owner.get("pid"), owner.get("host")
    who = "unknown" if pid is None else f"pid {pid!s:.20} on {host!s:.80}"
    advice = elsewhere
    if owner.get("process") == this_process():
        advice = (
            "it is in this very process: shutdown() it first, or go on with that one (one that "
            "nothing refers to any more has ended)"
        )
    return f"another sender ({who}) is alive and owns this run; {advice}"
