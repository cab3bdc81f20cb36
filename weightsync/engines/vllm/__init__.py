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
from weightsync.options import names_of, require_known

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

    Raises:
        EngineError: it does not take these options, or values of theirs.
    """
    client = _client(target)
    require_known(type(target).__name__, options, VLLMEngine, client)
    own = {name: options.pop(name) for name in names_of(client) or () if name in options}
    return VLLMEngine(client(target, **own), **options)


def make_client(target: Any, **options: Any) -> VLLMClient:
    """What talks to an object of vLLM's.

    Args:
        **options: an ``AsyncLLM``'s ``loop``, a Ray actor's ``attribute``.

    Raises:
        EngineError: it does not take these options.
    """
    client = _client(target)
    require_known(type(target).__name__, options, client)
    return client(target, **options)


def _client(target: Any) -> Callable[..., VLLMClient]:
    return next((client for recognises, client in CLIENTS if recognises(target)), LLMClient)


__all__ = ["VLLMEngine", "accepts", "make", "make_client"]
