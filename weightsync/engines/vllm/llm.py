"""vLLM's synchronous ``LLM``, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weightsync.deadline import Deadline
from weightsync.engines.vllm.client import CALL, Facts, Mode, VLLMClient
from weightsync.engines.vllm.facts import adapters_of, facts_of
from weightsync.engines.vllm.sleeping import sleeps
from weightsync.errors import EngineDiedError


class LLMClient(VLLMClient):
    """Calls a ``vllm.LLM``: from one thread at a time, which is the caller's to see to."""

    name = "LLM"
    ends_with_us = True
    only_we_pause = True

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    @property
    def target(self) -> Any:
        return self._llm

    def facts(self, deadline: Deadline) -> Facts:
        return facts_of(self._llm.llm_engine)

    def ask(self, request: str, deadline: Deadline, what: str) -> list[str]:
        return self.bounded(
            lambda: list(self._llm.collective_rpc(CALL, args=(request,))), deadline, what
        )

    def is_paused(self, deadline: Deadline) -> bool:
        return bool(self.bounded(self._llm.llm_engine.is_sleeping, deadline, "is_sleeping"))

    def pause(self, mode: Mode, deadline: Deadline) -> None:
        self.bounded(lambda: self._llm.sleep(level=0, mode=mode), deadline, "pause")

    def resume(self, deadline: Deadline) -> None:
        self.bounded(lambda: self._llm.wake_up(tags=["scheduling"]), deadline, "resume")

    def wake(self, tags: Sequence[str], deadline: Deadline) -> None:
        self.bounded(lambda: self._llm.wake_up(tags=list(tags)), deadline, "wake_up")

    def reset_prefix_cache(self, deadline: Deadline) -> bool:
        return bool(
            self.bounded(
                lambda: self._llm.reset_prefix_cache(reset_running_requests=True),
                deadline,
                "reset_prefix_cache",
            )
        )

    def reset_encoder_cache(self, deadline: Deadline) -> None:
        self.bounded(self._llm.llm_engine.reset_encoder_cache, deadline, "reset_encoder_cache")

    def set_version(self, words: str, deadline: Deadline) -> None:
        say = getattr(self._llm, "update_weight_version", None)
        if say is not None:  # before vLLM 0.26 an LLM has no label
            self.bounded(lambda: say(words), deadline, "update_weight_version")

    def logprobs(self, prompts: Sequence[Sequence[int]], deadline: Deadline) -> list[list[float]]:
        from vllm import SamplingParams

        parameters = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self.bounded(
            lambda: self._llm.generate(inputs, parameters, use_tqdm=False), deadline, "generate"
        )
        return [
            [
                position[token].logprob
                for token, position in zip(
                    output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True
                )
            ]
            for output in outputs
        ]

    def adapters_in_use(self, deadline: Deadline) -> set[str] | None:
        return adapters_of(self._llm.llm_engine)

    def deep_sleeps(self) -> int | None:
        return sleeps(self._llm.llm_engine.engine_core).deep

    def pauses(self) -> int | None:
        return sleeps(self._llm.llm_engine.engine_core).all

    def require_alive(self) -> None:
        # vLLM notices, but does not tell a call that waits for it.
        core = getattr(self._llm.llm_engine, "engine_core", None)
        if getattr(getattr(core, "resources", None), "engine_dead", False):
            raise EngineDiedError("vLLM's engine process died")


def accepts(target: Any) -> bool:
    return any(
        kind.__name__ == "LLM" and kind.__module__.partition(".")[0] == "vllm"
        for kind in type(target).__mro__
    )
