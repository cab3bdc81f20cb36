"""One file for each kind of inference engine. The first entry that accepts the object is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weightsync.engine import Engine, EngineMaker

ENGINES: list[tuple[Callable[[Any], bool], EngineMaker]] = []


def _add() -> None:
    # Neither of the two imports vllm.
    from weightsync.engines import module, vllm

    ENGINES.extend(
        [
            (module.accepts, module.ModuleEngine),
            (vllm.accepts, vllm.make),
        ]
    )


_add()

__all__ = ["ENGINES", "Engine"]
