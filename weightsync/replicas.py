"""Several engines behind one receiver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weightsync.engine import Engine, as_engine
from weightsync.errors import EngineError

MAX_NAME = 100
"""Characters: they stand in every record of a receiver."""


class Replicas:
    """Engines that one receiver keeps at the same version.

    All are paused before the first of them changes, so that no two of them answer with different
    versions at a time. One that fails, dies or does not come back is reported by its name, and the
    others go on with the new version: it costs them half of ``apply_timeout`` at most.

    Args:
        engines: whatever a receiver takes, each; a mapping gives them names of your own.
        **options: of all of these engines.
    """

    def __init__(self, engines: Mapping[str, Any] | Sequence[Any], **options: Any) -> None:
        if isinstance(engines, Mapping):
            names, targets = [str(name) for name in engines], list(engines.values())
        elif isinstance(engines, (list, tuple)):
            names, targets = [], list(engines)
        else:
            kind = type(engines).__name__
            raise EngineError(f"Replicas takes a list of engines, or a mapping of names, no {kind}")
        if not targets:
            raise EngineError("Replicas([]): there is no engine")
        made = [as_engine(target, **options) for target in targets]
        if len({(id(engine.target), engine.name) for engine in made}) < len(made):
            raise EngineError("an engine is there twice")
        names = names or _names(made)
        too_long = [name for name in names if len(name) > MAX_NAME]
        if too_long:
            raise EngineError(f"{too_long[0]!r:.80}: names of engines have {MAX_NAME} characters")
        if len(set(names)) < len(names):
            raise EngineError(f"two engines have one name: {', '.join(names)}")
        self.engines: dict[str, Engine] = dict(zip(names, made, strict=True))

    def __len__(self) -> int:
        return len(self.engines)


def _names(engines: Sequence[Engine]) -> list[str]:
    """Their own names, numbered where they are not unique."""
    own = [engine.name for engine in engines]
    return [name if own.count(name) == 1 else f"{name} {number}" for number, name in enumerate(own)]


def engines_of(target: Any, **options: Any) -> dict[str, Engine]:
    """The engines of what a user passes to a receiver, by name.

    Raises:
        EngineError: nothing here can drive it, or it does not take these options.
    """
    if isinstance(target, (list, tuple)):
        return Replicas(target, **options).engines
    if isinstance(target, Replicas):
        if options:
            raise EngineError(f"give {', '.join(options)} to Replicas(...) instead")
        return target.engines
    engine = as_engine(target, **options)
    return {engine.name: engine}
