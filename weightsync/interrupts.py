"""Ctrl-C in the middle of something that must not be left half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_DEFERRED = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Let Python's handlers of SIGINT and SIGTERM wait until the block is done.

    The second signal is not deferred: whoever insists gets through. Handlers can only be replaced
    in the main thread, and only there do they interrupt anything.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[int] = []
    former: dict[int, Any] = {}

    def remember(number: int, frame: FrameType | None) -> None:
        if pending:
            former[number](number, frame)
        pending.append(number)

    try:
        for number in _DEFERRED:
            handler = signal.getsignal(number)
            if callable(handler):  # not: ignored, the default action, or not of Python's making
                former[number] = handler
                signal.signal(number, remember)
        yield
    finally:
        for restored, handler in former.items():
            signal.signal(restored, handler)
        if len(pending) == 1:
            signal.raise_signal(pending[0])
