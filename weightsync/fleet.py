"""The engines of one receiver, taken through an update together.

Usually it is one. Of several, all have staged the update before any is paused, and all are paused
before the first of them changes; one that fails takes no further step, is brought back to a whole
version if that can be done, and the others go on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weightsync.deadline import Deadline
from weightsync.engine import Engine, Fit, Update, Verification
from weightsync.errors import DeadlineError, EngineDiedError, EngineError
from weightsync.report import EngineReport, Seconds, State
from weightsync.version import Version

log = logging.getLogger("weightsync")

REVIVAL = 3.0
"""Seconds that an engine which is thought to be dead has to answer again."""

LATE = 15.0
"""Seconds after the deadline that an engine of several has to come back from a step."""


@dataclass
class Member:
    """One engine, and where it stands."""

    name: str
    engine: Engine
    state: State = "connected"
    version: Version | None = None
    attempted: Version | None = None
    error: str | None = None
    seconds: Seconds = field(default_factory=Seconds)
    first: int = 0
    busy: threading.Thread | None = None

    def report(self) -> EngineReport:
        return EngineReport(
            self.name, self.state, self.version, self.attempted, self.error, self.seconds
        )

    def is_behind(self, version: Version) -> bool:
        return self.version is None or self.version < version or self.engine.lost_weights()

    def let_go(self, state: State = "unusable") -> None:
        """It holds no whole version."""
        self.version, self.state = None, state


@dataclass
class _Attempt:
    """A member on its way through one update."""

    member: Member
    fit: Fit = field(default_factory=Fit)
    error: BaseException | None = None
    paused: float = 0.0
    was_dead: bool = False

    def step(self, action: Callable[[_Attempt], None]) -> None:
        if self.error is None:
            try:
                action(self)
            except BaseException as error:
                self.error = error


class Fleet:
    """
    Args:
        engines: by name.
        url: of the scheme, for workers of the engines.
        apply_timeout: seconds that bringing an engine back to a former version may take.
    """

    def __init__(self, engines: Mapping[str, Engine], url: str, apply_timeout: float) -> None:
        self.members = [Member(name, engine) for name, engine in engines.items()]
        self._url = url
        self._apply_timeout = apply_timeout
        self._workers = 0

    # ---------------------------------------------------------------- set-up

    def connect(self, deadline: Deadline) -> int:
        """
        Returns:
            How many processes of the engines' own open snapshots.

        Raises:
            EngineError: one is not set up for weight transfer; says what to change.
        """
        counts = [0] * len(self.members)

        def count(attempt: _Attempt) -> None:
            number = self.members.index(attempt.member)
            counts[number] = attempt.member.engine.workers(deadline)

        attempts = self._each(self.members, count, deadline)
        self._raise(attempts)
        if 0 in counts and any(counts):
            raise EngineError(
                "engines with worker processes and without need receivers of their own"
            )
        self._workers = sum(counts)
        for number, member in enumerate(self.members):
            member.first = sum(counts[:number])
        self._each(self.members, lambda a: self._connect(a.member, deadline), deadline, attempts)
        self._raise(attempts)
        return self._workers

    def _connect(self, member: Member, deadline: Deadline) -> None:
        member.engine.number_workers(member.first, self._workers)
        member.engine.connect(self._url, deadline)
        member.state = "connected"

    def close(self) -> None:
        for member in self.members:
            member.engine.close()

    # ---------------------------------------------------------------- where they stand

    @property
    def alive(self) -> list[Member]:
        return [member for member in self.members if member.state != "dead"]

    @property
    def version(self) -> Version | None:
        """The oldest version that a living engine holds; None if one of them holds none."""
        held = [member.version for member in self.alive]
        whole = [version for version in held if version is not None]
        return min(whole) if held and len(whole) == len(held) else None

    @property
    def state(self) -> State:
        """The worst of the living ones'; of none ``unusable``."""
        states = {member.state for member in self.alive} or {"unusable"}
        order: tuple[State, ...] = ("failed", "unusable", "rolled back", "connected", "applied")
        return next(state for state in order if state in states)

    @property
    def error(self) -> str | None:
        """Their words, by name if there are several."""
        said = [member for member in self.members if member.error]
        if len(self.members) == 1:
            return said[0].error if said else None
        return "; ".join(f"engine {m.name!r}: {m.error}" for m in said)[:4000] or None

    @property
    def seconds(self) -> Seconds:
        """Those of the slowest."""
        return Seconds(
            apply=max(member.seconds.apply for member in self.members),
            pause=max(member.seconds.pause for member in self.members),
            total=max(member.seconds.total for member in self.members),
        )

    def lost_weights(self) -> bool:
        return any(member.engine.lost_weights() for member in self.alive)

    def holds(self, version: Version) -> bool:
        """Whether any engine does."""
        return any(member.version == version for member in self.members)

    # ---------------------------------------------------------------- an update

    def update(self, update: Update, former: Update | None, deadline: Deadline, again: bool) -> Fit:
        """Bring the engines that are behind to a version.

        Args:
            former: the last good one, for engines that fail.
            again: also those that hold it already.

        Raises:
            BaseException: an engine failed. Of one engine it is its own error, of several an
                EngineError that says which, and what the others hold.
        """
        began = time.perf_counter()
        members = [m for m in self.members if again or m.is_behind(update.version)]
        # One that does not answer must leave the others time to load.
        several = len(members) > 1
        first = deadline.at_most(deadline.remaining / 2) if several else deadline
        attempts = self._each(members, lambda a: self._prepare(a, update, first), first)
        if any(attempt.error is None for attempt in attempts):
            self._each(members, lambda a: self._pause(a, deadline), deadline, attempts)
            self._each(
                members, lambda a: self._load(a, update, former, deadline), deadline, attempts
            )
        for attempt in attempts:
            self._conclude(attempt, update, began)
        self._raise(attempts, update.version)
        fits = [attempt.fit for attempt in attempts]
        return Fit(
            tuple(dict.fromkeys(name for fit in fits for name in fit.missing)),
            tuple(dict.fromkeys(name for fit in fits for name in fit.unexpected)),
        )

    def _prepare(self, attempt: _Attempt, update: Update, deadline: Deadline) -> None:
        member = attempt.member
        if member.state == "dead":  # it may have been started anew
            attempt.was_dead = True
            self._connect(member, deadline.at_most(REVIVAL))
        attempt.fit = member.engine.check(update.snapshot.manifest)
        member.engine.stage(update, deadline)

    def _pause(self, attempt: _Attempt, deadline: Deadline) -> None:
        attempt.paused = time.perf_counter()
        try:
            attempt.member.engine.pause(deadline)
        except BaseException:
            self._resume(attempt)
            raise

    def _load(
        self, attempt: _Attempt, update: Update, former: Update | None, deadline: Deadline
    ) -> None:
        engine = attempt.member.engine
        try:
            try:
                _load_whole(engine, update, deadline)
            except BaseException as error:
                self._recover(attempt.member, former, error)
                raise
        finally:
            self._resume(attempt)

    def _resume(self, attempt: _Attempt) -> None:
        try:
            attempt.member.engine.resume()
        except BaseException:
            attempt.member.let_go()
            raise
        finally:
            attempt.paused = time.perf_counter() - attempt.paused

    def _recover(self, member: Member, former: Update | None, cause: BaseException) -> None:
        """Put the last good version back, or say that the engine holds none."""
        why = "there is no earlier version"
        member.let_go()
        if isinstance(cause, EngineDiedError):
            why = "it died"
        elif former is not None:
            try:
                _load_whole(member.engine, former, Deadline(self._apply_timeout))
                member.version, member.state = former.version, "rolled back"
                return
            except Exception as error:
                why = f"rolling back to {former.version} failed: {words_of(error)}"
        log.error("engine %s is unusable until the next full update: %s", member.name, why)
        try:
            member.engine.label(None)
        except Exception as error:
            log.warning("engine %s keeps its label: %s", member.name, words_of(error))
        if hasattr(cause, "add_note"):
            cause.add_note(f"the engine holds no whole version now: {why}")

    def _conclude(self, attempt: _Attempt, update: Update, began: float) -> None:
        member, error = attempt.member, attempt.error
        total = time.perf_counter() - began
        member.seconds = Seconds(apply=total, pause=attempt.paused, total=total)
        member.attempted = update.version
        if error is None:
            member.version, member.state, member.error = update.version, "applied", None
            return
        if member.busy is None:
            member.engine.unstage()
        if isinstance(error, EngineDiedError):
            member.let_go("dead")
        member.error = words_of(error)

    # ---------------------------------------------------------------- all at once

    def _each(
        self,
        members: Sequence[Member],
        action: Callable[[_Attempt], None],
        deadline: Deadline,
        attempts: list[_Attempt] | None = None,
    ) -> list[_Attempt]:
        """Take every member that has not failed through one step.

        One alone is taken here, in the caller's thread; several in threads of their own.
        """
        if attempts is None:
            attempts = [_Attempt(member) for member in members]
        if len(attempts) == 1:
            attempts[0].step(action)
            return attempts
        running: list[tuple[_Attempt, threading.Thread]] = []
        for attempt in attempts:
            member = attempt.member
            if member.busy is not None and member.busy.is_alive():
                attempt.error = DeadlineError(f"engine {member.name!r} is still in a former step")
                continue
            member.busy = None
            if attempt.error is None:
                thread = threading.Thread(
                    target=attempt.step,
                    args=(action,),
                    name=f"weightsync {member.name}",
                    daemon=True,
                )
                thread.start()
                running.append((attempt, thread))
        until = Deadline(deadline.remaining + LATE)
        for attempt, thread in running:
            thread.join(until.remaining)
            if thread.is_alive():
                attempt.member.busy = thread
                attempt.member.let_go()
                attempt.error = DeadlineError(
                    f"engine {attempt.member.name!r} did not come back within "
                    f"{deadline.seconds:.1f} s"
                )
        return attempts

    def _raise(self, attempts: Sequence[_Attempt], version: Version | None = None) -> None:
        failed = [attempt for attempt in attempts if attempt.error is not None]
        if len(failed) < len(attempts):
            # That an engine is still dead was said when it died; its report goes on saying so.
            failed = [attempt for attempt in failed if not attempt.was_dead]
        if not failed:
            return
        for attempt in failed:  # an interrupt ends everything
            if attempt.error is not None and not isinstance(attempt.error, Exception):
                raise attempt.error
        error = failed[0].error
        assert error is not None
        if len(self.members) == 1:
            raise error
        said = "; ".join(f"engine {a.member.name!r}: {words_of(a.error)}" for a in failed)
        others = len(attempts) - len(failed)
        rest = f"; the other {others} hold {version}" if version and others else ""
        kind = EngineDiedError if isinstance(error, EngineDiedError) and not others else EngineError
        raise kind(f"{said}{rest}") from error

    def verify(self, update: Update) -> Verification:
        """Compare what each engine that holds the version has with it."""
        one = len(self.members) == 1
        found = [
            (member, member.engine.verify(update))
            for member in self.members
            if member.version == update.version
        ]

        def named(member: Member, names: Sequence[str]) -> list[str]:
            return [name if one else f"{member.name}: {name}" for name in names]

        return Verification(
            update.version,
            sum(outcome.checked for _, outcome in found),
            tuple(name for member, o in found for name in named(member, o.different)),
            tuple(name for member, o in found for name in named(member, o.unchecked)),
        )


def _load_whole(engine: Engine, update: Update, deadline: Deadline) -> None:
    engine.apply(update, deadline)
    invalid = engine.unrestored()
    if invalid:
        raise EngineError(
            f"tensors that the engine lost in sleep were not restored: {', '.join(invalid)}"
        )
    engine.flush(deadline)
    engine.label(update.version)


def words_of(error: Any) -> str:
    return f"{type(error).__name__}: {error}"[:4000]
