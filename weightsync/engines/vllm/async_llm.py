"""vLLM's ``AsyncLLM``, in this process, reached from other threads than that of its event loop."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from weightsync.deadline import Deadline
from weightsync.engines.vllm.client import CALL, GRACE, Facts, Mode, VLLMClient
from weightsync.engines.vllm.facts import adapters_of, facts_of
from weightsync.engines.vllm.sleeping import sleeps
from weightsync.errors import DeadlineError, EngineDiedError, EngineError

T = TypeVar("T")


class AsyncLLMClient(VLLMClient):
    """Sends coroutines to the event loop of an ``AsyncLLM`` and waits for them in its own thread.

    Args:
        engine: of whichever class of vLLM's offers ``AsyncLLM``'s methods.
        loop: in which it lives; None: the one its output handler runs in, else the one that is
            running now.
    """

    name = "AsyncLLM"
    ends_with_us = True

    def __init__(self, engine: Any, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._engine = engine
        self._loop = loop or _loop_of(engine) or _running_loop()

    @property
    def target(self) -> Any:
        return self._engine

    def facts(self, deadline: Deadline) -> Facts:
        return facts_of(self._engine)

    def ask(self, request: str, deadline: Deadline, what: str) -> list[str]:
        def each() -> Coroutine[Any, Any, list[list[str]]]:
            return self._every("collective_rpc", CALL, None, (request,), None)

        answers = [answer for one in self._run(each, deadline, what) for answer in one]
        workers = self.facts(deadline).workers
        if len(answers) != workers:
            raise EngineError(f"{len(answers)} of {workers} workers answered to {what}")
        return answers

    def is_paused(self, deadline: Deadline) -> bool:
        return any(self._run(lambda: self._every("is_sleeping"), deadline, "is_sleeping"))

    def pause(self, mode: Mode, deadline: Deadline) -> None:
        self._run(lambda: self._pause(mode), deadline, "pause_generation")

    def resume(self, deadline: Deadline) -> None:
        try:
            self._run(self._engine.resume_generation, deadline, "resume_generation")
        except (EngineDiedError, DeadlineError):
            raise
        except EngineError:
            # Data-parallel ranks do not resume while they are on their way into a pause, which
            # waits for requests perhaps: freezing those ends it.
            self._run(lambda: self._pause("keep"), deadline, "pause_generation")
            self._run(self._engine.resume_generation, deadline, "resume_generation")

    def wake(self, tags: Sequence[str], deadline: Deadline) -> None:
        self._run(lambda: self._engine.wake_up(tags=list(tags)), deadline, "wake_up")

    def reset_prefix_cache(self, deadline: Deadline) -> bool:
        done = self._run(
            lambda: self._every("reset_prefix_cache", True, False), deadline, "reset_prefix_cache"
        )
        return all(done)

    def reset_encoder_cache(self, deadline: Deadline) -> None:
        self._run(self._engine.reset_encoder_cache, deadline, "reset_encoder_cache")

    def set_version(self, words: str, deadline: Deadline) -> None:
        say = getattr(self._engine, "update_weight_version", None)
        if say is not None:  # before vLLM 0.26 there is no label
            self._run(lambda: say(words), deadline, "update_weight_version")

    def logprobs(self, prompts: Sequence[Sequence[int]], deadline: Deadline) -> list[list[float]]:
        async def all_of_them() -> list[list[float]]:
            return list(await asyncio.gather(*map(self._logprobs, prompts)))

        return self._run(all_of_them, deadline, "generate")

    def adapters_in_use(self, deadline: Deadline) -> set[str] | None:
        return adapters_of(self._engine)

    def deep_sleeps(self) -> int | None:
        return sleeps(self._engine.engine_core).deep

    def pauses(self) -> int | None:
        return sleeps(self._engine.engine_core).all

    def require_alive(self) -> None:
        if self._engine.errored:
            raise EngineDiedError("vLLM's engine process died, or its output handler ended")

    def require_thread(self) -> None:
        if _running_loop() is self._its_loop():
            raise EngineError(
                "this thread runs the event loop of the AsyncLLM, which would wait for itself: "
                "use the receiver's coroutines (await receiver.poll_and_apply_async() and the "
                "like), or call it in another thread (asyncio.to_thread)"
            )

    # ---------------------------------------------------------------- in the loop

    async def _pause(self, mode: Mode) -> None:
        await self._engine.pause_generation(mode=mode, clear_cache=False)

    async def _every(self, method: str, *arguments: Any) -> list[Any]:
        """What the core of each data-parallel rank answers.

        ``AsyncLLM``'s own methods reach all, and give the answer of the first.
        """
        core = self._engine.engine_core
        return list(
            await asyncio.gather(
                *(
                    core._call_utility_async(method, *arguments, engine=engine)
                    for engine in core.core_engines
                )
            )
        )

    async def _logprobs(self, prompt: Sequence[int]) -> list[float]:
        from vllm import SamplingParams

        parameters = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        inputs = {"prompt_token_ids": list(prompt)}
        name = f"weightsync-{secrets.token_hex(8)}"
        outputs = [each async for each in self._engine.generate(inputs, parameters, name)]
        output = outputs[-1]
        return [
            position[token].logprob
            for token, position in zip(
                output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True
            )
        ]

    # ---------------------------------------------------------------- to the loop

    def _its_loop(self) -> asyncio.AbstractEventLoop:
        loop = self._loop or _loop_of(self._engine)
        if loop is None:
            raise EngineError(
                "the AsyncLLM's event loop is not known, as it has served no request yet: make "
                "the receiver inside of the loop, or say loop="
            )
        self._loop = loop
        return loop

    def _run(self, start: Callable[[], Coroutine[Any, Any, T]], deadline: Deadline, what: str) -> T:
        self.require_alive()
        self.require_thread()
        loop = self._its_loop()
        if not loop.is_running():
            raise EngineError("the event loop of the AsyncLLM does not run")
        future = asyncio.run_coroutine_threadsafe(start(), loop)
        try:
            self._wait(future, loop, Deadline(deadline.remaining + GRACE), what)
        except BaseException:
            future.cancel()
            raise
        return _result(future, what)

    def _wait(
        self, future: Future[T], loop: asyncio.AbstractEventLoop, deadline: Deadline, what: str
    ) -> None:
        while not wait([future], timeout=min(0.1, deadline.remaining)).done:
            self.require_alive()
            if not loop.is_running():
                raise EngineError(f"the event loop of the AsyncLLM ended during {what}")
            if deadline.expired:
                raise DeadlineError(f"vLLM's {what} did not return within {deadline.seconds:.1f} s")


def _result(future: Future[T], what: str) -> T:
    error: BaseException | None
    try:
        error = future.exception()
    except BaseException as cancelled:  # its loop ends
        error = cancelled
    if error is None:
        return future.result()
    kind = EngineDiedError if type(error).__name__ == "EngineDeadError" else EngineError
    raise kind(f"vLLM's {what} says {type(error).__name__}: {error!s:.2000}") from error


def _loop_of(engine: Any) -> asyncio.AbstractEventLoop | None:
    handler = getattr(engine, "output_handler", None)
    return None if handler is None else handler.get_loop()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def accepts(target: Any) -> bool:
    return any(
        kind.__name__ == "AsyncLLM" and kind.__module__.partition(".")[0] == "vllm"
        for kind in type(target).__mro__
    )
