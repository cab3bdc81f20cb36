"""One scheme of a fallback, as a receiver uses it: its sender is looked for in the background."""

from __future__ import annotations

import contextlib
import logging
import threading
from dataclasses import replace

import torch

from weightsync.deadline import Deadline
from weightsync.errors import DeadlineError, VersionGoneError
from weightsync.report import ReceiverReport
from weightsync.schemes.fallback.faults import FAULTS, words_of
from weightsync.transport import Snapshot, Subscriber
from weightsync.version import Version
from weightsync.words import one_line

log = logging.getLogger("weightsync")

_LOOK = 2.0
"""Seconds of one look for a sender, and of the rest after one that raised an error."""

_REST = 1.0
"""Seconds in which a version that could not be had is not offered again."""


class Link:
    """A scheme's subscriber.

    Attributes:
        attached: whether a sender was found.
        error: why none can be, in the scheme's words.
        asked: held while a snapshot is being asked for in the background.
    """

    def __init__(self, name: str, subscriber: Subscriber) -> None:
        self.name = name
        self.subscriber = subscriber
        self.attached = False
        self.error: str | None = None
        self.asked = threading.Lock()
        self._offered: Version | None = None
        self._refused: tuple[Version, Deadline] | None = None
        self._complaint: str | None = None
        self._report: ReceiverReport | None = None
        self._stop = threading.Event()
        self._looking = False
        self._closing = False
        self._changing = threading.Lock()

    # ---------------------------------------------------------------- finding the sender

    def look_for_sender(self, stop: threading.Event) -> None:
        """Attach, in the background, as soon as there is a sender, unless told to stop."""
        with self._changing:
            self._stop = stop
            self.error = None
            self._closing = False
            if not self.attached and not self._looking:
                self._looking = True
                name = f"weightsync looks for {self.name}"
                # A scheme may be for the current GPU, of which each thread has one of its own.
                used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
                gpu = torch.cuda.current_device() if used else None
                threading.Thread(target=self._look, args=(gpu,), name=name, daemon=True).start()

    @property
    def settled(self) -> bool:
        """Whether looking has come to something, be it an error."""
        return self.attached or self.error is not None

    def _look(self, gpu: int | None) -> None:
        if gpu is not None:
            torch.cuda.set_device(gpu)
        while self._looks_on():
            try:
                self.subscriber.open(Deadline(_LOOK))
            except DeadlineError:
                continue
            except Exception as error:
                self.error = words_of(error)
                self.complain(error)
                self._stop.wait(_LOOK)
                continue
            self._attach()

    def _looks_on(self) -> bool:
        with self._changing:
            self._looking = not self._stop.is_set() and not self.attached
            return self._looking

    def _attach(self) -> None:
        with self._changing:
            if self._stop.is_set():  # closed while it was being opened
                self._close()
                return
            if self._report is not None:
                with contextlib.suppress(*FAULTS):  # said again after the next update
                    self.subscriber.acknowledge(self._report)
            self.attached, self.error = True, None

    def close(self) -> None:
        with self._changing:
            self.attached = False
            self._closing = self.asked.locked()  # then it is closed when it has answered
            if not self._closing:
                self._close()

    def _close(self) -> None:
        try:
            self.subscriber.close()
        except FAULTS as error:
            self.complain(error)

    # ---------------------------------------------------------------- versions

    def newest(self) -> Version | None:
        """The newest version that is meant for this receiver and was not just found missing."""
        version = self.subscriber.wait(None, Deadline(0))
        if version is not None and self._refused is not None:
            refused, until = self._refused
            if version == refused and not until.expired:
                return None
        self._offered = version
        return version

    def offers(self, version: Version) -> bool:
        return self.attached and self._offered == version

    def snapshot(self, version: Version, deadline: Deadline) -> Snapshot:
        """As :meth:`weightsync.transport.Subscriber.snapshot`; the sender is told of a failure."""
        try:
            return self.subscriber.snapshot(version, deadline)
        except FAULTS as error:
            self._refused = version, Deadline(_REST)
            if not isinstance(error, VersionGoneError):
                self.complain(error)
                self._tell(version, f"not received through {self.name}: {words_of(error)}")
            raise

    def answered(self) -> None:
        """It is not asked any more: see ``asked``."""
        with self._changing:
            self.asked.release()
            if self._closing:
                self._close()

    # ---------------------------------------------------------------- the sender

    def acknowledge(self, report: ReceiverReport) -> None:
        """Tell the sender, now or when it is found."""
        with self._changing:
            self._report = report
            if self.attached:
                self.subscriber.acknowledge(report)
                return
            with contextlib.suppress(*FAULTS):  # some can say it while they introduce themselves
                self.subscriber.acknowledge(report)

    def _tell(self, version: Version, words: str) -> None:
        """Tell the sender, in this way only, that a version was not to be had in this way."""
        with self._changing, contextlib.suppress(*FAULTS):
            if self.attached and self._report is not None:
                self.subscriber.acknowledge(replace(self._report, attempted=version, error=words))

    def complain(self, error: Exception) -> None:
        """Into the log, once."""
        words = words_of(error)
        if words != self._complaint:
            self._complaint = words
            log.warning("%s: %s", self.name, one_line(words))
