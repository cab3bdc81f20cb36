"""An engine's object that answers only while it holds a whole version."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightsync.receiver import Receiver

GENERATING = (
    "add_request",
    "beam_search",
    "chat",
    "classify",
    "complete",
    "completion",
    "create",
    "embed",
    "encode",
    "enqueue",
    "forward",
    "generate",
    "reward",
    "score",
)
"""What methods that ask for answers are called, alone or as the first word: ``generate_batch``."""


class Guard:
    """What ``receiver.guard()`` gives: use it in the place of the engine's object.

    Everything is forwarded to that object. Methods that ask the model for answers (those named in
    ``GENERATING``, and calling the object itself) raise
    :class:`~weightsync.errors.EngineUnusableError` at once whenever ``receiver.require_ready()``
    does, asynchronous ones too: when they are called, before they are awaited. After ``rebind``
    they reach the new object.
    """

    def __init__(self, receiver: Receiver, engine: str | None = None) -> None:
        self.__dict__.update(_receiver=receiver, _engine=engine)

    @property
    def _target(self) -> Any:
        receiver = self._receiver
        return (receiver.engines[self._engine] if self._engine else receiver.engine).target

    def __getattr__(self, name: str) -> Any:
        if name in ("_receiver", "_engine"):  # a copy that is being made
            raise AttributeError(name)
        value = getattr(self._target, name)
        if not callable(value) or not _generates(name):
            return value

        @functools.wraps(value)
        def guarded(*arguments: Any, **options: Any) -> Any:
            self._receiver.require_ready(self._engine)
            return value(*arguments, **options)

        return guarded

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._target, name, value)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self._receiver.require_ready(self._engine)
        return self._target(*arguments, **options)

    def __dir__(self) -> list[str]:
        return dir(self._target)

    def __repr__(self) -> str:
        return f"<guarded {self._target!r}>"


def _generates(name: str) -> bool:
    return any(name == word or name.startswith(f"{word}_") for word in GENERATING)
