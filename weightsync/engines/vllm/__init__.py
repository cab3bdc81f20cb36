"""vLLM: ``engine`` is the life cycle, one client for each form it is run in.

Nothing here imports vLLM or Ray before an object of theirs is there.
"""

from __future__ import annotations

from typing import Any

from weightsync.engines.vllm import llm
from weightsync.engines.vllm.engine import VLLMEngine
from weightsync.engines.vllm.llm import LLMClient


def accepts(target: Any) -> bool:
    return llm.accepts(target)


def make(target: Any, **options: Any) -> VLLMEngine:
    """The engine for an object of vLLM's. ``options`` are those of :class:`VLLMEngine`."""
    return VLLMEngine(LLMClient(target), **options)


__all__ = ["VLLMEngine", "accepts", "make"]
