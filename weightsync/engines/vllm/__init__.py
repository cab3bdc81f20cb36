"""vLLM: ``engine`` is the life cycle, one client for each form it is run in.

Nothing here imports vLLM, Ray or an HTTP client before an object of theirs is there.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable
from typing import Any

from weightsync.engines.vllm import async_llm, llm, server
from weightsync.engines.vllm.async_llm import AsyncLLMClient
from weightsync.engines.vllm.client import VLLMClient
from weightsync.engines.vllm.engine import VLLMEngine
from weightsync.engines.vllm.llm import LLMClient
from weightsync.engines.vllm.server import ServerClient

CLIENTS: list[tuple[Callable[[Any], bool], Callable[..., VLLMClient]]] = [
    (llm.accepts, LLMClient),
    (async_llm.accepts, AsyncLLMClient),
    (server.accepts, ServerClient),
]
"""The forms of vLLM: what recognises an object of one, and its client."""


def accepts(target: Any) -> bool:
    return any(recognises(target) for recognises, _ in CLIENTS)


def make(target: Any, *, loop: AbstractEventLoop | None = None, **options: Any) -> VLLMEngine:
    """The engine for an object of vLLM's.

    Args:
        loop: the event loop of an ``AsyncLLM``, where neither it nor the caller runs in it yet.
        **options: those of :class:`VLLMEngine`.
    """
    client = next((client for recognises, client in CLIENTS if recognises(target)), LLMClient)
    own = {} if loop is None else {"loop": loop}
    return VLLMEngine(client(target, **own), **options)


__all__ = ["VLLMEngine", "accepts", "make"]
