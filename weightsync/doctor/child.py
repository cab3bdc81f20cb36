"""Asking another process: one that has to be fresh, or may die of what it is asked."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from weightsync.errors import WeightSyncError


def ask(code: str, *arguments: str, seconds: float, isolated: bool = False) -> Any:
    """Run some code in a Python of its own, and read the JSON that it prints last.

    Args:
        isolated: without anything but the standard library, which is there in milliseconds.

    Raises:
        WeightSyncError: it failed, or was not done in time; has its last words.
    """
    command = [sys.executable, *(["-I", "-S"] if isolated else []), "-c", code, *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=seconds
        )
    except subprocess.TimeoutExpired:
        raise WeightSyncError(f"it was not done within {seconds:.0f} s") from None
    except OSError as error:
        raise WeightSyncError(f"{sys.executable}: {error.strerror}") from None
    lines = done.stdout.strip().splitlines()
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError):
        words = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise WeightSyncError(f"it ended with status {done.returncode}: {words:.300}") from None
