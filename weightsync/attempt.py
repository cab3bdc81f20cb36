"""One engine on its way through one update, and where it meets the others.

An attempt changes its engine and itself, and nothing that others see: one that does not come back
in time may do so later, and is looked at then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from weightsync.deadline import Deadline
from weightsync.engine import Engine, Fit, Update
from weightsync.errors import DeadlineError, EngineDiedError, EngineError, VersionGoneError
from weightsync.report import State
from weightsync.version import Version
from weightsync.words import one_line

log = logging.getLogger("weightsync")

LATE = 15.0
"""Seconds after its deadline that an engine of several has to come back, at most."""

_AGAIN = (0.1, 0.5)
"""Seconds before what must be said to an engine in any case is tried again."""


def patience(deadline: Deadline) -> float:
    """Seconds that those who keep a deadline themselves have to say that it is over."""
    return min(LATE, deadline.seconds / 4)


class Gate:
    """Where the engines of an update wait for each other; for none longer than a deadline."""

    def __init__(self, names: Collection[str]) -> None:
        self._awaited = set(names)
        self._changed = threading.Condition()
        self._open = False

    def enter(self, name: str, until: Deadline) -> None:
        """Wait for the others.

        Raises:
            DeadlineError: they have gone on without it.
        """
        with self._changed:
            if self._open:
                raise DeadlineError("it was too late: the others have gone on without it")
            self._strike(name)
            wait = min(until.remaining, threading.TIMEOUT_MAX)
            self._changed.wait_for(lambda: self._open, wait)
            self._let_through()

    def leave(self, name: str) -> None:
        """It does not come, or has been here."""
        with self._changed:
            self._strike(name)

    def _strike(self, name: str) -> None:
        self._awaited.discard(name)
        if not self._awaited:
            self._let_through()

    def _let_through(self) -> None:
        self._open = True
        self._changed.notify_all()


class Way:
    """What the engines of an update have in common.

    Args:
        names: of the engines that take it.
        former: the last good version, for engines that fail.
        apply_timeout: seconds that bringing an engine back to it may take.
    """

    def __init__(
        self,
        names: Collection[str],
        update: Update,
        former: Update | None,
        deadline: Deadline,
        apply_timeout: float,
    ) -> None:
        self.update = update
        self.former = former
        self.deadline = deadline
        self.apply_timeout = apply_timeout
        self.staged = Gate(names)
        self.paused = Gate(names)
        self._alone = len(names) == 1

    def share(self) -> tuple[Deadline, Deadline]:
        """When an engine is to be done with the next step, and when the others go on without it.

        One that does not answer must leave the others time to load.
        """
        left = self.deadline.remaining
        if self._alone:
            return self.deadline, self.deadline
        half = self.deadline.at_most(left / 2)
        return half, self.deadline.at_most(left / 2 + patience(half))


@dataclass
class Attempt:
    """
    Attributes:
        held, state: where the engine stands: before the attempt, and after it.
        revive: gets in touch with an engine that was dead before.
        notes: what became of it after the error.
        pause: seconds for which requests made no progress. total: seconds in all.
    """

    name: str
    engine: Engine
    held: Version | None
    state: State
    revive: Callable[[], None] | None = None
    fit: Fit = field(default_factory=Fit)
    error: BaseException | None = None
    notes: list[str] = field(default_factory=list)
    pause: float = 0.0
    total: float = 0.0
    _wanted: Version | None = None
    _reads: Update | None = None
    _given_up: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def words(self) -> str | None:
        """The error's own, and what became of the engine."""
        return None if self.error is None else "; ".join([words_of(self.error), *self.notes])[:4000]

    def give_up(self) -> Update | None:
        """Wait no more for it. Returns the one version that it may read from now on."""
        with self._lock:
            self._given_up = True
            return self._reads

    def _load(self, update: Update, deadline: Deadline) -> None:
        with self._lock:
            if self._given_up and update is not self._reads:
                raise DeadlineError("it is too late for that")
            self._reads = update
        _load_whole(self.engine, update, deadline)

    def run(self, way: Way) -> None:
        """Take the engine through an update. What goes wrong is in ``error``."""
        began = time.perf_counter()
        self._reads, self._wanted = way.update, way.update.version
        try:
            self._update(way)
        except BaseException as error:
            self.error = error
            if isinstance(error, EngineDiedError):
                self._let_go("dead")
            with suppress(Exception):
                self.engine.unstage()
        finally:
            way.staged.leave(self.name)
            way.paused.leave(self.name)
            self.total = time.perf_counter() - began

    def _update(self, way: Way) -> None:
        told, until = way.share()
        if self.revive is not None:
            self.revive()
            self.state = "connected"
        self.fit = self.engine.check(way.update.snapshot.manifest)
        self.engine.stage(way.update, told)
        way.staged.enter(self.name, until)
        began = time.perf_counter()
        try:
            self._while_paused(way)
        except BaseException as error:
            self._resume(error)
            raise
        else:
            self._resume(None)
        finally:
            stopped = self.engine.stopped()
            self.pause = time.perf_counter() - began if stopped is None else stopped

    def _while_paused(self, way: Way) -> None:
        told, until = way.share()
        self.engine.pause(told)
        way.paused.enter(self.name, until)
        try:
            self._load(way.update, way.deadline)
        except BaseException as error:
            self._recover(way, error)
            raise
        self.held, self.state = way.update.version, "applied"

    def _let_go(self, state: State = "unusable") -> None:
        """The engine holds no whole version."""
        self.held, self.state = None, state

    def _recover(self, way: Way, cause: BaseException) -> None:
        """Put the last good version back, or say that the engine holds none."""
        self._let_go()
        if isinstance(cause, EngineDiedError):
            return
        why = "there is no earlier version"
        interrupt: BaseException | None = None
        if way.former is not None:
            try:
                self._load(way.former, Deadline(way.apply_timeout))
                self.held, self.state = way.former.version, "rolled back"
                return
            except EngineDiedError as error:
                self._let_go("dead")
                why = f"rolling back to {way.former.version} failed: {words_of(error)}"
            except BaseException as error:
                why = f"rolling back to {way.former.version} failed: {words_of(error)}"
                interrupt = None if isinstance(error, Exception) else error
        self._disown(f"the engine holds no whole version now: {why}")
        if interrupt is not None:
            raise interrupt

    def _resume(self, cause: BaseException | None) -> None:
        """Let requests go on, in any case: the engine is of no use otherwise."""
        if isinstance(cause, EngineDiedError) or self.state == "dead":
            with suppress(Exception):  # should it live after all, it must not stay paused
                self.engine.resume()
            return
        error = _insist(self.engine.resume, self.name)
        if error is None:
            return
        self._let_go("dead" if isinstance(error, EngineDiedError) else "unusable")
        self._disown(f"its requests could not be resumed: {words_of(error)}")
        if cause is None or not isinstance(error, Exception):
            raise error

    def _disown(self, why: str) -> None:
        """Have the engine itself say that it holds nothing, and the report say why."""
        self.notes.append(why)
        if self.state != "dead":
            log.error(
                "engine %s is unusable after version %s: %s", self.name, self._wanted, one_line(why)
            )
            error = _insist(lambda: self.engine.label(None), self.name)
            if error is not None:
                log.warning("engine %s keeps its label: %s", self.name, one_line(error))


def _insist(action: Callable[[], None], name: str) -> BaseException | None:
    """Try something three times, unless that makes no sense. Returns the last error."""
    for wait in (*_AGAIN, None):
        try:
            action()
            return None
        except (EngineDiedError, DeadlineError) as error:
            return error
        except BaseException as error:
            if wait is None or not isinstance(error, Exception):
                return error
            log.warning("engine %s is asked again, after %s", name, one_line(error))
            time.sleep(wait)
    return None


def _load_whole(engine: Engine, update: Update, deadline: Deadline) -> None:
    engine.apply(update, deadline)
    try:
        update.snapshot.settle()
    except VersionGoneError as error:  # not one to be passed over: the engine was written to
        raise EngineError(f"what was loaded is no whole version: {error}") from error
    invalid = engine.unrestored()
    if invalid:
        raise EngineError(
            f"tensors that the engine lost in sleep were not restored: {', '.join(invalid)}"
        )
    engine.flush(deadline)
    engine.label(update.version)


def words_of(error: Any) -> str:
    return f"{type(error).__name__}: {error}"[:4000]
