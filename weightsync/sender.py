"""The trainer's end: one class for every scheme and every kind of trainer."""

from __future__ import annotations

import logging
import operator
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal

import torch

from weightsync.deadline import Deadline
from weightsync.errors import (
    DeadlineError,
    ReceiverError,
    SourceError,
    VersionError,
    WeightSyncError,
)
from weightsync.listeners import Call, Listener
from weightsync.manifest import Manifest
from weightsync.ranks import Ranks
from weightsync.receiver import Receiver
from weightsync.report import ReceiverReport, Seconds, SyncReport
from weightsync.scheme_end import SchemeEnd
from weightsync.source import Inventory, Looked, SourceOptions, WeightSource, as_source
from weightsync.together import follow, lead
from weightsync.transport import Published
from weightsync.version import Version
from weightsync.words import one_line

if TYPE_CHECKING:
    from weightsync.scheme import WeightSyncScheme

log = logging.getLogger("weightsync")

_REMEMBERED = 4096
"""Versions of the past that are counted, for ``max_lag`` and :meth:`Sender.lag`."""

_GONE = ("dead", "failed")
"""States of receivers from which nothing is to be expected."""


class Sender(SchemeEnd):
    """Publishes weights after a training step, and learns what became of them.

    Args:
        scheme: as on the receivers' side.
        model: where the weights come from; see :func:`weightsync.source.as_source`.
        dtype, keep_dtype, rename, include, exclude, strict, merge, manifest: what is sent, and
            how; see :class:`~weightsync.source.SourceOptions`.
        timeout: seconds for each ``update_weights`` that names none.
        group: the ``torch.distributed`` ranks that hold the model together, all of which make the
            same calls of their senders; rank 0 of them publishes. None: all ranks if the model
            is sharded (FSDP, DTensors, ZeRO-3) when the sender connects, else this process alone.
        listeners: called after each update; see :meth:`subscribe`. Of several ranks those of
            rank 0's sender.
        gather: how a sharded model is sent. False: each rank writes its own rows, nothing is
            gathered (ranks of one host, double buffer). True: all ranks gather bucket by bucket,
            rank 0 sends. None: the former where it is possible.
    """

    side = "sender"

    def __init__(
        self,
        scheme: WeightSyncScheme,
        model: Any = None,
        *,
        dtype: torch.dtype | None = None,
        rename: Callable[[str], str] | None = None,
        keep_dtype: Sequence[str] = (),
        include: Sequence[str] | None = None,
        exclude: Sequence[str] = (),
        strict: bool = True,
        merge: bool = True,
        manifest: Manifest | None = None,
        timeout: float = 300.0,
        group: Any = None,
        gather: bool | None = None,
        listeners: Sequence[Listener] = (),
    ) -> None:
        super().__init__(scheme, listeners=listeners)
        self._group = group
        if gather is not None and type(gather) is not bool:
            raise SourceError(f"gather={gather!r:.80}: True, False or None")
        self._gather = gather
        self._ranks: Ranks | None = None
        self._options = SourceOptions(
            dtype, rename, manifest, keep_dtype, include, exclude, strict, merge
        )
        self._timeout = Deadline(timeout).seconds
        self._publisher = scheme.create_publisher()
        self._source: WeightSource | None = None
        self._epoch: int | None = None
        self._published: deque[Version] = deque(maxlen=_REMEMBERED)
        self._tried = -1
        self._attached: list[Receiver] = []
        self._dead_engines: dict[str, frozenset[str]] = {}
        self._busy = threading.Lock()
        self._updating: int | None = None
        if model is not None:
            self.register_model(model)

    def register_model(self, model: Any) -> None:
        """Say where the weights come from. A later call replaces the former."""
        self._source = as_source(model, self._options)

    @property
    def version(self) -> Version | None:
        """The last version that was published."""
        return self._published[-1] if self._published else None

    def lag(self, version: Version | int | str | None) -> int:
        """How many versions this sender has published after one: the age of what was sampled by it.

        Of one of a former sender's: all of them. Counted are the last 4096.

        Args:
            version: as receivers say it, as an engine's label has it (``"epoch:number"``), or the
                number that it was published under. None, of an engine that holds none: older than
                any bound.

        Raises:
            TypeError, ValueError: that is none of these.
        """
        if version is None:
            return sys.maxsize
        if isinstance(version, str):
            version = Version.parse(version)
        elif type(version) is int:
            version = Version(self._epoch or 0, version)
        if not isinstance(version, Version):
            words = "a Version, its number, or the text of an engine's label"
            raise TypeError(f"lag({version!r:.80}): {words} was expected")
        newest_first = reversed(self._published)
        return sum(1 for _ in takewhile(lambda published: published > version, newest_first))

    def _remember(self, version: Version) -> None:
        if version != self.version:  # the same once more is no other version
            self._published.append(version)

    @property
    def connected(self) -> bool:
        return self._epoch is not None

    @property
    def next_version(self) -> Version:
        """The version of the next update, if that names none.

        Raises:
            WeightSyncError: the sender is not connected.
        """
        return Version(self._require_epoch(), self._next_number(None))

    def connect(self, timeout: float = 60.0, receivers: int | Sequence[str] = 0) -> None:
        """Take ownership of the run, make room for the registered model, and wait for receivers.

        Args:
            receivers: how many receivers to wait for, or their ids.

        Raises:
            SenderBusyError: another live sender owns the run.
            NoRoomError: there is too little room for the buffers.
            ReceiverError: a receiver's set-up failed; carries its words.
            DeadlineError: fewer receivers than asked for came.
        """
        if isinstance(receivers, str):
            raise TypeError(f"receivers={receivers!r}: a number, or a list of ids")
        deadline = Deadline(timeout)
        manifest, several = None, False
        if self._source is not None and not self._source.walked:
            inventory = self._source.inventory()
            manifest = inventory.manifest
            several = inventory.of_ranks
        if not several and self._group is None:
            self._open(manifest, receivers, deadline)
            return
        # Met anew: a rank may be another process than the last time.
        self._ranks = Ranks(self.scheme.purpose(), self._group)
        self._ranks.meet(deadline)
        with self._ranks.operation(deadline):
            if self._ranks.leads:
                self._open(manifest, receivers, deadline)
                self._ranks.collect("connected", deadline)
                self._ranks.say({"epoch": self._epoch})
            else:
                self._ranks.answer("connected", {})
                self._epoch = self._ranks.hear(deadline)["epoch"]

    def _open(
        self, manifest: Manifest | None, receivers: int | Sequence[str], deadline: Deadline
    ) -> None:
        self._epoch = self._publisher.open(deadline)
        if manifest is not None:
            self._publisher.prepare(manifest, deadline)
        if receivers:
            self._wait_connected(receivers, deadline)
        for receiver in self._attached:
            self._connect_attached(receiver, deadline)

    def wait_connected(
        self,
        receivers: int | Sequence[str],
        timeout: float = 60.0,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait for receivers that join later, as ``connect(receivers=)`` does for the first.

        Args:
            check: called at each look; what it raises ends the wait. For those who know of the
                receivers' processes, and that one has ended.

        Raises:
            ReceiverError, DeadlineError: as of ``connect``.
        """
        self._require_epoch()
        self._wait_connected(receivers, Deadline(timeout), check)

    def _wait_connected(
        self,
        receivers: int | Sequence[str],
        deadline: Deadline,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        alive: list[str] = []

        def attempt() -> bool | None:
            check()
            reports = self._publisher.receivers()
            failed = tuple(report for report in reports if report.state == "failed")
            if failed:
                raise ReceiverError("; ".join(map(str, failed)), failed)
            alive[:] = [report.receiver for report in reports if report.state != "dead"]
            if isinstance(receivers, int):
                return len(alive) >= receivers or None
            return set(receivers) <= set(alive) or None

        if deadline.wait(attempt) is None:
            wanted = receivers if isinstance(receivers, int) else ", ".join(receivers)
            came = ", ".join(alive) or "none"
            raise DeadlineError(
                f"waited {deadline.seconds:.1f} s for receivers ({wanted}); connected: {came}"
            )

    # ---------------------------------------------------------------- updates

    def update_weights(
        self,
        weights: Any = None,
        *,
        version: int | None = None,
        wait: Literal["published", "applied"] = "published",
        timeout: float | None = None,
        receivers: Sequence[str] | None = None,
        max_lag: int | None = None,
    ) -> SyncReport:
        """Publish the current weights, whole or not at all.

        Args:
            weights: instead of the registered model's, for this update.
            version: the trainer's step; must grow. The same number again is possible with the
                same weights only. None counts on.
            wait: return when the version is visible, or when every live receiver has applied it.
                Attached receivers have applied it in either case.
            timeout: seconds in all; None for the sender's own.
            receivers: ids of the receivers it is meant for; None for all. The others keep what
                they hold, and the buffer it lies in: have one more of these than receivers.
            max_lag: how many versions of this sender's a receiver may be behind on return: wait
                until every live one holds the version published so many before this one, or a
                newer one. 0 is ``wait="applied"``; None lets them be as far behind as the scheme
                does.

        Raises:
            SourceError: a tensor cannot be sent; nothing became visible.
            VersionError: the number does not grow; nothing became visible.
            NoRoomError, DeadlineError: no room or no free buffer; nothing became visible.
            ReceiverError: published, but a receiver failed, died, was late or is further behind
                than ``max_lag``. The others went on; the error carries the report.
        """
        with self._telling() as call:
            deadline = Deadline(self._timeout if timeout is None else timeout)
            lag = 0 if wait == "applied" else max_lag
            with self._alone(deadline):
                if self._ranks is None:
                    source = self._checked(weights, wait, receivers, max_lag)
                    report = self._update(source, version, lag, deadline, receivers, call)
                else:
                    with self._ranks.operation(deadline):  # first: all hear what fails here
                        source = self._checked(weights, wait, receivers, max_lag)
                        if self._ranks.leads:
                            report = self._update(source, version, lag, deadline, receivers, call)
                            self._ranks.say({"report": report.to_dict()})
                        else:
                            report = self._follow(self._ranks, source, deadline, version)
            call.report = report
        return report

    def _checked(
        self, weights: Any, wait: str, receivers: Sequence[str] | None, max_lag: int | None
    ) -> WeightSource:
        """The source of an update, after a look at what else was passed."""
        if wait not in ("published", "applied"):
            raise ValueError(f"wait={wait!r}: 'published' or 'applied'")
        if max_lag is not None and (type(max_lag) is not int or not 0 <= max_lag < _REMEMBERED):
            raise ValueError(f"max_lag={max_lag!r}: a number of versions, below {_REMEMBERED}")
        if wait == "applied" and max_lag:
            raise ValueError(f"wait='applied' waits for this very version: no max_lag={max_lag}")
        self._require_epoch()
        if isinstance(receivers, str):
            raise TypeError(f"receivers={receivers!r}: a list of ids")
        if isinstance(weights, int):
            raise SourceError(f"{weights!r} is no set of weights; a step is passed as version=")
        source = self._source if weights is None else as_source(weights, self._options)
        if source is None:
            raise SourceError("no weights: pass a model to create_sender or update_weights")
        return source

    def _follow(
        self, ranks: Ranks, source: WeightSource, deadline: Deadline, version: int | None
    ) -> SyncReport:
        number = None if version is None else self._next_number(version)
        try:
            over = follow(ranks, self._publisher, source, deadline, number)
        except ReceiverError as error:
            if error.report is not None:
                self._remember(error.report.version)
            raise
        report = SyncReport.from_dict(over["report"])
        if not report.skipped:
            self._remember(report.version)
        return report

    def _tell(self, call: Call, error: BaseException | None = None) -> None:
        if self._ranks is None or self._ranks.leads:  # once for each update, not on every rank
            super()._tell(call, error)

    @contextmanager
    def _alone(self, deadline: Deadline) -> Iterator[None]:
        """One update at a time, whichever threads they come from."""
        me = threading.get_ident()
        if self._updating == me:
            raise WeightSyncError("update_weights was called from within update_weights")
        if not self._busy.acquire(timeout=min(deadline.remaining, threading.TIMEOUT_MAX)):
            raise DeadlineError(f"another update was not done within {deadline.seconds:.1f} s")
        self._updating = me
        try:
            yield
        finally:
            self._updating = None
            self._busy.release()

    def _update(
        self,
        source: WeightSource,
        version: int | None,
        max_lag: int | None,
        deadline: Deadline,
        receivers: Sequence[str] | None,
        call: Call,
    ) -> SyncReport:
        if self._epoch is None:
            raise WeightSyncError("the sender was shut down")
        call.version = new = Version(self._epoch, self._next_number(version))
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()  # a tensor may still be computed on a stream of the trainer's
        try:
            inventory = source.inventory()
            looked = time.perf_counter() - call.began
            if self._ranks is not None:
                published = lead(
                    self._ranks,
                    self._publisher,
                    new,
                    inventory,
                    deadline,
                    receivers,
                    self._gather,
                )
            else:
                _require_whole(inventory)
                published = self._publisher.publish(new, Looked(inventory), deadline, receivers)
        except (SourceError, VersionError):
            raise
        except WeightSyncError:
            # It may have arrived at some: a number that counts on must be another.
            self._tried = new.number
            raise
        except BaseException:
            # It may have been announced just before.
            self._remember(new)
            raise
        report = SyncReport(
            new,
            _name(self.scheme, published),
            published.nbytes,
            published.tensors,
            published.changed,
            Seconds(looked + published.extract, published.transfer),
            skipped=published.skipped,
            receivers=published.failures,
            notes=published.notes,
            fell_back=published.fell_back,
        )
        owed: Version | None = None
        if not published.skipped:
            self._remember(new)
            owed = self._owed(max_lag)
            report = self._drive(report, owed, deadline, receivers)
        total = time.perf_counter() - call.began
        seconds = replace(report.seconds, total=total)
        report = replace(report, seconds=seconds, lag=self._worst_lag(report.receivers))
        behind = tuple(r for r in report.behind() if owed is None or not _may_lag(r, owed))
        failures = (*behind, *self._bereaved(report, behind))
        if failures and not report.skipped:
            words = "; ".join(map(str, failures))
            bound = f" (max_lag={max_lag})" if max_lag else ""
            raise ReceiverError(f"version {new.number}{bound}: {words}", failures, report)
        return report

    def _worst_lag(self, reports: Sequence[ReceiverReport]) -> int | None:
        held = [r.version for r in reports if r.version is not None and r.state not in _GONE]
        return max(map(self.lag, held), default=None)

    def _owed(self, max_lag: int | None) -> Version | None:
        """The oldest version that a receiver may hold now; None: any, or none at all."""
        if max_lag is None or len(self._published) <= max_lag:
            return None
        return self._published[-1 - max_lag]

    def _next_number(self, version: int | None) -> int:
        if version is None:
            return max(self.version.number if self.version else -1, self._tried) + 1
        whole = hasattr(version, "__index__") and not isinstance(version, bool)
        if not whole or operator.index(version) < 0:
            raise ValueError(f"version={version!r}: a step number, not negative")
        return operator.index(version)

    def _drive(
        self,
        report: SyncReport,
        owed: Version | None,
        deadline: Deadline,
        receivers: Sequence[str] | None,
    ) -> SyncReport:
        """Have the attached receivers apply the version, and wait for what the others owe.

        Afterwards nobody reads the trainer's own memory any more.
        """
        answers = {lost.receiver: lost for lost in report.receivers}
        try:
            self._hear(answers, report.version, owed, deadline, receivers)
        except BaseException:
            with suppress(WeightSyncError):
                self._publisher.conclude(report.version, Deadline(0), _answered(answers))
            raise
        concluded = self._publisher.conclude(report.version, deadline, _answered(answers))
        answers = {**{answer.receiver: answer for answer in concluded}, **answers}
        # Of this version: what a late one last took is another's time.
        new = report.version
        took = [r.seconds for r in answers.values() if new in (r.version, r.attempted)]
        slowest = replace(
            report.seconds,
            apply=max((seconds.apply for seconds in took), default=0.0),
            pause=max((seconds.pause for seconds in took), default=0.0),
        )
        return replace(report, receivers=tuple(answers.values()), seconds=slowest)

    def _hear(
        self,
        answers: dict[str, ReceiverReport],
        version: Version,
        owed: Version | None,
        deadline: Deadline,
        receivers: Sequence[str] | None,
    ) -> None:
        # One that has switched to another run is that run's.
        self._attached = [r for r in self._attached if r.scheme == self.scheme]
        for receiver in self._attached:
            if receivers is not None and receiver.id not in receivers:
                continue
            try:
                status = receiver.apply_from(self.scheme, version, deadline.remaining)
            except Exception as error:
                log.warning("receiver %s: version %s: %s", receiver.id, version, one_line(error))
                status = receiver.status() if receiver.scheme == self.scheme else None
            if status is not None:
                answers[receiver.id] = status
        # Nobody waits for one that was lost: the publisher may know it no more.
        rest = None if not receivers else [id for id in receivers if id not in answers]
        if owed is not None and (rest is None or rest):
            late = self._wait_applied(owed, version, deadline, rest)
            if not late and not answers:
                raise DeadlineError(
                    f"version {version.number} is published, but no receiver was connected "
                    f"within {deadline.seconds:.1f} s to apply it"
                )
            answers.update({r.receiver: r for r in late if r.receiver not in answers})

    def _wait_applied(
        self,
        owed: Version,
        version: Version,
        deadline: Deadline,
        receivers: Sequence[str] | None,
    ) -> list[ReceiverReport]:
        """The answers to the version that is owed; of who failed at it those to the newest."""
        reports = self._publisher.wait_applied(owed, deadline, receivers)
        failed = [r.receiver for r in reports if r.failed_last and r.state not in _GONE]
        if owed == version or not failed:
            return reports
        again = {r.receiver: r for r in self._publisher.wait_applied(version, deadline, failed)}
        return [again.get(report.receiver, report) for report in reports]

    def _bereaved(
        self, report: SyncReport, behind: Sequence[ReceiverReport]
    ) -> list[ReceiverReport]:
        """Receivers that are not behind, and lost an engine since that was last looked at."""
        found = []
        for receiver in report.receivers:
            known = self._dead_engines.get(receiver.receiver, frozenset())
            self._dead_engines[receiver.receiver] = receiver.dead_engines
            if receiver.dead_engines - known and receiver not in behind:
                found.append(receiver)
        return found

    def wait_applied(
        self, receivers: Sequence[str] | None = None, timeout: float | None = None
    ) -> list[ReceiverReport]:
        """Wait until receivers hold the version published last, which was meant for all.

        Args:
            receivers: their ids; None for every live one.
            timeout: seconds; None for the sender's own.

        Returns:
            What each said.

        Raises:
            ReceiverError: one failed, died, or is late.
        """
        self._require_epoch()
        version = self.version
        if version is None:
            raise WeightSyncError("no version was published yet")
        deadline = Deadline(self._timeout if timeout is None else timeout)
        answers = self._publisher.wait_applied(version, deadline, receivers)
        behind = tuple(r for r in answers if r.version is None or r.version < version)
        if behind:
            raise ReceiverError(f"version {version.number}: {'; '.join(map(str, behind))}", behind)
        return answers

    def _require_epoch(self) -> int:
        if self._epoch is None:
            raise WeightSyncError("the sender is not connected: call connect() first")
        return self._epoch

    def receivers(self) -> list[ReceiverReport]:
        """What every known receiver last said of itself."""
        return self._publisher.receivers()

    # ---------------------------------------------------------------- one process

    def attach(self, receiver: Receiver, timeout: float = 60.0) -> None:
        """Drive a receiver of this process: ``update_weights`` makes it apply each version.

        Connects it if it is not connected yet.
        """
        if self._ranks is not None and not self._ranks.leads:
            raise WeightSyncError("receivers are attached to the sender of the trainer's rank 0")
        if receiver.scheme != self.scheme:
            raise WeightSyncError(
                f"the receiver listens to {receiver.scheme.shown()}, this sender publishes to "
                f"{self.scheme.shown()}"
            )
        if receiver not in self._attached:
            self._attached.append(receiver)
        if self._epoch is not None:
            self._connect_attached(receiver, Deadline(timeout))

    def _connect_attached(self, receiver: Receiver, deadline: Deadline) -> None:
        if not receiver.connected:
            receiver.connect(deadline.remaining)

    def detach(self, receiver: Receiver) -> None:
        """Leave a receiver to itself again; it stays connected."""
        if receiver not in self._attached:
            raise WeightSyncError(f"receiver {receiver.id!r} is not attached")
        self._attached.remove(receiver)

    # ---------------------------------------------------------------- the end

    def shutdown(self) -> None:
        """Give everything back: buffers, files, locks. Idempotent; receivers keep their weights."""
        self._attached.clear()
        self._publisher.close()
        self._epoch = None


def _answered(answers: dict[str, ReceiverReport]) -> tuple[str, ...]:
    """Who is done with it. One that is late may still be reading."""
    return tuple(name for name, report in answers.items() if report.state != "waiting")


def _name(scheme: WeightSyncScheme, published: Published) -> str:
    kind = scheme.url_scheme
    return f"{kind}:{published.scheme}" if published.scheme else kind


def _may_lag(report: ReceiverReport, owed: Version) -> bool:
    """Whether a receiver that is behind is so for no other reason than its work."""
    if report.state in (*_GONE, "waiting") or report.failed_last:
        return False
    return report.version is not None and report.version >= owed


def _require_whole(inventory: Inventory) -> None:
    """
    Raises:
        SourceError: the weights are spread over ranks, of which this sender knows nothing.
    """
    if inventory.collective:
        raise SourceError(
            "the weights are sharded over ranks: give the model to create_sender, or name the "
            "ranks by group=, before connect(); every rank then makes the same calls"
        )
