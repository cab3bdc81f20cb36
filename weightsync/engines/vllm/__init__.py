"""vLLM: ``engine`` is the life cycle, one client for each form it is run in.

Nothing here imports vLLM, Ray or an HTTP client before an object of theirs is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weightsync.engines.vllm import async_llm, llm, ray, server
from weightsync.engines.vllm.async_llm import AsyncLLMClient
from weightsync.engines.vllm.client import VLLMClient
from weightsync.engines.vllm.engine import VLLMEngine
from weightsync.engines.vllm.llm import LLMClient
from weightsync.engines.vllm.ray import RayClient
from weightsync.engines.vllm.server import ServerClient

CLIENTS: list[tuple[Callable[[Any], bool], Callable[..., VLLMClient]]] = [
    (llm.accepts, LLMClient),
    (async_llm.accepts, AsyncLLMClient),
    (server.accepts, ServerClient),
    (ray.accepts, RayClient),
]
"""The forms of vLLM: what recognises an object of one, and its client."""


def accepts(target: Any) -> bool:
    return any(recognises(target) for recognises, _ in CLIENTS)


def make(target: Any, **options: Any) -> VLLMEngine:
    """The engine for an object of vLLM's.

    Args:
        **options: those of :class:`VLLMEngine`, and of the client: an ``AsyncLLM``'s ``loop``, a
            Ray actor's ``attribute``.
    """
    client = next((client for recognises, client in CLIENTS if recognises(target)), LLMClient)
    own = {name: options.pop(name) for name in ("loop", "attribute") if name in options}
    return VLLMEngine(client(target, **own), **options)


__all__ = ["VLLMEngine", "accepts", "make"]
