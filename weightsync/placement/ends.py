"""Who sends and who takes weights, as far as they can be asked where they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from weightsync.deadline import Deadline
from weightsync.engine import Engine, require_engine
from weightsync.engines import vllm
from weightsync.engines.vllm import ray
from weightsync.engines.vllm.client import VLLMClient
from weightsync.errors import EngineError, ProtocolError, SchemeError, SourceError
from weightsync.placement import questions
from weightsync.placement.place import Place, gpu_of
from weightsync.replicas import Replicas
from weightsync.source import as_source

Answer = dict[str, Any]
Ask = Callable[[dict[str, Any], Deadline], list[Answer]]
"""Has a question answered by each process of an end."""

_AT_ONCE = 32
"""Ends that are asked together."""


@dataclass(frozen=True)
class End:
    """The trainer, or one engine.

    Attributes:
        name: how reasons call it.
        ask: None: only its place is known.
        places: of each of its processes that read or write.
    """

    name: str
    ask: Ask | None
    places: tuple[Place, ...] = ()

    @property
    def place(self) -> Place:
        return self.places[0]

    @property
    def gpus(self) -> frozenset[str]:
        return frozenset(gpu for place in self.places for gpu in place.gpus)


def trainer_end(target: Any) -> End:
    """What a sender is to be made in.

    Raises:
        SchemeError: nothing that a sender could send.
    """
    if target is not None and not isinstance(target, Place) and not ray.accepts(target):
        _require_no_description(target)
        try:
            as_source(target)
        except SourceError as error:
            raise SchemeError(f"the trainer of choose(): {error}") from None
    return _end_of(target)


def end_of(target: Any) -> End:
    """An engine, as a receiver takes it, or where it is. Nobody is asked yet.

    Args:
        target: a Ray actor's handle; a :class:`Place`, of a process that cannot be asked; an
            engine of vLLM's, whose workers are asked; other engines are of this process.

    Raises:
        EngineError: it is none.
    """
    if not isinstance(target, Place) and not ray.accepts(target):
        _require_no_description(target)
        require_engine(target)
    return _end_of(target)


def _require_no_description(target: Any) -> None:
    if isinstance(target, Mapping) and "machine" in target:
        raise EngineError("a place as a dict: pass Place.from_dict(it)")


def _end_of(target: Any) -> End:
    if isinstance(target, Place):
        return End(str(target), None, (target,))
    if isinstance(target, Engine):
        target = target.target
    if ray.accepts(target):
        return End(repr(target), partial(_ask_actor, target))
    if vllm.accepts(target):
        client = vllm.make_client(target)
        return End(client.name, partial(_ask_workers, client))
    name = "this process" if target is None else f"this process's {type(target).__name__}"
    return End(name, partial(_ask_here, _gpus_of(target)))


def ends_of(engines: Any) -> list[End]:
    """Each engine of what a user passes to a receiver, or of a list of such."""
    if isinstance(engines, Replicas):
        return [replace(end_of(engine), name=name) for name, engine in engines.engines.items()]
    return [end_of(engine) for engine in engines]


def look_at(ends: Sequence[End], deadline: Deadline) -> list[End]:
    """The same ends, with the places of those that can be asked.

    Raises:
        EngineDiedError, DeadlineError, EngineError: of an end that does not answer; names it.
    """
    answers = ask_all(ends, {"op": "look"}, deadline)
    return [
        end if said is None else replace(end, places=_places(said))
        for end, said in zip(ends, answers, strict=True)
    ]


def ask_all(
    ends: Sequence[End], question: dict[str, Any], deadline: Deadline
) -> list[list[Answer] | None]:
    """What each answers, all of them asked at once; None: it cannot be asked."""

    def ask(end: End) -> list[Answer] | None:
        return None if end.ask is None else end.ask(question, deadline)

    if len(ends) == 1:  # in this thread, which an engine may insist on
        return [ask(ends[0])]
    with ThreadPoolExecutor(min(_AT_ONCE, len(ends) or 1)) as threads:
        return list(threads.map(ask, ends))


def _places(answers: Sequence[Answer]) -> tuple[Place, ...]:
    """Of the processes of one end. A worker that knows no node is on that of the first."""
    for answer in answers:
        if "error" in answer:
            raise EngineError(f"it cannot be seen where it is: {answer['error']}")
    first, *rest = (Place.from_dict(answer.get("place")) for answer in answers)
    named = (replace(p, node=first.node) if p.machine == first.machine else p for p in rest)
    return (first, *named)


# ---------------------------------------------------------------- ways to ask


def _ask_here(
    gpus: tuple[str, ...] | None, question: dict[str, Any], deadline: Deadline
) -> list[Answer]:
    if question["op"] == "look":
        return [{"place": Place.here(gpus).to_dict()}]
    return [questions.answer(question)]


def _ask_actor(handle: Any, question: dict[str, Any], deadline: Deadline) -> list[Answer]:
    said = ray.call_in(handle, _answer_in_actor, (question,), deadline, str(question["op"]))
    return [_checked(said, repr(handle))]


def _answer_in_actor(actor: Any, question: dict[str, Any]) -> Answer:
    return questions.answer(question)


def _ask_workers(client: VLLMClient, question: dict[str, Any], deadline: Deadline) -> list[Answer]:
    """All workers of vLLM's, and this process, where the receiver is."""
    client.require_backend(client.facts(deadline))
    request = json.dumps({"op": "survey", "question": question})
    said = [json.loads(text) for text in client.ask(request, deadline, str(question["op"]))]
    here = _ask_here((), question, deadline)
    return here + [_checked(answer.get("survey"), client.name) for answer in said]


def _checked(said: Any, name: str) -> Answer:
    if not isinstance(said, dict):
        raise ProtocolError(f"{name} answers something else: {said!r:.200}")
    return said


def _gpus_of(target: Any) -> tuple[str, ...] | None:
    """Those that its tensors lie on; None: it has no tensors to be seen."""
    tensors: Iterable[Any] = ()
    if isinstance(target, nn.Module):
        tensors = [*target.parameters(), *target.buffers()]
    elif isinstance(target, Mapping):
        tensors = [value for value in target.values() if isinstance(value, Tensor)]
    devices = {tensor.device for tensor in tensors}
    if not devices:
        return None
    return tuple(gpu_of(device.index or 0) for device in devices if device.type == "cuda")
