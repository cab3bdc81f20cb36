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
        workers: worker processes in all, over TP, PP and DP.
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


class VLLMClient(ABC):
    """Talks to one vLLM engine. Every method may raise:

    EngineDiedError: the engine is gone; DeadlineError: it had not answered a grace time after
    the deadline; EngineError: it answered with an error, in its own words.
    """

    name: str
    """How messages call the engine."""

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
        return call_with_deadline(function, within, f"vLLM's {what}", self.require_alive)
