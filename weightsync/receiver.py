"""The inference end: one class for every scheme and every engine."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import Self

from weightsync.attempt import words_of
from weightsync.deadline import Deadline
from weightsync.engine import Engine, Fit, Update, Verification
from weightsync.errors import (
    DeadlineError,
    EngineError,
    EngineUnusableError,
    VersionGoneError,
    WeightSyncError,
)
from weightsync.fleet import Fleet
from weightsync.guard import Guard
from weightsync.interrupts import deferred_interrupts
from weightsync.listeners import Call, Listener
from weightsync.replicas import engines_of
from weightsync.report import ReceiverReport, State, SyncReport
from weightsync.scheme_end import SchemeEnd
from weightsync.switching import Destination
from weightsync.transport import Snapshot
from weightsync.version import Version
from weightsync.words import one_line

if TYPE_CHECKING:
    from weightsync.scheme import WeightSyncScheme

log = logging.getLogger("weightsync")

_REPORT_SECONDS = 5.0
"""How long a receiver whose engine is not set up waits for a sender to tell it so."""

_AGAIN = 0.02
"""Seconds after which a version that is announced and not there is looked for again."""


_SLICE = 0.5
"""Seconds that a wait goes on after its coroutine was cancelled, or its run was left."""

_LOOK = 0.002
"""Seconds between two looks at a lock that a coroutine must not wait for."""

T = TypeVar("T")


class Receiver(SchemeEnd):
    """Watches for new versions and puts them into an engine, or into several alike.

    Updates are applied by ``poll_and_apply``, by iterating, in the background after ``follow``,
    or by a sender in the same process it was attached to; one at a time in any case. In an event
    loop use the coroutines ``..._async``, ``async for`` and ``async with``.

    Of several engines one that fails, dies or does not come back keeps none of the others from a
    new version. ``version``, ``ready``, ``state`` and the sender's report then speak of all that
    live together: the oldest version, and the worst state; ``status().engines`` has each of them.
    A dead engine counts no more, until it answers again at a later update.

    Args:
        scheme: as on the sender's side.
        engine: see :func:`weightsync.engine.as_engine`; of several :class:`Replicas`, or a list.
        id: how the sender knows this receiver; unique in the run. Letters, digits, ``._-``.
        apply_timeout: seconds that one update of the engine may take, once it has begun.
        listeners: called after each update; see :meth:`subscribe`.
        **options: of the engine.
    """

    side = "receiver"

    def __init__(
        self,
        scheme: WeightSyncScheme,
        engine: Any,
        *,
        id: str | None = None,
        apply_timeout: float = 300.0,
        listeners: Sequence[Listener] = (),
        **options: Any,
    ) -> None:
        super().__init__(scheme, id or new_id(), listeners)
        self._options = options
        self._apply_timeout = Deadline(apply_timeout).seconds
        self._subscriber = scheme.create_subscriber(self.id)
        self._url = scheme.for_workers(self.id).to_url()
        self._fleet = self._fleet_of(engine, options)
        self._held: Update | None = None
        self._missed: Version | None = None
        self._failed: str | None = None
        self._connected = False
        self._workers = 0
        self._busy = threading.RLock()
        self._applying = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def _fleet_of(self, engine: Any, options: dict[str, Any]) -> Fleet:
        return Fleet(engines_of(engine, **options), self._url, self._apply_timeout)

    # ---------------------------------------------------------------- set-up

    def connect(self, timeout: float = 60.0) -> None:
        """Check the engine and find the sender. A failing engine is reported to the sender too.

        Raises:
            EngineError: the engine is not set up for weight transfer; says what to change.
            DeadlineError: no live sender showed up.
        """
        self._require_thread()
        deadline = Deadline(timeout)
        with self._busy:
            # Refused here alone: the run has a receiver with this engine, which goes on.
            self._fleet.claim()
            try:
                self._workers = self._fleet.connect(deadline)
                self._subscriber.delegate(self._workers)
                self._failed = None
            except Exception as error:
                self._failed = words_of(error)
                self._tell_failure(deadline.at_most(_REPORT_SECONDS))
                raise
            try:
                self._subscriber.open(deadline)
            except BaseException:
                if not self._connected:
                    self._fleet.release()
                raise
            self._stop.clear()
            self._thread = None
            self._connected = True
            self._acknowledge()

    def _tell_failure(self, deadline: Deadline) -> None:
        try:
            self._subscriber.open(deadline)
            self._acknowledge()
        except (WeightSyncError, OSError) as error:
            log.warning("receiver %s cannot tell of its failure: %s", self.id, one_line(error))
        finally:
            self._subscriber.close()

    @property
    def connected(self) -> bool:
        return self._connected

    @property
    def engine(self) -> Engine:
        """The first of the engines, which is mostly the only one."""
        return self._fleet.members[0].engine

    @property
    def engines(self) -> dict[str, Engine]:
        """All of them, by name."""
        return {member.name: member.engine for member in self._fleet.members}

    @property
    def version(self) -> Version | None:
        """The whole, confirmed version the engine holds.

        Of several the oldest that a living one holds, and None if a living one holds none.
        """
        return self._fleet.version

    @property
    def ready(self) -> bool:
        """Whether every living engine holds a confirmed version, and has not lost it in sleep."""
        return self.version is not None and not self._fleet.lost_weights()

    @property
    def state(self) -> State:
        """The worst of the living engines' states; ``unusable`` if all are dead."""
        return "failed" if self._failed else self._fleet.state

    def status(self) -> ReceiverReport:
        """Where this receiver stands; the same that the sender sees."""
        return ReceiverReport(
            self.id,
            self.state,
            self.version,
            self._fleet.attempted,
            self._failed or self._fleet.error,
            socket.gethostname(),
            os.getpid(),
            self._fleet.seconds,
            tuple(member.report() for member in self._fleet.members),
        )

    def require_ready(self, engine: str | None = None) -> None:
        """
        Args:
            engine: ask for this one of several only, by its name.

        Raises:
            EngineUnusableError: the engine holds no whole known version; says why.
        """
        chosen = self._fleet.alive if engine is None else [self._fleet.member(engine)]
        for member in chosen or self._fleet.members:
            try:
                member.require_ready()
            except EngineUnusableError as error:
                why = self._failed or error
                raise EngineUnusableError(f"receiver {self.id!r}: {why}") from None

    def guard(self, engine: str | None = None) -> Any:
        """The engine's object, as it is, but refusing to generate while it holds no whole version.

        See :class:`~weightsync.guard.Guard`.

        Args:
            engine: which of several, by its name.

        Raises:
            EngineError: there are several, or none of that name.
        """
        if engine is None and len(self.engines) > 1:
            raise EngineError(f"guard(name): one of {', '.join(map(repr, self.engines))}")
        if engine is not None:
            self._fleet.member(engine)
        return Guard(self, engine)

    # ---------------------------------------------------------------- updates

    def poll_and_apply(self, timeout: float = 0.0) -> SyncReport | None:
        """Apply the newest version if it is newer than what the engine holds.

        Weights that the engine lost in sleep are applied again, whatever their version.

        Args:
            timeout: seconds to wait for a new version. Applying it has its own,
                ``apply_timeout``.

        Returns:
            What was applied, or None if nothing new was there.

        Raises:
            MismatchError, CorruptError, EngineError, ...: it could not be applied. The engine
            holds the last good version, or is unusable, as ``status()`` says.
        """
        with self._telling() as call:
            call.report = self._poll(timeout, call)
        return call.report

    def _poll(self, timeout: float, call: Call) -> SyncReport | None:
        self._require_connected()
        self._require_thread()
        deadline = Deadline(timeout)
        gone: Version | None = None
        while True:
            subscriber = self._subscriber
            try:
                after = None if self._fleet.lost_weights() else self.version
                version = subscriber.wait(after, deadline.at_most(_SLICE))
            except Exception:
                if subscriber is self._subscriber:
                    raise
                continue  # it is another run's by now
            if version is None:
                if deadline.expired:
                    return None
                continue
            try:
                with self._alone(Deadline(self._apply_timeout)) as deadline_of_apply:
                    if subscriber is self._subscriber and self._is_new(version):
                        return self._apply(version, deadline_of_apply, call)
            except VersionGoneError as error:
                # Newer ones came while this one was looked at: take the newest there is. If that
                # is the same one, somebody has removed it: nothing but time brings another.
                call.version = None
                if version == gone:
                    self._complain(version, error)
                    if deadline.expired:
                        return None
                    self._stop.wait(min(_AGAIN, deadline.remaining))
                gone = version

    def apply_weights(
        self, version: Version | None = None, timeout: float | None = None
    ) -> SyncReport:
        """Apply a version now, also if the engine holds it already.

        Args:
            version: None for the newest.
            timeout: seconds in all; None for ``apply_timeout``.

        Raises:
            DeadlineError: there is no version yet. Otherwise as ``poll_and_apply``.
        """
        with self._telling() as call:
            call.version = version
            call.report = report = self._apply_wanted(version, timeout, call)
        return report

    def _apply_wanted(
        self, version: Version | None, timeout: float | None, call: Call
    ) -> SyncReport:
        self._require_connected()
        self._require_thread()
        deadline = Deadline(self._apply_timeout if timeout is None else timeout)
        with self._alone(deadline):
            while True:
                chosen = self._subscriber.wait(None, deadline) if version is None else version
                if chosen is None:
                    raise DeadlineError(f"no version within {deadline.seconds:.1f} s")
                try:
                    return self._apply(chosen, deadline, call, again=True)
                except VersionGoneError:
                    if version is not None or deadline.expired:
                        raise
                    # A newer one came while this one was looked at, or will come.
                    self._stop.wait(min(_AGAIN, deadline.remaining))

    def apply_from(
        self, scheme: WeightSyncScheme, version: Version, timeout: float
    ) -> ReceiverReport | None:
        """As :meth:`apply_weights`, of a run that this receiver may have left meanwhile.

        Returns:
            Where it stands; None if it is in another run.
        """
        with self._alone(Deadline(timeout)) as deadline:
            if self.scheme != scheme:
                return None
            self.apply_weights(version, deadline.remaining)
            return self.status()

    def _complain(self, version: Version, error: VersionGoneError) -> None:
        """Into the log, once for each version."""
        if version != self._missed:
            self._missed = version
            log.warning("receiver %s: version %s: %s", self.id, version, one_line(error))

    def _is_new(self, version: Version) -> bool:
        """Another thread may have applied a newer one since this was seen."""
        held = self.version
        return held is None or version > held or self._fleet.lost_weights()

    @contextmanager
    def _alone(self, deadline: Deadline) -> Iterator[Deadline]:
        """No other update, and no ``hold``, meanwhile.

        Raises:
            DeadlineError: another one does not end. WeightSyncError: this receiver is ended.
        """
        while not self._busy.acquire(timeout=min(0.1, deadline.remaining)):
            if self._stop.is_set():
                raise WeightSyncError("the receiver was shut down")
            if deadline.expired:
                raise DeadlineError(f"the engine was held for {deadline.seconds:.1f} s")
        try:
            yield deadline
        finally:
            self._busy.release()

    def _apply(
        self, version: Version, deadline: Deadline, call: Call, again: bool = False
    ) -> SyncReport:
        self._require_not_applying()
        snapshot = self._subscriber.snapshot(version, deadline)
        update = Update(self._url, version, snapshot)
        call.version = version
        self._applying = True
        try:
            with deferred_interrupts():
                fit = self._fleet.update(update, self._held, deadline, again)
        finally:
            self._applying = False
            call.seconds = self._fleet.seconds
            self._keep(update)
            self._acknowledge()
        return self._report(update, fit)

    def _keep(self, update: Update) -> None:
        """The lease of the newest version that an engine holds, and no other."""
        former = self._held
        if self._fleet.holds(update.version):
            self._held = update
            self._let_go(former)
            return
        self._let_go(update)
        if former is not None and not self._fleet.holds(former.version):
            self._held = None
            self._let_go(former)

    def _let_go(self, update: Update | None) -> None:
        """End a lease, once no engine that is late reads from it any more."""
        if update is not None:
            self._end_lease(update, self._fleet)

    def _end_lease(self, update: Update, fleet: Fleet) -> None:
        readers = fleet.readers_of(update)
        if not readers:
            update.snapshot.close()
            return
        ending = partial(_close_after, readers, update.snapshot)
        threading.Thread(target=ending, name=f"weightsync {self.id} lease", daemon=True).start()

    def _report(self, update: Update, fit: Fit) -> SyncReport:
        manifest = update.snapshot.manifest
        return SyncReport(
            update.version,
            self.scheme.url_scheme,
            manifest.payload,
            len(manifest.tensors),
            None,
            self._fleet.seconds,
            fit.missing,
            fit.unexpected,
            receivers=(self.status(),),
            notes=self._fleet.notes(),
        )

    # ---------------------------------------------------------------- other ways to be driven

    def __iter__(self) -> Iterator[SyncReport]:
        """Wait for versions and apply them, one report each, until ``shutdown``."""
        while not self._stop.is_set():
            report = self.poll_and_apply(timeout=0.5)
            if report is not None:
                yield report

    def follow(
        self,
        on_update: Callable[[SyncReport], None] | None = None,
        on_error: Callable[[Exception], None] | None = None,
    ) -> None:
        """Apply new versions in a background thread until ``shutdown``.

        Use ``with receiver.hold():`` around whatever must not see weights change, and around
        every call of an engine that must not be called from two threads (``vllm.LLM``).

        Errors are logged, given to ``on_error``, and retried after a growing pause, which a newer
        version ends.
        """
        self._require_connected()
        if self._thread is not None:
            raise WeightSyncError("follow() was called before")

        def run() -> None:
            pause = 0.0
            while not self._stop.is_set():
                self._rest(pause)
                try:
                    with self._telling() as call:
                        call.report = report = self._poll(0.2, call)
                    pause = 0.0
                    if report is not None and on_update is not None:
                        try:
                            on_update(report)
                        except Exception:
                            log.exception("receiver %s: on_update failed", self.id)
                except BaseException as error:  # an engine's SystemExit ends no thread of ours
                    if self._stop.is_set():
                        return
                    pause = min(30.0, 2 * pause or 0.5)
                    log.warning("%s", call.outcome(self, error))
                    if on_error is not None and isinstance(error, Exception):
                        try:
                            on_error(error)
                        except Exception:
                            log.exception("receiver %s: on_error failed", self.id)

        self._thread = threading.Thread(target=run, name=f"weightsync {self.id}", daemon=True)
        self._thread.start()

    def _rest(self, seconds: float) -> None:
        """Before a version that failed is tried again. What is newer must not wait for that."""
        over, tried, subscriber = Deadline(seconds), self._fleet.attempted, self._subscriber
        while not over.expired and not self._stop.is_set() and subscriber is self._subscriber:
            slot = over.at_most(0.2)
            try:
                if tried is not None and subscriber.wait(tried, slot) is not None:
                    return
            except Exception:  # what is wrong is said when a version is looked for in earnest
                tried = None
            self._stop.wait(slot.remaining)

    @contextmanager
    def hold(self) -> Iterator[Version | None]:
        """No update is applied inside; gives the version that the engine holds.

        In the event loop of an ``AsyncLLM`` use :meth:`hold_async`.
        """
        self._require_thread()
        with self._busy:
            yield self.version

    def rebind(self, engine: Any, **options: Any) -> None:
        """Drive another object from now on (a copy of the model, for instance).

        It holds no version until the next update; ``apply_weights()`` makes it current at once.
        """
        self._require_thread()
        new = self._fleet_of(engine, options or self._options)
        with self._alone(Deadline(self._apply_timeout)) as deadline:
            self._require_not_applying()
            if self._connected:
                workers = new.connect(deadline, instead_of=self._fleet)
                self._fleet.close(keep=new)
                self._delegate_anew(workers, deadline)
            former, self._held = self._held, None
            self._let_go(former)
            self._fleet = new
            if self._connected:
                self._acknowledge()

    def _delegate_anew(self, workers: int, deadline: Deadline) -> None:
        """Other processes read for this receiver from now on, if it is another number of them."""
        if workers != self._workers:
            self._workers = workers
            self._subscriber.close()
            self._subscriber.delegate(workers)
            self._subscriber.open(deadline)

    # ---------------------------------------------------------------- another run

    def switch(self, scheme: WeightSyncScheme | str, timeout: float = 60.0) -> SyncReport:
        """Follow another run of the same architecture, from its newest version on.

        Requests go on meanwhile, and so do updates of the run so far, until the first version of
        the other one is there. It is applied like any other, to all engines or to none; then this
        receiver signs off in its former run. What counts as newer is asked within a run only.

        Args:
            scheme: of the other run, of whatever kind, or its URL.
            timeout: seconds to wait for its sender and for a version. Applying it has its own,
                ``apply_timeout``.

        Raises:
            MismatchError: that run is of another architecture; says where they differ.
            DeadlineError: no live sender, or no version.
            EngineError, CorruptError, ...: an engine failed, was late or died.
            In any case the receiver is where it was, and its engine holds what it held, as far as
            ``status()`` does not say otherwise. The other run's sender hears of it.
        """
        with self._telling() as call:
            call.report = report = self._switch(scheme, timeout, call)
        return report

    def _switch(self, scheme: WeightSyncScheme | str, timeout: float, call: Call) -> SyncReport:
        self._require_connected()
        self._require_thread()
        from weightsync.scheme import as_scheme  # which makes receivers

        deadline = Deadline(timeout)
        scheme = as_scheme(scheme)
        if scheme == self.scheme:
            raise WeightSyncError(f"receiver {self.id!r} follows {scheme.shown()} already")
        destination = Destination(scheme, self.id, self._fleet)
        tried: Version | None = None
        try:
            destination.enter(self._workers, deadline)
            with self._alone(deadline):
                destination.join(self.status(), deadline)
            while True:
                call.version = tried = self._first_version(destination, deadline)
                report = self._try_to_move(destination, tried)
                if report is not None:
                    return report
                if deadline.expired:
                    raise DeadlineError(f"{destination.where}: {tried} is announced, but not there")
                self._stop.wait(_AGAIN)  # a newer one has taken its place
        except BaseException as error:
            if self._subscriber is not destination.subscriber:  # or an interrupt, just afterwards
                self._give_up(destination, tried, error)
            raise

    def _first_version(self, destination: Destination, deadline: Deadline) -> Version:
        while True:
            version = destination.newest(deadline.at_most(_SLICE))
            if version is not None:
                return version
            self._require_connected()
            if deadline.expired:
                seconds = f"{deadline.seconds:.1f} s"
                raise DeadlineError(
                    f"{destination.where}: no version to switch to within {seconds}"
                )

    def _give_up(
        self, destination: Destination, tried: Version | None, error: BaseException
    ) -> None:
        try:
            with self._alone(Deadline(self._apply_timeout)):
                fleet = self._fleet if self._connected else None
                destination.give_up(self.status(), tried, error, fleet)
        except WeightSyncError:  # ended meanwhile, or held for long
            destination.subscriber.close()

    def _try_to_move(self, destination: Destination, version: Version) -> SyncReport | None:
        """Give the engines a version of another run, and follow that. None: it is gone already."""
        with self._alone(Deadline(self._apply_timeout)) as deadline:
            self._require_connected()
            self._require_not_applying()
            destination.require_from(self._fleet)
            try:
                update = destination.lease(version, self._held, deadline)
            except VersionGoneError:
                return None
            self._applying = True
            try:
                with deferred_interrupts():
                    return self._move(destination, update, deadline)
            finally:
                self._applying = False

    def _move(self, destination: Destination, update: Update, deadline: Deadline) -> SyncReport:
        try:
            fit = destination.fleet.update(update, self._held, deadline, again=True)
        except BaseException:
            self._fleet.take_back(destination.fleet, self._held)
            self._end_lease(update, destination.fleet)
            self._acknowledge()
            raise
        held, fleet, subscriber = self._held, self._fleet, self._subscriber
        destination.fleet.claim(instead_of=fleet)
        self.scheme, self._url = destination.scheme, destination.url
        self._held, self._fleet, self._missed = update, destination.fleet, None
        self._subscriber = destination.subscriber  # last: who sees it sees all the rest
        self._acknowledge()
        self._let_go(held)
        subscriber.close()  # before the engines leave: it signs off, and does not die
        fleet.leave()
        return self._report(update, fit)

    def is_bound_to(self, target: Any) -> bool:
        """Whether updates go to this very object, and not to something it was copied from."""
        return any(e.target is target or e is target for e in self.engines.values())

    def verify_weights(self, answers: bool = False) -> Verification:
        """Compare what the engine holds with the version it claims. Changes nothing.

        Args:
            answers: where something cannot be compared, compare what the engine answers before
                and after the version is loaded anew. It is an update like any other, and says
                something only while no requests run: batches change log-probabilities.

        Raises:
            EngineUnusableError: it claims none.
        """
        self._require_thread()
        with self._busy:
            if self._held is None or self.version is None:
                raise EngineUnusableError(f"receiver {self.id!r} holds no version to compare with")
            self._held.snapshot.verify()
            found = self._fleet.verify(self._held)
            if not (answers and found.unchecked):
                return found
            before = self._fleet.answers()
            self.apply_weights(self._held.version)
            after = self._fleet.answers()
            told = None not in (*before.values(), *after.values())
            return replace(found, answers=before == after if told else None)

    # ---------------------------------------------------------------- from an event loop

    # Each runs the synchronous one in a thread. Cancelled, it first waits for what the thread is
    # doing, so that no engine is left in the middle of an update; cancelled again, it does not.

    async def connect_async(self, timeout: float = 60.0) -> None:
        """As :meth:`connect`."""
        await _in_thread(self.id, partial(self.connect, timeout))

    async def poll_and_apply_async(self, timeout: float = 0.0) -> SyncReport | None:
        """As :meth:`poll_and_apply`."""
        deadline = Deadline(timeout)
        while True:
            # In slices: a cancelled wait must neither take long nor apply what comes later.
            slice_of_it = deadline.at_most(_SLICE).remaining
            report = await _in_thread(self.id, partial(self.poll_and_apply, slice_of_it))
            if report is not None or deadline.expired:
                return report

    async def apply_weights_async(
        self, version: Version | None = None, timeout: float | None = None
    ) -> SyncReport:
        """As :meth:`apply_weights`."""
        return await _in_thread(self.id, partial(self.apply_weights, version, timeout))

    async def switch_async(
        self, scheme: WeightSyncScheme | str, timeout: float = 60.0
    ) -> SyncReport:
        """As :meth:`switch`."""
        return await _in_thread(self.id, partial(self.switch, scheme, timeout))

    async def verify_weights_async(self, answers: bool = False) -> Verification:
        """As :meth:`verify_weights`."""
        return await _in_thread(self.id, lambda: self.verify_weights(answers))

    async def shutdown_async(self) -> None:
        """As :meth:`shutdown`."""
        await _in_thread(self.id, self.shutdown)

    @asynccontextmanager
    async def hold_async(self) -> AsyncIterator[Version | None]:
        """As :meth:`hold`. Tasks of one event loop hold together.

        Apply no version inside: it would wait for the end of the block.
        """
        while not self._busy.acquire(blocking=False):
            await asyncio.sleep(_LOOK)
        try:
            yield self.version
        finally:
            self._busy.release()

    async def __aiter__(self) -> AsyncIterator[SyncReport]:
        """As iterating without ``async``."""
        while not self._stop.is_set():
            report = await self.poll_and_apply_async(timeout=_SLICE)
            if report is not None:
                yield report

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.shutdown_async()

    def _require_thread(self) -> None:
        """
        Raises:
            EngineError: an engine needs this very thread to answer; says what to use instead.
        """
        for engine in self.engines.values():
            engine.require_thread()

    # ---------------------------------------------------------------- the end

    def shutdown(self) -> None:
        """Stop following, end the leases, sign off. The engine keeps its weights. Idempotent.

        Waits for an update that is being applied, for ``apply_timeout`` at most.
        """
        if self._connected:
            self._require_thread()
        self._stop.set()
        patience = min(self._apply_timeout, threading.TIMEOUT_MAX)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(patience)
        if not self._busy.acquire(timeout=patience):
            words = "receiver %s (version %s) ends, its engine takes an update still"
            log.warning(words, self.id, self.version)
            self._subscriber.close()
            return
        try:
            held, self._held = self._held, None
            self._let_go(held)
            if self._connected:
                self._fleet.close()
            self._connected = False
            self._subscriber.close()
        finally:
            self._busy.release()

    def _acknowledge(self) -> None:
        try:
            self._subscriber.acknowledge(self.status())
        except (WeightSyncError, OSError) as error:
            # The engine is as it is; a sender that cannot be told will see a late receiver.
            said = f"{self.state}, version {self._fleet.attempted}"
            log.warning(
                "receiver %s cannot tell its sender (%s): %s", self.id, said, one_line(error)
            )

    def _require_not_applying(self) -> None:
        if self._applying:  # this thread is inside of _alone(): it is its own doing
            raise WeightSyncError("an update was asked for from within an update")

    def _require_connected(self) -> None:
        if not self._connected:
            raise WeightSyncError("the receiver is not connected: call connect() first")


def _close_after(readers: list[threading.Thread], snapshot: Snapshot) -> None:
    for reader in readers:
        reader.join()
    snapshot.close()


async def _in_thread(id: str, call: Callable[[], T]) -> T:
    running = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        error = None if running.cancelled() else running.exception()
        if error is not None:
            log.warning("receiver %s: its coroutine was cancelled: %s", id, one_line(error))
        raise


def new_id() -> str:
    """Unique over hosts, processes and time, and says whose it is."""
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:50]
    return f"r-{host}-{os.getpid()}-{secrets.token_hex(3)}"
