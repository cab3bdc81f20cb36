"""The engines of one receiver, taken through an update together.

Usually it is one. Of several, all have staged the update before any is paused, and all are paused
before the first of them changes; one that fails takes no further step, is brought back to a whole
version if that can be done, and the others go on. What happens to one is in
:mod:`weightsync.attempt`.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from weightsync.attempt import Attempt, Way, patience, words_of
from weightsync.deadline import Deadline
from weightsync.engine import Engine, Fit, Update, Verification
from weightsync.errors import DeadlineError, EngineDiedError, EngineError, EngineUnusableError
from weightsync.report import EngineReport, Seconds, State
from weightsync.version import Version
from weightsync.words import one_line, without_secrets

log = logging.getLogger("weightsync")

REVIVAL = 3.0
"""Seconds that an engine which is thought to be dead has to answer again."""


LEAVING = 10.0
"""Seconds that engines have to hear that a run is left."""


@dataclass
class _Late:
    """A step that an engine has not come back from, and what it may still read.

    ``foreign``: the step was to a version of another run.
    """

    thread: threading.Thread
    attempt: Attempt
    version: Version
    reads: Update | None
    foreign: bool = False


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
    late: _Late | None = None

    def report(self) -> EngineReport:
        return EngineReport(
            self.name, self.state, self.version, self.attempted, self.error, self.seconds
        )

    def is_behind(self, version: Version) -> bool:
        return self.version is None or self.version < version or self.lost_weights()

    def lost_weights(self) -> bool:
        """Whether it held a version and holds it no more. One that does not say so may have."""
        if self.version is None:
            return False
        try:
            return self.engine.lost_weights()
        except Exception:
            return True

    def require_ready(self) -> None:
        """
        Raises:
            EngineUnusableError: it holds no whole version; says why.
        """
        if self.version is None:
            why = f": {self.error}" if self.error else ", none has arrived yet"
            raise EngineUnusableError(f"engine {self.name!r} ({self.state}) holds no version{why}")
        try:
            lost = self.engine.lost_weights()
        except Exception as error:
            why = f"does not say what it holds: {words_of(error)}"
            raise EngineUnusableError(f"engine {self.name!r} {why}") from None
        if lost:
            raise EngineUnusableError(f"engine {self.name!r} lost its weights in sleep")

    def take(self, attempt: Attempt, version: Version) -> None:
        """Stand where an attempt at a version has led to."""
        self.attempted, self.version, self.state = version, attempt.held, attempt.state
        self.error = attempt.words
        self.seconds = Seconds(apply=attempt.total, pause=attempt.pause, total=attempt.total)

    def leave(self, late: _Late, error: BaseException) -> None:
        """Go on without it: what it holds is not known before it comes back."""
        self.late, self.attempted = late, late.version
        self.disown(words_of(error))

    def disown(self, why: str | None, state: State = "unusable") -> None:
        """It holds no whole version of this run."""
        self.version, self.state, self.error = None, state, why

    def look_after(self) -> None:
        """See whether a step that was given up is over by now."""
        if self.late is not None and not self.late.thread.is_alive():
            if not self.late.foreign:
                self.take(self.late.attempt, self.late.version)
            self.late = None

    def take_back(self, other: Member, held: Version | None) -> bool:
        """Stand where an attempt to follow another run, which has failed, leaves the engine.

        Args:
            held: the version of this run that engines which failed were brought back to.

        Returns:
            Whether it holds what it held.
        """
        if other.late is not self.late and other.late is not None:
            self.late = replace(other.late, foreign=True)
            self.disown(other.error)
        elif other.state == "applied":
            self.disown(f"it holds version {other.version}, of another run")
        elif other.state in ("unusable", "dead"):
            self.disown(other.error, other.state)
        else:
            if other.state == "rolled back" and held not in (None, self.version):
                self.version, self.attempted, self.state, self.error = held, held, "applied", None
            return True
        return False


_driven: weakref.WeakValueDictionary[tuple[int, str], Fleet] = weakref.WeakValueDictionary()
"""Who drives which object under which name: two that do not know of each other would mix versions.
"""


class Fleet:
    """
    Args:
        engines: by name.
        url: of the scheme, for workers of the engines.
        apply_timeout: seconds that bringing an engine back to a former version may take.
    """

    def __init__(self, engines: Mapping[str, Engine], url: str, apply_timeout: float) -> None:
        self.members = [Member(name, engine) for name, engine in engines.items()]
        self.seconds = Seconds()
        """Of the last update, phase by phase those of the slowest engine."""
        self.attempted: Version | None = None
        """The version of the last update, whatever came of it."""
        self._url = url
        self._apply_timeout = apply_timeout
        self._workers: list[int] = []

    # ---------------------------------------------------------------- set-up

    def connect(self, deadline: Deadline, instead_of: Fleet | None = None) -> int:
        """
        Args:
            instead_of: whose engines may be among these.

        Returns:
            How many processes of the engines' own open snapshots.

        Raises:
            EngineError: one is not set up for weight transfer, or is driven by another receiver;
                says what to change.
        """
        self.claim(instead_of)
        counts: dict[str, int] = {}

        def count(member: Member) -> None:
            counts[member.name] = member.engine.workers(deadline)

        try:
            self._each(count, deadline)
            if 0 in counts.values() and any(counts.values()):
                raise EngineError(
                    "engines with worker processes and without need receivers of their own"
                )
            self._workers = [counts[member.name] for member in self.members]
            for number, member in enumerate(self.members):
                member.first = sum(self._workers[:number])
            self._each(lambda member: self._connect(member, deadline), deadline)
        except BaseException:
            self.release()
            raise
        return sum(self._workers)

    def claim(self, instead_of: Fleet | None = None) -> None:
        """Keep others from driving these engines, until ``release``.

        Raises:
            EngineError: one is driven by another receiver of this process.
        """
        for member in self.members:
            other = _driven.get(_key(member.engine))
            if other not in (None, self, instead_of):
                raise EngineError(
                    f"engine {member.name!r} is driven by another receiver of this process: "
                    "shutdown() that one first, or give this one's engines to it"
                )
        _driven.update({_key(member.engine): self for member in self.members})

    def release(self) -> None:
        """Let other receivers have these engines."""
        for member in self.members:
            if _driven.get(_key(member.engine)) is self:
                del _driven[_key(member.engine)]

    def _connect(self, member: Member, deadline: Deadline) -> None:
        member.engine.number_workers(member.first, sum(self._workers))
        member.engine.connect(self._url, deadline)
        if member.version is None:
            member.state = "connected"

    def _revive(self, member: Member) -> None:
        """Get in touch with an engine that was dead: it may have been started anew."""
        deadline = Deadline(REVIVAL)
        had = self._workers[self.members.index(member)]
        has = member.engine.workers(deadline)
        if has != had:
            raise EngineError(
                f"it had {had} worker processes and has {has} now: connect() the receiver anew"
            )
        self._connect(member, deadline)

    def close(self, keep: Fleet | None = None) -> None:
        """Give everything back.

        Args:
            keep: whose engines go on being used.
        """
        kept = {id(member.engine) for member in keep.members} if keep is not None else set()
        for member in self.members:
            member.look_after()
            if member.late is not None:
                late = member.late.version
                log.warning("engine %s has not come back from version %s", member.name, late)
            elif id(member.engine) not in kept:
                try:
                    member.engine.close()
                except Exception as error:
                    log.warning("engine %s did not close: %s", member.name, one_line(error))
        self.release()

    # ---------------------------------------------------------------- from one run to another

    def beside(self, url: str) -> Fleet:
        """The same engines as those of another run, of which they hold no version."""
        engines = {member.name: member.engine for member in self.members}
        other = Fleet(engines, url, self._apply_timeout)
        other._workers = self._workers
        for mine, its in zip(self.members, other.members, strict=True):
            its.first, its.late = mine.first, mine.late
            its.state = "dead" if mine.state == "dead" else "connected"
        return other

    def join(self, deadline: Deadline) -> None:
        """Have the engines take updates of this run too.

        Raises:
            EngineError: as :meth:`connect`.
        """
        self._each(lambda member: member.engine.join(self._url, deadline), deadline, self.alive)

    def leave(self) -> None:
        """Have the engines take no more updates of this run, as they are in another one."""
        try:
            self._each(lambda member: member.engine.leave(self._url), Deadline(LEAVING), self.alive)
        except Exception as error:
            log.warning("while %s is left: %s", without_secrets(self._url), one_line(error))

    def stay(self) -> None:
        """Have engines that can take updates of one run only take those of this one again."""
        try:
            self.join(Deadline(LEAVING))
        except Exception as error:
            log.warning("while staying in %s: %s", without_secrets(self._url), one_line(error))

    def take_back(self, other: Fleet, held: Update | None) -> None:
        """The engines are to stay in this run: some have been given a version of the other's.

        Args:
            held: what they held, which they are given again.
        """
        pairs = zip(self.members, other.members, strict=True)
        former = None if held is None else held.version
        untouched = [mine.take_back(its, former) for mine, its in pairs]
        if held is None or all(untouched):
            return
        try:
            self.update(held, None, Deadline(self._apply_timeout), again=False)
        except Exception as error:
            log.error("while going back to version %s: %s", held.version, one_line(error))

    # ---------------------------------------------------------------- where they stand

    @property
    def alive(self) -> list[Member]:
        return [member for member in self.members if member.state != "dead"]

    def member(self, name: str) -> Member:
        """
        Raises:
            EngineError: there is no such engine; says which there are.
        """
        for member in self.members:
            if member.name == name:
                return member
        names = ", ".join(repr(member.name) for member in self.members)
        raise EngineError(f"there is no engine {name!r}: there are {names}")

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

    def lost_weights(self) -> bool:
        return any(member.lost_weights() for member in self.alive)

    def notes(self) -> tuple[str, ...]:
        """On how the last update was applied, by name if there are several engines."""
        one = len(self.members) == 1
        return tuple(
            note if one else f"engine {member.name!r}: {note}"
            for member in self.alive
            for note in member.engine.notes()
        )

    def holds(self, version: Version) -> bool:
        """Whether any engine does."""
        return any(member.version == version for member in self.members)

    def readers_of(self, update: Update) -> list[threading.Thread]:
        """Steps that were given up, and may still read a version. Its lease lasts as long."""
        late = [member.late for member in self.members if member.late is not None]
        return [each.thread for each in late if each.reads is update]

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
        for member in self.members:
            member.look_after()
        members = [m for m in self.members if again or m.is_behind(update.version)]
        was_dead = {member.name for member in members if member.state == "dead"}
        attempts = {member.name: self._attempt(member) for member in members}
        free = [name for name, attempt in attempts.items() if attempt.error is None]
        way = Way(free, update, former, deadline, self._apply_timeout)
        threads: dict[str, threading.Thread] = {}
        try:
            jobs = {name: partial(attempts[name].run, way) for name in free}
            _together(jobs, deadline, threads)
        finally:
            self.attempted = update.version
            said = {name: self._conclude(each, way, threads) for name, each in attempts.items()}
            self._note_seconds(members)
        errors = {name: error for name, error in said.items() if error is not None}
        self._raise(errors, len(members), update.version, was_dead)
        fits = [attempt.fit for attempt in attempts.values()]
        return Fit(
            tuple(dict.fromkeys(name for fit in fits for name in fit.missing)),
            tuple(dict.fromkeys(name for fit in fits for name in fit.unexpected)),
        )

    def _attempt(self, member: Member) -> Attempt:
        attempt = Attempt(member.name, member.engine, member.version, member.state)
        if member.state == "dead":
            attempt.revive = partial(self._revive, member)
        if member.late is not None:
            attempt.error = DeadlineError("it has not come back from a former step")
        return attempt

    def _conclude(
        self, attempt: Attempt, way: Way, threads: Mapping[str, threading.Thread]
    ) -> BaseException | None:
        """Note where an engine stands now. Returns what went wrong."""
        member, version = self.member(attempt.name), way.update.version
        thread = threads.get(attempt.name)
        if member.late is not None:
            member.attempted = version
        elif thread is not None and thread.is_alive():
            error = DeadlineError(f"it did not come back within {way.deadline.seconds:.1f} s")
            member.leave(_Late(thread, attempt, version, attempt.give_up()), error)
            return error
        else:
            member.take(attempt, version)
        return attempt.error

    def _note_seconds(self, members: Sequence[Member]) -> None:
        if members:
            self.seconds = Seconds(
                apply=max(member.seconds.apply for member in members),
                pause=max(member.seconds.pause for member in members),
                total=max(member.seconds.total for member in members),
            )

    def _each(
        self,
        action: Callable[[Member], None],
        deadline: Deadline,
        among: Sequence[Member] | None = None,
    ) -> None:
        """Do something with every engine at a time, or with some of them.

        Raises:
            BaseException: what the only one raised. EngineError: what some of several raised.
        """
        errors: dict[str, BaseException] = {}

        def take(member: Member) -> None:
            try:
                if member.late is not None:
                    raise DeadlineError("it has not come back from a former step")
                action(member)
            except BaseException as error:
                errors[member.name] = error

        threads: dict[str, threading.Thread] = {}
        members = self.members if among is None else among
        _together({m.name: partial(take, m) for m in members}, deadline, threads)
        for name, thread in threads.items():
            if thread.is_alive():
                late = DeadlineError(f"it did not come back within {deadline.seconds:.1f} s")
                errors = {**errors, name: late}
        self._raise(errors, len(members))

    def _raise(
        self,
        errors: Mapping[str, BaseException],
        tried: int,
        version: Version | None = None,
        was_dead: Collection[str] = (),
    ) -> None:
        """
        Args:
            errors: of the engines that failed. tried: how many were to take the step.
            was_dead: those of which it was said before.
        """
        failed = dict(errors)
        if len(failed) < tried:  # what one is still dead of was said when it died
            failed = {name: error for name, error in errors.items() if name not in was_dead}
        if not failed:
            return
        first = next(iter(failed.values()))
        if len(self.members) == 1:
            raise first
        said = "; ".join(
            f"engine {name!r}: {(version and self.member(name).error) or words_of(error)}"
            for name, error in failed.items()
        )
        held = [m for m in self.members if version is not None and m.version == version]
        verb = "holds" if len(held) == 1 else "hold"
        others = f"; {', '.join(repr(m.name) for m in held)} {verb} {version}" if held else ""
        died = all(isinstance(error, EngineDiedError) for error in failed.values())
        raise (EngineDiedError if died and not held else EngineError)(f"{said}{others}") from first

    def verify(self, update: Update) -> Verification:
        """Compare what each engine that holds the version has with it."""
        one = len(self.members) == 1
        checked, different, unchecked = 0, [], []
        for member in self.members:
            if member.version != update.version:
                unchecked.append(f"{member.name}: all of it, as it holds {member.version}")
                continue
            found = member.engine.verify(update)
            before = "" if one else f"{member.name}: "
            checked += found.checked
            different += [f"{before}{name}" for name in found.different]
            unchecked += [f"{before}{name}" for name in found.unchecked]
        return Verification(update.version, checked, tuple(different), tuple(unchecked))

    def answers(self) -> dict[str, str | None]:
        """What each engine says of fixed inputs."""
        return {member.name: member.engine.answers() for member in self.alive}


def _key(engine: Engine) -> tuple[int, str]:
    """The part of an object that an engine changes: adapters of one LLM have their own names."""
    return id(engine.target), engine.name


def _together(
    jobs: Mapping[str, Callable[[], None]],
    deadline: Deadline,
    threads: dict[str, threading.Thread],
) -> None:
    """Run jobs that raise nothing at the same time: one alone in the caller's thread.

    Args:
        deadline: known to the jobs; waited for them is a little longer.
        threads: where those of the others are noted; some may not have ended.
    """
    if len(jobs) == 1:
        for job in jobs.values():
            job()
        return
    for name, job in jobs.items():
        threads[name] = threading.Thread(target=job, name=f"weightsync {name}", daemon=True)
        threads[name].start()
    until = Deadline(deadline.remaining + patience(deadline))
    for thread in threads.values():
        thread.join(min(until.remaining, threading.TIMEOUT_MAX))
