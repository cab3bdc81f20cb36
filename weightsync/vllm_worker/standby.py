"""A second copy of what a worker's plans need, in its device's memory: versions are read into it
while requests run, and while they are still being written."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import numpy as np

from weightsync.chunks import Geometry
from weightsync.deadline import Deadline
from weightsync.device import Device
from weightsync.errors import NoRoomError
from weightsync.readahead import ReadAhead
from weightsync.selection import Selection
from weightsync.transport import Snapshot, Subscriber
from weightsync.upload import Staging
from weightsync.version import Version
from weightsync.vllm_worker.copy_plan import CopyPlan
from weightsync.vllm_worker.loading import Loader
from weightsync.words import size


class Standby:
    def __init__(self) -> None:
        self._why = ""
        self._ahead: ReadAhead | None = None
        self._plans: list[CopyPlan | None] = []

    def prepare(
        self, loaders: Sequence[Loader], device: Device, reader: Subscriber, snapshot: Snapshot
    ) -> None:
        """Have memory for what the plans of these loaders, all for this manifest, need of it."""
        if not loaders:
            self._why = "no layer is planned"
            return
        if snapshot.memory() is None:
            self._why = "versions of this scheme are read from where they are"
            return
        plans = [loader.plan for loader in loaders]
        same = len(plans) == len(self._plans) and all(map(is_, plans, self._plans))
        if same and self._ahead is not None and self._ahead.fits(snapshot.manifest):
            return
        self.close()
        needed = [loader.needed() for loader in loaders]
        begin = np.concatenate([begin for begin, _ in needed])
        length = np.concatenate([length for _, length in needed])
        selection = Selection.of(begin, length, snapshot.manifest.nbytes)
        try:
            staging = Staging(device, Geometry(snapshot.manifest), selection)
        except NoRoomError as error:
            self._why = str(error)
            return
        self._why = "the memory for it was made only now; the next version is"
        self._plans = plans
        self._ahead = ReadAhead(reader, staging, snapshot.manifest.fingerprint)

    def take(self, snapshot: Snapshot, deadline: Deadline) -> None:
        """Have a leased version here, verified, until ``release``; if there is memory for it.

        Raises:
            CorruptError, DeadlineError: as :meth:`~weightsync.readahead.ReadAhead.take`.
        """
        ahead, memory = self._ahead, snapshot.memory()
        if ahead is not None and memory is not None and ahead.fits(snapshot.manifest):
            ahead.take(memory, snapshot.version, deadline)

    def holding(self, version: Version) -> Staging | None:
        """The memory, if that version is in it."""
        if self._ahead is not None and self._ahead.staging.version == version:
            return self._ahead.staging
        return None

    def note(self, version: Version) -> str:
        """Whether a version is here, and why not, for a report."""
        staging = self.holding(version)
        if staging is None:
            return f"not staged: {self._why}"
        return f"staged: {size(staging.buffer.nbytes)} kept ready"

    def release(self) -> None:
        """The version taken is not needed any more: the next may be read in its place."""
        if self._ahead is not None:
            self._ahead.release()

    def close(self) -> None:
        """Give the memory back."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.close()
