"""Reads a version into an engine's memory while it is still being written.

What is read ahead is of no use before the version is announced; it is compared with its digests
then, like everything else. A thread of its own does it, while the engine generates.
"""

from __future__ import annotations

import logging
import threading
from multiprocessing.util import Finalize

from weightsync.deadline import Deadline
from weightsync.errors import DeadlineError
from weightsync.manifest import Manifest
from weightsync.transport import Memory, Subscriber
from weightsync.upload import Staging
from weightsync.version import Version
from weightsync.words import one_line

log = logging.getLogger("weightsync")

_LOOK = 0.002
"""Seconds between two looks whether something is being written."""

_END = 30.0
"""Seconds for what is under way when it ends: a window, or locking the pages of a mapping."""


class ReadAhead:
    """
    Args:
        subscriber: whose versions are read.
        staging: where they are read into; nobody else writes to it.
        fingerprint: of the manifest that the staging was made for; others are not read.
    """

    def __init__(self, subscriber: Subscriber, staging: Staging, fingerprint: str) -> None:
        self._subscriber, self.staging = subscriber, staging
        self._fingerprint = fingerprint
        self._using = threading.Lock()
        self._wanted = threading.Event()
        self._closed = threading.Event()
        self._held = False
        self._following = 0
        self._done = 0
        self._thread = threading.Thread(target=self._run, name="weightsync ahead", daemon=True)
        self._thread.start()
        # Torch does not like its threads to be interrupted by the interpreter's end.
        self._at_exit = Finalize(None, self.close, exitpriority=0)

    def take(self, memory: Memory, version: Version, deadline: Deadline) -> None:
        """Have a leased version in the staging, whole and verified, and leave it there until
        :meth:`release`.

        Raises:
            CorruptError: see :meth:`~weightsync.upload.Staging.take`. DeadlineError: likewise.
            Nothing is left there then.
        """
        self._held = True
        if memory.attempt == 0 or self._following != memory.attempt:
            self._wanted.set()  # what is being read is another version: that is over now
        try:
            if not self._using.acquire(timeout=max(deadline.remaining, 0.001)):
                raise DeadlineError("another version was still being read ahead")
            try:
                if self.staging.version != version or self.staging.attempt != memory.attempt:
                    self.staging.take(memory, version, deadline)
            finally:
                self._using.release()
        except BaseException:
            self._held = False
            raise
        finally:
            self._wanted.clear()

    def fits(self, manifest: Manifest) -> bool:
        """Whether versions of this manifest are read."""
        return manifest.fingerprint == self._fingerprint

    def release(self) -> None:
        """The version is not needed any more: others may be read in its place."""
        self._held = False

    def close(self) -> None:
        """Read no more. Returns when nothing is under way. Idempotent."""
        self._at_exit.cancel()
        self._closed.set()
        self._thread.join(_END)

    def _run(self) -> None:
        while not self._closed.wait(_LOOK):
            if self._held:
                continue
            try:
                self._look()
            except Exception as error:  # it is read again, and told of, when it is wanted
                log.debug("not read ahead: %s", one_line(error))
                self._closed.wait(0.5)

    def _look(self) -> None:
        arriving = self._subscriber.arriving()
        if arriving is None or arriving.manifest.fingerprint != self._fingerprint:
            return
        if arriving.attempt == self._done == self.staging.attempt:
            return
        with self._using:
            if self._held:
                return
            self._following = arriving.attempt
            try:
                if self.staging.follow(arriving, self._is_over):
                    self._done = arriving.attempt
            finally:
                self._following = 0

    def _is_over(self) -> bool:
        return self._wanted.is_set() or self._closed.is_set()
