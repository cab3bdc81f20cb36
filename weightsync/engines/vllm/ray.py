"""Ray actors that are, or hold, a vLLM ``LLM`` or ``AsyncLLM``.

The client of that form runs inside the actor, by ``handle.__ray_call__``, and plain values come
back. An actor that runs one method after another answers between two of its own: an update waits
for a ``generate`` to end. This package has to be installed where the actor runs; the plug-in needs
that anyway.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from operator import attrgetter
from typing import Any

from weightsync.deadline import Deadline
from weightsync.engines.vllm import async_llm, llm
from weightsync.engines.vllm.client import GRACE, Facts, Mode, VLLMClient
from weightsync.errors import DeadlineError, EngineDiedError, EngineError
from weightsync.words import a_kind

_POLL = 0.005
"""Seconds between two questions for what an ``AsyncLLM`` has not answered yet."""

_MOMENT = 0.02
"""Seconds in which an ``AsyncLLM`` mostly answers."""

_GLANCE = 0.05
"""Seconds that are spent on what is only nice to know of an actor."""

_OUTCOMES: dict[str, dict[str, Any]] = {}
"""In the actor: outcomes of calls of an ``AsyncLLM``, by ticket."""

_KINDS = {kind.__name__: kind for kind in (DeadlineError, EngineDiedError)}


class RayClient(VLLMClient):
    """
    Args:
        handle: of the actor.
        attribute: where the actor has its engine (``"llm"``, ``"worker.engine"``); None: the
            actor itself, or the only attribute that is one.
    """

    def __init__(self, handle: Any, attribute: str | None = None) -> None:
        self._handle = handle
        self._attribute = attribute
        self._facts: Facts | None = None
        self._glance: Any = None
        self._deep = 0

    @property
    def name(self) -> str:  # type: ignore[override]
        described = getattr(self._handle, "_ray_actor_creation_function_descriptor", None)
        return str(getattr(described, "class_name", "") or "actor").rpartition(".")[2]

    @property
    def target(self) -> Any:
        return self._handle

    def facts(self, deadline: Deadline) -> Facts:
        if self._facts is None:
            self._facts = Facts(**self._call("facts", (), deadline))
        return self._facts

    def ask(self, request: str, deadline: Deadline, what: str) -> list[str]:
        return list(self._call("ask", (request, what), deadline))

    def is_paused(self, deadline: Deadline) -> bool:
        return bool(self._call("is_paused", (), deadline))

    def pause(self, mode: Mode, deadline: Deadline) -> None:
        self._call("pause", (mode,), deadline)

    def resume(self, deadline: Deadline) -> None:
        self._call("resume", (), deadline)

    def wake(self, tags: Sequence[str], deadline: Deadline) -> None:
        self._call("wake", (list(tags),), deadline)

    def reset_prefix_cache(self, deadline: Deadline) -> bool:
        return bool(self._call("reset_prefix_cache", (), deadline))

    def reset_encoder_cache(self, deadline: Deadline) -> None:
        self._call("reset_encoder_cache", (), deadline)

    def set_version(self, words: str, deadline: Deadline) -> None:
        self._call("set_version", (words,), deadline)

    def logprobs(self, prompts: Sequence[Sequence[int]], deadline: Deadline) -> list[list[float]]:
        return list(self._call("logprobs", ([list(prompt) for prompt in prompts],), deadline))

    # A call with an adapter may wait in the actor's queue for longer than its version stays.
    asks_for_one_name = True

    def adapters_in_use(self, deadline: Deadline) -> set[str] | None:
        used = self._call("adapters_in_use", (), deadline)
        return None if used is None else set(used)

    def deep_sleeps(self) -> int | None:
        # Asked in every poll, while the actor may be busy for long: then it is what it said last.
        import ray

        if self._glance is None:
            self._glance = self._handle.__ray_call__.remote(_deep_sleeps, self._attribute)
        if ray.wait([self._glance], timeout=_GLANCE)[0]:
            answered, self._glance = self._glance, None
            with contextlib.suppress(ray.exceptions.RayError):  # an update will find out, and say
                self._deep = int(ray.get(answered))
        return self._deep

    # ---------------------------------------------------------------- to the actor

    def _call(self, method: str, arguments: Sequence[Any], deadline: Deadline) -> Any:
        """Have the client inside of the actor do it."""
        within = Deadline(deadline.remaining + 2 * GRACE)  # it has a grace of its own
        outcome = self._get(
            _call, (self._attribute, method, tuple(arguments), deadline.remaining), within, method
        )
        while "ticket" in outcome:
            time.sleep(_POLL)
            outcome = self._get(_collect, (outcome["ticket"],), within, method)
        if "error" in outcome:
            kind = _KINDS.get(str(outcome["kind"]), EngineError)
            raise kind(f"{self._handle!r}: {outcome['error']}")
        return outcome["result"]

    def _get(
        self, function: Callable[..., Any], arguments: Sequence[Any], within: Deadline, what: str
    ) -> dict[str, Any]:
        try:
            return dict(call_in(self._handle, function, arguments, within, what))
        except EngineDiedError:
            self._facts = None  # it may be started anew, with others
            raise


def call_in(
    handle: Any, function: Callable[..., Any], arguments: Sequence[Any], within: Deadline, what: str
) -> Any:
    """What ``function(actor, *arguments)`` returns in the process of an actor.

    Raises:
        EngineDiedError: the actor is gone. DeadlineError: it did not answer in time, and will not
            do it any more. EngineError: it cannot be reached, or the function raised something.
    """
    import ray

    reference = handle.__ray_call__.remote(function, *arguments)
    try:
        return ray.get(reference, timeout=within.remaining)
    except ray.exceptions.GetTimeoutError:
        ray.cancel(reference)  # what has not begun must not happen later
        raise DeadlineError(
            f"{handle!r} had not answered to {what} within {within.seconds:.1f} s: it hangs, or is "
            "busy with a method of its own"
        ) from None
    except ray.exceptions.ActorUnavailableError as error:
        raise EngineError(f"{handle!r} cannot be reached: {error!s:.2000}") from error
    except ray.exceptions.RayActorError as error:
        raise EngineDiedError(f"{handle!r} died: {error!s:.2000}") from error
    except ray.exceptions.RayError as error:
        raise EngineError(f"{handle!r}: {what} failed: {error!s:.2000}") from error


def accepts(target: Any) -> bool:
    kind = type(target)
    return kind.__name__ == "ActorHandle" and kind.__module__.partition(".")[0] == "ray"


# ---------------------------------------------------------------- in the actor


def _call(
    actor: Any, attribute: str | None, method: str, arguments: tuple[Any, ...], seconds: float
) -> dict[str, Any]:
    """Call a method of the actor's own client.

    An ``LLM``'s at once, as it may be called from one thread only. An ``AsyncLLM``'s beside what
    the actor does: Ray hands out no other call before this one has returned.
    """
    try:
        client = _client(actor, attribute)
    except (EngineError, AttributeError) as error:
        return {"error": str(error), "kind": "EngineError"}
    if isinstance(client, llm.LLMClient):
        return _outcome(client, method, arguments, seconds)
    ticket = secrets.token_hex(8)
    _OUTCOMES[ticket] = {"ticket": ticket}

    def run() -> None:
        _OUTCOMES[ticket] = _outcome(client, method, arguments, seconds)

    thread = threading.Thread(target=run, name=f"weightsync {method}", daemon=True)
    thread.start()
    thread.join(_MOMENT)
    return _collect(actor, ticket)


def _collect(actor: Any, ticket: str) -> dict[str, Any]:
    outcome = _OUTCOMES[ticket]
    if "ticket" not in outcome:
        del _OUTCOMES[ticket]
    return outcome


def _outcome(
    client: VLLMClient, method: str, arguments: tuple[Any, ...], seconds: float
) -> dict[str, Any]:
    deadline = Deadline(seconds)
    try:
        if method == "ask":
            request, what = arguments
            return {"result": client.ask(request, deadline, what)}
        result = getattr(client, method)(*arguments, deadline)
        return {"result": asdict(result) if isinstance(result, Facts) else result}
    except Exception as error:
        own = isinstance(error, EngineError)
        words = str(error) if own else f"{type(error).__name__}: {error}"
        return {"error": words[:4000], "kind": type(error).__name__}


def _deep_sleeps(actor: Any, attribute: str | None) -> int:
    return _client(actor, attribute).deep_sleeps() or 0


def _client(actor: Any, attribute: str | None) -> VLLMClient:
    engine = _engine(actor) if attribute is None else attrgetter(attribute)(actor)
    if llm.accepts(engine):
        return llm.LLMClient(engine)
    if async_llm.accepts(engine):
        return async_llm.AsyncLLMClient(engine)
    raise EngineError(f"its {attribute!r} is {a_kind(engine)}, not an engine of vLLM's")


def _engine(actor: Any) -> Any:
    if _is_engine(actor):
        return actor
    found = {name: value for name, value in vars(actor).items() if _is_engine(value)}
    if len({id(engine) for engine in found.values()}) != 1:
        what = f"several engines: {', '.join(found)}" if found else "no LLM or AsyncLLM of vLLM's"
        raise EngineError(f"{a_kind(actor)} holds {what}; say attribute=")
    return next(iter(found.values()))


def _is_engine(candidate: Any) -> bool:
    return llm.accepts(candidate) or async_llm.accepts(candidate)
