"""vLLM: ``engine`` is the life cycle, one client for each form it is run in.

Nothing here imports vLLM, Ray or an HTTP client before an object of theirs is there.
"""

from __future__ import annotations

from typing import Any

from weightsync.engines.vllm import llm, server
from weightsync.engines.vllm.engine import VLLMEngine
from weightsync.engines.vllm.llm import LLMClient
from weightsync.engines.vllm.server import ServerClient


def accepts(target: Any) -> bool:
    return llm.accepts(target) or server.accepts(target)


def make(target: Any, **options: Any) -> VLLMEngine:
    """The engine for an object of vLLM's. ``options`` are those of :class:`VLLMEngine`."""
    client = ServerClient(target) if server.accepts(target) else LLMClient(target)
    return VLLMEngine(client, **options)


__all__ = ["VLLMEngine", "accepts", "make"]
