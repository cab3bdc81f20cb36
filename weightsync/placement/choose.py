"""A scheme for where trainer and engines are, and the reasons."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from weightsync.deadline import Deadline
from weightsync.errors import EngineError, SchemeError, SourceError
from weightsync.placement.ends import End, ends_of, look_at, trainer_end
from weightsync.placement.proofs import Proof, prove_reached, prove_shared
from weightsync.replicas import Replicas
from weightsync.run.path import run_path
from weightsync.scheme import WeightSyncScheme
from weightsync.schemes.cuda_ipc import CUDAIPCScheme
from weightsync.schemes.disk import DiskScheme
from weightsync.schemes.double_buffer import DoubleBufferScheme
from weightsync.schemes.fallback import FallbackScheme
from weightsync.schemes.nccl import NCCLScheme
from weightsync.schemes.nccl.endpoint import is_loopback
from weightsync.source import as_source

log = logging.getLogger("weightsync")

_MEMORY = "/dev/shm"

_SLOTS = 2
"""Buffers of a double buffer, each as long as the weights."""


@dataclass(frozen=True)
class Choice:
    """What :func:`choose` found.

    Attributes:
        scheme: of the trainer; also of an engine that comes later, wherever it is.
        schemes: of each engine, in the order in which they were given: those parts of ``scheme``
            that lead to it.
        reasons: what was seen, and what follows from it.
    """

    scheme: WeightSyncScheme
    schemes: tuple[WeightSyncScheme, ...]
    reasons: tuple[str, ...]

    @property
    def why(self) -> str:
        """The reasons, a line each."""
        return "\n".join(self.reasons)

    def __str__(self) -> str:
        return f"{_name(self.scheme)}, because\n" + "\n".join(f"- {why}" for why in self.reasons)


def choose(
    trainer: Any,
    engines: Any,
    *,
    directory: str | None = None,
    name: str | None = None,
    nbytes: int | None = None,
    may_grow: bool = False,
    port: int | None = None,
    timeout: float = 60.0,
) -> Choice:
    """Pick a scheme by what can be seen of where trainer and engines are.

    Memory is shared by those that are proven to have the same; others take weights over the
    network, if they reach the trainer, and through a directory, if they are proven to share one.

    Args:
        trainer: what the sender will be made in: the handle of a Ray actor (rank 0's, if there
            are several), the model or None for this process, or a :class:`~weightsync.Place`.
        engines: what receivers will be made of, or with: handles of Ray actors, modules, engines
            of vLLM's, places; a list of them, one, or :class:`~weightsync.Replicas`.
        directory: one that all hosts may share. Used where memory and network do not do, and
            behind the network in case that fails.
        name: of the run, in names of directories; None for one that nobody else has.
        nbytes: bytes of the weights, so that there is room for them where they are to lie. Of a
            model that is given here they are counted.
        may_grow: have a way to other hosts, for engines that come later.
        port: for the network; None for a free one, which needs a trainer that can be asked.
        timeout: seconds for all of it. Actors answer between two methods of their own.

    Raises:
        SchemeError: nothing leads to an engine; says what was tried. Or the trainer is nothing
            that weights come from.
        EngineDiedError, DeadlineError, EngineError: of one that does not answer; names it. Or one
            is no engine.
    """
    deadline = Deadline(timeout)
    sender, *receivers = look_at([trainer_end(trainer), *ends_of(_list(engines))], deadline)
    if not receivers:
        raise EngineError("choose(trainer, []): there is no engine")
    search = _Search(
        sender,
        receivers,
        deadline,
        directory=None if directory is None else run_path("directory", directory),
        name=f"weightsync-{name or secrets.token_hex(6)}",
        nbytes=_nbytes(trainer) if nbytes is None else nbytes,
        port=port,
    )
    choice = search.choose(may_grow)
    log.info("%s, because %s", _name(choice.scheme), "; ".join(choice.reasons))
    return choice


@dataclass(frozen=True)
class _Route:
    """A scheme, and the engines that it is proven to lead to, by number."""

    scheme: WeightSyncScheme
    to: frozenset[int]


@dataclass
class _Search:
    """The rules. Each looks at facts only, says what it saw, and gives a route or None."""

    sender: End
    engines: Sequence[End]
    deadline: Deadline
    directory: str | None
    name: str
    nbytes: int | None
    port: int | None
    reasons: list[str] = field(default_factory=list)

    def choose(self, may_grow: bool) -> Choice:
        everybody = frozenset(range(len(self.engines)))
        memory = (None if may_grow else self._one_gpu()) or self._memory()
        routes = [memory] if memory else []
        away = everybody - (memory.to if memory else frozenset())
        if away or may_grow:
            self._because(away, may_grow)
            routes += filter(None, [self._network(away, alone=not memory), self._files(away)])
        lost = everybody.difference(*(route.to for route in routes))
        if lost or not routes or (may_grow and routes == [memory]):
            whom = self._names(lost) or "other hosts"
            tried = "\n".join(f"- {reason}" for reason in self.reasons)
            raise SchemeError(
                f"no way leads from {self.sender.name} to {whom}; directory= may name one that all "
                f"share. What was seen:\n{tried}"
            )
        return Choice(
            _of(routes),
            tuple(_of([r for r in routes if number in r.to]) for number in sorted(everybody)),
            tuple(self.reasons),
        )

    def _say(self, *words: str) -> None:
        self.reasons.append("; ".join(words))

    def _because(self, away: frozenset[int], may_grow: bool) -> None:
        if away:
            self._say(f"not through memory: {self._names(away)}")
        if may_grow:
            self._say("engines may come on other hosts")

    def _names(self, numbers: Iterable[int]) -> str:
        return ", ".join(self.engines[number].name for number in sorted(numbers))

    # ---------------------------------------------------------------- one GPU

    def _one_gpu(self) -> _Route | None:
        ends = [self.sender, *self.engines]
        mine = self.sender.gpus
        if len(mine) != 1 or any(end.gpus != mine for end in ends):
            return None
        places = [place for end in ends for place in end.places]
        here = self.sender.place
        if not all(here.is_with(place) and here.spaces == place.spaces for place in places):
            self._say("one GPU, but not one host, or other namespaces of processes: no CUDA IPC")
            return None
        self._say(
            f"all are on one GPU, {next(iter(mine))}, of one host: engines read the trainer's own "
            "memory, and the trainer waits for them at each update"
        )
        scheme = CUDAIPCScheme(f"{_MEMORY}/{self.name}")
        return _Route(scheme, frozenset(range(len(self.engines))))

    # ---------------------------------------------------------------- one host

    def _memory(self) -> _Route | None:
        here = self.sender.place
        near = [
            number
            for number, end in enumerate(self.engines)
            if all(here.is_with(place) for place in end.places)
        ]
        if not near:
            return None
        self._say(f"on one host with the trainer: {self._names(near)}")
        for directory in filter(None, [_MEMORY, self.directory]):
            proof = self._prove_shared(directory, near)
            held = frozenset(_those(near, proof))
            if held and self._has_room(directory, proof.free):
                self._say(f"through {directory}: {self._names(held)}")
                return _Route(DoubleBufferScheme(f"{directory}/{self.name}"), held)
        return None

    def _has_room(self, directory: str, free: int | None) -> bool:
        if free is None or self.nbytes is None:
            room = "room that is not known" if free is None else f"{free:,} bytes of room"
            self._say(f"{directory} has {room}, which was not compared with the weights' size")
            return True
        needed = _SLOTS * self.nbytes
        if needed > free:
            self._say(f"{directory} has {free:,} bytes of room, and {needed:,} are needed")
        return needed <= free

    # ---------------------------------------------------------------- several hosts

    def _network(self, away: frozenset[int], alone: bool) -> _Route | None:
        backend = self._backend()
        address = self.sender.place.address
        if backend is None:
            return None
        if address is None or is_loopback(address):
            self._say(f"no network: the trainer's address is {address}, which others do not reach")
            return None
        if self.port is None and self.sender.ask is None:
            self._say("no network: the trainer cannot be asked for a free port; port= names one")
            return None
        numbers = sorted(away)
        others = [self.engines[number] for number in numbers]
        proof = prove_reached(address, self.port, self.sender, others, self.deadline)
        self._say(*proof.words)
        held = frozenset(_those(numbers, proof))
        if proof.port is None or (others and not held):
            return None
        scheme = NCCLScheme(
            master_address=address,
            master_port=proof.port,
            num_replicas=len(others) if alone and len(held) == len(others) else None,
            backend=backend,
            token=secrets.token_urlsafe(24),
        )
        return _Route(scheme, held)

    def _backend(self) -> Literal["nccl", "gloo"] | None:
        why = self._against_nccl()
        if why is None:
            self._say("each end has GPUs of its own, and torch has NCCL: NCCL over the network")
            return "nccl"
        if not self._everywhere("gloo"):
            self._say("no network: torch.distributed is not to be had everywhere")
            return None
        self._say(f"{why}: gloo over the network")
        return "gloo"

    def _against_nccl(self) -> str | None:
        ends = [self.sender, *self.engines]
        gpus = [gpu for end in ends for gpu in end.gpus]
        if not all(end.gpus for end in ends):
            return "not every end has a GPU"
        if not self._everywhere("nccl"):
            return "not every end's torch has NCCL"
        if len(set(gpus)) < len(gpus):
            return "two ends see one GPU, which NCCL refuses"
        return None

    def _everywhere(self, backend: str) -> bool:
        ends = [self.sender, *self.engines]
        return all(backend in place.backends for end in ends for place in end.places)

    def _files(self, away: frozenset[int]) -> _Route | None:
        if self.directory is None:
            return None
        proof = self._prove_shared(self.directory, sorted(away))
        held = frozenset(_those(sorted(away), proof))
        if proof.failed or (away and not held):
            return None
        self._say(f"checkpoints in {self.directory} where nothing faster works")
        return _Route(DiskScheme(f"{self.directory}/{self.name}-checkpoints"), held)

    def _prove_shared(self, directory: str, numbers: Sequence[int]) -> Proof:
        others = [self.engines[number] for number in numbers]
        proof = prove_shared(directory, self.sender, others, self.deadline)
        self._say(*proof.words)
        return proof


def _those(numbers: Sequence[int], proof: Proof) -> list[int]:
    return [number for number, held in zip(numbers, proof.holds, strict=True) if held]


def _of(routes: Sequence[_Route]) -> WeightSyncScheme:
    schemes = [route.scheme for route in routes]
    return schemes[0] if len(schemes) == 1 else FallbackScheme(schemes)


def _name(scheme: WeightSyncScheme) -> str:
    """Without addresses and secrets."""
    if isinstance(scheme, FallbackScheme):
        return f"{type(scheme).__name__}({', '.join(map(_name, scheme.schemes))})"
    backend = f"({scheme.backend})" if isinstance(scheme, NCCLScheme) else ""
    return f"{type(scheme).__name__}{backend}"


def _list(engines: Any) -> Any:
    return engines if isinstance(engines, (list, tuple, Replicas)) else [engines]


def _nbytes(trainer: Any) -> int | None:
    """Bytes of the weights of a model of this process, as the double buffer lays them out."""
    if not isinstance(trainer, (nn.Module, Mapping)):
        return None
    try:
        return as_source(trainer).manifest().nbytes
    except SourceError:  # a sender's options may leave out what cannot be sent
        return None
