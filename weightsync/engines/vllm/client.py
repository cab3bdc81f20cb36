"""What the driver of a vLLM engine asks of it, whatever form it is run in.

One implementation for each form: an ``LLM``, an ``AsyncLLM``, a server over HTTP, a Ray actor.
Every call is synchronous, may be made from any thread and ends within its deadline.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from weightsync.deadline import Deadline, call_with_deadline
from weightsync.errors import EngineDiedError, EngineError

BACKEND = "weightsync"
"""The name under which vLLM knows the plug-in."""

CALL = "weightsync_call"
"""The method of vLLM's workers that answers a driver: JSON in, JSON out."""

GRACE = 10.0
"""Seconds that workers, who keep the deadline themselves, have to say that it is over."""

Mode = Literal["keep", "wait", "abort"]

T = TypeVar("T")


@dataclass(frozen=True)
class Facts:
    """What an engine was made with.

    Attributes:
        backend: of its ``weight_transfer_config``; None without one.
        workers: worker processes in all, over TP, PP and DP, that this object reaches.
        before: those that it does not reach, of data-parallel ranks before its own: the plug-in
            numbers all that were started together.
        lora: whether it was made with ``enable_lora=True``.
        in_process: whether the engine core shares the process of who calls it, so that nothing
            goes on in it by itself.
        version: vLLM's.
    """

    backend: str | None
    workers: int
    lora: bool = False
    in_process: bool = False
    version: str = ""
    before: int = 0


class VLLMClient(ABC):
    """Talks to one vLLM engine. Every method may raise:

    EngineDiedError: the engine is gone; DeadlineError: it had not answered a grace time after
    the deadline; EngineError: it answered with an error, in its own words.
    """

    name: str
    """How messages call the engine."""

    ends_with_us: bool = False
    """Whether the engine ends when this process does."""

    only_we_pause: bool = False
    """Whether nobody outside of this process can pause it or put it to sleep."""

    @property
    @abstractmethod
    def target(self) -> Any:
        """What the user passed."""

    @abstractmethod
    def facts(self, deadline: Deadline) -> Facts:
        """Asked once; does not change while the engine lives."""

    @abstractmethod
    def ask(self, request: str, deadline: Deadline, what: str) -> list[str]:
        """Call ``weightsync_call`` on every worker of every data-parallel rank.

        Returns:
            One answer for each of ``facts().workers``, in any order.
        """

    @abstractmethod
    def is_paused(self, deadline: Deadline) -> bool:
        """Whether its user paused it, or put it to sleep."""

    @abstractmethod
    def pause(self, mode: Mode, deadline: Deadline) -> None:
        """Let no request make progress; new ones are queued. Caches are left alone."""

    @abstractmethod
    def resume(self, deadline: Deadline) -> None:
        """Let requests go on. Does nothing if nothing is paused."""

    @abstractmethod
    def wake(self, tags: Sequence[str], deadline: Deadline) -> None:
        """Bring memory back that sleep gave away: ``"weights"``, ``"kv_cache"``."""

    @abstractmethod
    def reset_prefix_cache(self, deadline: Deadline) -> bool:
        """Also of running requests, whose cache is computed anew. False: not done, try again."""

    @abstractmethod
    def reset_encoder_cache(self, deadline: Deadline) -> None:
        """Drop what vision and audio encoders computed with their weights."""

    @abstractmethod
    def set_version(self, words: str, deadline: Deadline) -> None:
        """Label the engine. Releases that know no label ignore it."""

    @abstractmethod
    def logprobs(self, prompts: Sequence[Sequence[int]], deadline: Deadline) -> list[list[float]]:
        """The engine's log-probability of each token of each prompt but the first."""

    def deep_sleeps(self) -> int | None:
        """How often this process put the engine to deep sleep, without asking the engine.

        None: others may do so too, and it has to be asked.
        """
        return None

    def pauses(self) -> int | None:
        """How often this process paused the engine or put it to sleep, without asking the engine.

        None: others may do so too, and nobody counts.
        """
        return None

    # ---------------------------------------------------------------- adapters

    serves_adapters: bool = False
    """Whether requests name an adapter, and the engine's front end knows where it lies."""

    asks_for_one_name: bool = False
    """Whether all versions of an adapter need one name, as it is not told who uses which."""

    def adapters_in_use(self, deadline: Deadline) -> set[str] | None:
        """Names of the adapters that unfinished requests were started with; None: not told."""
        return None

    def serve_adapter(self, name: str, path: str, stacked: bool, deadline: Deadline) -> None:
        """Have requests find it by its name, in the place of one that has the name already."""

    def unserve_adapter(self, name: str, deadline: Deadline) -> None:
        """Have requests no longer find it. Those that run go on."""

    # ---------------------------------------------------------------- in all forms

    def require_backend(self, facts: Facts) -> None:
        """
        Raises:
            EngineError: the engine was made without our backend.
        """
        if facts.backend != BACKEND:
            what = "weight_transfer_config"
            made = f"a {what} of backend={facts.backend!r}" if facts.backend else f"no {what}"
            raise EngineError(
                f"the {self.name} takes no weights: it was made with {made}; make it with "
                f"weight_transfer_config=WeightTransferConfig(backend={BACKEND!r})"
            )

    def require_progress(self, facts: Facts) -> None:
        """
        Raises:
            EngineError: requests do not go on by themselves, so that none can be waited for; and
                vLLM tells nobody of those that it aborts there (seen with 0.32.0).
        """
        if facts.in_process:
            raise EngineError(
                "mode='wait' and mode='abort' need an engine that goes on by itself: this LLM's "
                "shares its process (VLLM_ENABLE_V1_MULTIPROCESSING=0); use mode='keep'"
            )

    def flush(self, deadline: Deadline, encodes: bool = True) -> None:
        """Drop whatever was computed with the weights until now.

        Args:
            encodes: whether the model has encoders of images or sounds.

        Raises:
            EngineError: vLLM did not confirm it.
        """
        # Running requests were kept with their old cache blocks: they are preempted, so that
        # theirs is computed anew too; without it vLLM refuses while any block is in use.
        if deadline.wait(lambda: self.reset_prefix_cache(deadline) or None) is None:
            raise EngineError("vLLM did not confirm that its prefix cache is empty")
        # Outputs of vision and audio encoders are computed with weights, too. What vLLM calls its
        # multimodal cache holds processed inputs, and is left alone.
        if encodes:
            self.reset_encoder_cache(deadline)

    def require_alive(self) -> None:
        """
        Raises:
            EngineDiedError: it is known to be dead already, without asking it.
        """

    def require_thread(self) -> None:
        """
        Raises:
            EngineError: calls from this very thread would wait for ever; says what to do.
        """

    def close(self) -> None:
        """Give back what this client took. The engine goes on."""

    def bounded(self, function: Callable[[], T], deadline: Deadline, what: str) -> T:
        """Run a call that has no deadline of its own."""
        # vLLM's own RPC timeouts leave replies behind that later calls would get. The workers
        # keep the deadline themselves; this catches those that do not answer at all.
        within = Deadline(deadline.remaining + GRACE)
        try:
            return call_with_deadline(function, within, f"vLLM's {what}", self.require_alive)
        except Exception as error:
            if type(error).__name__ == "EngineDeadError":  # vLLM's own, of the next calls
                raise EngineDiedError(f"vLLM's engine process died: {error!s:.500}") from error
            raise
