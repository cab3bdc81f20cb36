"""Other processes for a test: they hold nothing of the test's own, and never outlive it.

They come from a fork server, a fresh process that has imported torch and nothing of the test's.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import torch

from weightsync.deadline import Deadline
from weightsync.fork_server import CONTEXT, preload
from weightsync.testing import faults

T = TypeVar("T")

WAIT = float(os.environ.get("WEIGHTSYNC_TESTING_WAIT", "30"))
"""Seconds for whatever should take none: only a broken test waits that long."""

preload(
    [
        "torch",
        "pytest",
        "weightsync.schemes.double_buffer",
        "weightsync.engines",
        "weightsync.receiver",
        "weightsync.sender",
        "weightsync.testing.roles",
        "weightsync.testing.engines",
    ]
)


class PeerError(Exception):
    """What a function raised in the other process.

    Attributes:
        kind: the name of the exception's class.
        text: its words.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.text = text


class Peer:
    """A process that runs the functions it is told to, each with a state that stays.

    The functions are those of modules, and what they take and return is pickled.

    Args:
        daemon: ends with the process that made it. Such a one may start no processes of its own.
    """

    def __init__(self, daemon: bool = True) -> None:
        self._link, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_serve, args=(theirs,), daemon=daemon)
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def start(self, function: Callable[..., object], *args: Any, **options: Any) -> None:
        """Have ``function(state, ...)`` run there; ``result`` tells what came of it."""
        self._link.send((function, args, options))

    def result(self, within: float = WAIT) -> Any:
        """What the function returned.

        Raises:
            PeerError: what it raised. AssertionError: it is not done within so many seconds.
        """
        assert self._link.poll(within), f"pid {self.pid} did not answer within {within} s"
        good, value = self._link.recv()
        if not good:
            raise PeerError(*value)
        return value

    def answered(self, within: float = 0.0) -> bool:
        return self._link.poll(within)

    def call(
        self, function: Callable[..., object], *args: Any, within: float = WAIT, **options: Any
    ) -> Any:
        self.start(function, *args, **options)
        return self.result(within)

    def kill(self) -> None:
        """End it at once, wherever it is, and wait until it is gone."""
        self.process.kill()
        self.process.join(WAIT)
        assert self.process.exitcode == -signal.SIGKILL

    def pause(self) -> None:
        """Stop it where it is, and wait until it stands."""
        faults.stop(self.pid)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def end(self, within: float = WAIT) -> None:
        """Let it return from its main function, as a program does that is done."""
        self._link.send(None)
        self.process.join(within)
        assert self.process.exitcode == 0, f"pid {self.pid} ended with {self.process.exitcode}"

    def dispose(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join(WAIT)
        self._link.close()


def _serve(link: Any) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test; its peers it ends itself
    state = SimpleNamespace()
    while True:
        try:
            order = link.recv()
        except EOFError:
            return
        if order is None:
            return
        function, args, options = order
        try:
            answer = True, function(state, *args, **options)
        except Exception as error:
            answer = False, (type(error).__name__, str(error))
        link.send(answer)


def eventually(ready: Callable[[], T | None], timeout: float = WAIT) -> T:
    """Wait for a condition, and return what it gave."""
    found = Deadline(timeout).wait(lambda: ready() or None)
    assert found is not None, "the condition did not come true"
    return found
