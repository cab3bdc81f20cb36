"""Options that a user passes on to an engine: whether it takes them, and what kind they are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from weightsync.errors import EngineError


def names_of(taker: Callable[..., Any]) -> list[str] | None:
    """The options of a function or class: what may be left out. None: it takes any."""
    parameters = inspect.signature(taker).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [each.name for each in parameters if each.default is not each.empty]


def require_known(what: str, given: Iterable[str], *takers: Callable[..., Any]) -> None:
    """
    Args:
        what: how messages call what they are given to.

    Raises:
        EngineError: none of the takers has such an option; says which there are.
    """
    known: list[str] = []
    for taker in takers:
        names = names_of(taker)
        if names is None:
            return
        known += names
    unknown = [name for name in given if name not in known]
    if unknown:
        there_are = f"it takes {', '.join(known)}" if known else "it takes none"
        raise EngineError(
            f"{what} has no option {', '.join(map(repr, unknown))}: {there_are}; every receiver "
            "takes id, apply_timeout, listeners"
        )


def require_truth(**options: object) -> None:
    """
    Raises:
        EngineError: one is neither True nor False. "no" would be true to Python.
    """
    for name, value in options.items():
        if type(value) is not bool:
            raise EngineError(f"{name}={value!r:.80}: True or False")
