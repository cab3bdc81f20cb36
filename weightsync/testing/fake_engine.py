"""An inference engine in miniature, whose every step can be watched and made to fail.

It has what makes real engines hard to update: fused parameters, weights laid out anew after
loading, a cache keyed by prompt, requests in flight, sleep that drops weights and buffers. It is
there to inject faults, never instead of a run on a real engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

import torch
import xxhash

from weightsync.deadline import Deadline
from weightsync.engine import Engine, Fit, Update, Verification
from weightsync.errors import EngineDiedError, EngineError, MismatchError
from weightsync.manifest import Manifest
from weightsync.version import Version

Step = Literal[
    "connect", "stage", "pause", "start", "load", "finish", "flush", "label", "resume", "check"
]


@dataclass
class FakeRequest:
    """A request in flight. ``versions``: what the engine said it held, for each token so far."""

    prompt: tuple[int, ...]
    versions: list[Version | None] = field(default_factory=list)
    aborted: bool = False

    def spans(self) -> list[tuple[Version | None, int]]:
        """Versions in order, and how many tokens are of each."""
        return [(version, len(list(tokens))) for version, tokens in groupby(self.versions)]


class FakeEngine(Engine):
    """Parameters under engine names, some of them fused of several checkpoint names.

    Args:
        shapes: of the checkpoint's tensors, by checkpoint name; all of ``dtype``.
        fused: engine name -> the checkpoint names whose rows it consists of, in order.
        buffers: non-persistent buffers that no checkpoint holds.
        relaid: engine names that ``finish`` replaces by a transposed new parameter, without a
            loader, as kernels that want another layout do.
        mode: what ``pause`` does to running requests: keep or abort.
        strict: refuse an update that leaves a checkpoint name out.
        backs_up: whether sleep keeps a copy of the buffers, to be restored on wake.

    Attributes:
        calls: the steps taken, in order.
        fail: step -> the exception it raises, once; or a list of them, one each time. After an
            ``EngineDiedError`` every step raises one, until ``restart``.
        stuck: step -> what it waits for before it is taken.
        unconfirmed: how often ``flush`` does not do it before it does.
        running, aborted: numbers of requests.
        version_label: what the engine says it holds.
    """

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        fused: Mapping[str, Sequence[str]] | None = None,
        *,
        buffers: Mapping[str, torch.Tensor] | None = None,
        relaid: Sequence[str] = (),
        dtype: torch.dtype = torch.float32,
        mode: Literal["keep", "abort"] = "keep",
        strict: bool = True,
        backs_up: bool = False,
    ) -> None:
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self._fused = {name: tuple(parts) for name, parts in (fused or {}).items()}
        self._part_of = {part: whole for whole, parts in self._fused.items() for part in parts}
        self._relaid = set(relaid)
        self._mode = mode
        self._strict = strict
        self._backs_up = backs_up
        self._backup: dict[str, torch.Tensor] = {}
        self.parameters: dict[str, torch.Tensor] = {}
        for name, shape in self._shapes.items():
            if name not in self._part_of:
                self.parameters[name] = torch.zeros(shape, dtype=dtype)
        for whole, parts in self._fused.items():
            rows = sum(self._shapes[part][0] for part in parts)
            rest = self._shapes[parts[0]][1:]
            self.parameters[whole] = torch.zeros((rows, *rest), dtype=dtype)
        self.buffers = dict(buffers or {})
        self.calls: list[str] = []
        self.fail: dict[Step, BaseException | list[BaseException]] = {}
        self.stuck: dict[Step, threading.Event] = {}
        self.unconfirmed = 0
        self.dead = False
        self.requests: list[FakeRequest] = []
        self.running = 0
        self.aborted = 0
        self.paused = False
        self.version_label: Version | None = None
        self.during_load: Callable[[str], None] = lambda name: None
        self._in_layout: set[str] = set()
        self._cache: dict[tuple[int, ...], str] = {}
        self._lost = False
        self._invalid: set[str] = set()

    # ---------------------------------------------------------------- being used

    def generate(self, prompt: Sequence[int]) -> str:
        """A text that depends on all weights and buffers, and on what the cache holds.

        Raises:
            EngineError: paused, asleep or dead.
        """
        self._require_alive()
        if self.paused or self._lost:
            raise EngineError("the engine is paused or has no weights")
        key = tuple(prompt)
        if key not in self._cache:
            self._cache[key] = self._digest()
        return f"{self._cache[key]}:{','.join(map(str, key))}"

    def begin(self, prompt: Sequence[int]) -> FakeRequest:
        """A request that goes on with ``advance``."""
        self.requests.append(FakeRequest(tuple(prompt)))
        return self.requests[-1]

    def advance(self, tokens: int) -> None:
        """Every request gets so many tokens, unless the engine is paused."""
        self._require_alive()
        for request in () if self.paused else self.requests:
            request.versions += [self.version_label] * tokens

    def restart(self) -> None:
        """A new process, with nothing of what the former one held."""
        for tensor in self.parameters.values():
            tensor.zero_()
        self._cache.clear()
        self.requests.clear()
        self.dead = self.paused = self._lost = False
        self.version_label = None

    def _require_alive(self) -> None:
        if self.dead:
            raise EngineDiedError("the fake engine is dead")

    def _digest(self) -> str:
        state = xxhash.xxh3_64()
        for tensor in [*self.parameters.values(), *self.buffers.values()]:
            state.update(bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()))
        return state.hexdigest()

    def sleep(self) -> None:
        """Level 2: weights and buffers are dropped."""
        if self._backs_up:
            self._backup = {name: tensor.clone() for name, tensor in self.buffers.items()}
        for tensor in [*self.parameters.values(), *self.buffers.values()]:
            tensor.zero_()
        self._lost = True
        self._invalid = set(self.buffers)

    def wake(self) -> None:
        self.restore(self._backup)
        self._backup = {}

    def restore(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Put back what sleep took."""
        for name, tensor in buffers.items():
            self.buffers[name].copy_(tensor)
            self._invalid.discard(name)

    def part(self, name: str) -> torch.Tensor:
        """The place of a checkpoint tensor, whatever it is fused into and however laid out."""
        whole = self._part_of.get(name, name)
        tensor = self.parameters[whole]
        tensor = tensor.t() if whole in self._in_layout else tensor
        if whole == name:
            return tensor
        begin = 0
        for part in self._fused[whole]:
            rows = self._shapes[part][0]
            if part == name:
                return tensor[begin : begin + rows]
            begin += rows
        raise AssertionError(name)

    # ---------------------------------------------------------------- Engine

    @property
    def target(self) -> Any:
        return self

    def connect(self, url: str, deadline: Deadline) -> None:
        self._step("connect")

    def check(self, manifest: Manifest) -> Fit:
        self._step("check")
        missing = tuple(name for name in self._shapes if name not in manifest.names())
        unexpected = tuple(name for name in manifest.by_name if name not in self._shapes)
        different = {
            name: (str(manifest.spec(name)), str(list(shape)))
            for name, shape in self._shapes.items()
            if name in manifest.names() and manifest.spec(name).shape != shape
        }
        if different or (self._strict and (missing or unexpected)):
            raise MismatchError(
                f"missing {missing}, unexpected {unexpected}, different {different}",
                missing=missing,
                unexpected=unexpected,
                different=different,
            )
        return Fit(missing, unexpected)

    def stage(self, update: Update, deadline: Deadline) -> None:
        self._step("stage")
        update.snapshot.verify()

    def pause(self, deadline: Deadline) -> None:
        self._step("pause")
        self.paused = True
        if self._mode == "abort":
            self.aborted += self.running
            self.running = 0
            for request in self.requests:
                request.aborted = True
            self.requests.clear()

    def apply(self, update: Update, deadline: Deadline) -> None:
        self._step("start")
        self._lost = False  # unless it is put to sleep again meanwhile
        for whole in sorted(self._in_layout):  # back to the layout that is loaded into
            self.parameters[whole] = self.parameters[whole].t().contiguous()
        self._in_layout.clear()
        self.load_weights(update.snapshot)
        self._step("finish")
        for whole in sorted(self._relaid):
            self.parameters[whole] = self.parameters[whole].t().contiguous()
            self._in_layout.add(whole)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._step("load")
        for name, tensor in weights:
            self.during_load(name)
            if name in self._shapes:
                self.part(name).copy_(tensor)

    def unrestored(self) -> Sequence[str]:
        return sorted(self._invalid)

    def flush(self, deadline: Deadline) -> None:
        self._step("flush")
        if deadline.wait(lambda: self._try_to_flush() or None) is None:
            raise EngineError("the fake engine did not confirm that its cache is empty")

    def _try_to_flush(self) -> bool:
        if self.unconfirmed:
            self.unconfirmed -= 1
            return False
        self._cache.clear()
        return True

    def label(self, version: Version | None) -> None:
        self._step("label")
        self.version_label = version

    def resume(self) -> None:
        self._step("resume")
        self.paused = False

    def lost_weights(self) -> bool:
        self._require_alive()
        return self._lost

    def verify(self, update: Update) -> Verification:
        snapshot = update.snapshot
        names = [name for name in snapshot.manifest.by_name if name in self._shapes]
        different = [n for n in names if not _equal(self.part(n), snapshot.tensor(n))]
        unchecked = [name for name in snapshot.manifest.by_name if name not in self._shapes]
        return Verification(update.version, len(names), tuple(different), tuple(unchecked))

    def _step(self, step: Step) -> None:
        self.calls.append(step)
        self._require_alive()
        if step in self.stuck:
            self.stuck[step].wait(60.0)
        error = self.fail.pop(step, None)
        if isinstance(error, list):
            error, *rest = error
            if rest:
                self.fail[step] = rest
        if error is not None:
            self.dead = isinstance(error, EngineDiedError)
            raise error


def flip_bit(tensor: torch.Tensor, byte: int = 0, bit: int = 0) -> None:
    """Corrupt one bit of a contiguous tensor, in place."""
    tensor.reshape(-1).view(torch.uint8)[byte] ^= 1 << bit


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*as_bytes)
