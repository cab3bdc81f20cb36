"""The transport contract: what a scheme implements to move bytes.

Control (is there a new version, did it work) and data (the bytes) are separate methods, because
in vLLM the driver process watches and acknowledges while every worker process opens the snapshot
itself. Nothing here knows of engines or trainers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from typing_extensions import Self

from weightsync.chunks import Digests
from weightsync.deadline import Deadline
from weightsync.device import Device
from weightsync.errors import CorruptError
from weightsync.manifest import Manifest
from weightsync.report import ReceiverReport
from weightsync.source import Inventory, WeightSource
from weightsync.tensors import Addresses, plain_address
from weightsync.version import Version

if TYPE_CHECKING:
    from weightsync.gpu_targets import GPUTargets


@dataclass(frozen=True)
class Published:
    """What one ``publish`` did.

    Attributes:
        nbytes: bytes of all tensors; tensors: how many.
        changed: see :class:`~weightsync.report.SyncReport`.
        extract: seconds spent in the source; transfer: seconds spent on the bytes.
        skipped: no buffer was free and the scheme does not wait: nothing was published.
        served: those that it was handed to, where the transport does that; None: whoever looks.
        failures: the receivers that were lost or late on the way; the others have the version.
            For transports that hand it to each receiver themselves.
        notes: what else people should know of it (why a fallback was used, say).
        scheme: which it went through, where a publisher has several.
        fell_back: it is another one than the first of them.
    """

    nbytes: int
    tensors: int
    changed: int | None
    extract: float
    transfer: float
    skipped: bool = False
    served: tuple[str, ...] | None = None
    failures: tuple[ReceiverReport, ...] = ()
    notes: tuple[str, ...] = ()
    scheme: str | None = None
    fell_back: bool = False


class Crew(ABC):
    """The other ranks of a sharded trainer, each of which writes the rows that it holds."""

    @abstractmethod
    def start(self, ticket: dict[str, Any]) -> None:
        """Have every other rank call its publisher's ``contribute`` with a JSON-able ticket."""

    @abstractmethod
    def finish(self, deadline: Deadline) -> list[dict[str, Any]]:
        """Wait for what they return.

        Raises:
            WeightSyncError: a rank failed; has its words. DeadlineError: one is late.
        """


class Publisher(ABC):
    """The trainer's end of a transport. One per run is alive at any time."""

    takes_rows: bool = False
    """Whether ``publish`` takes a crew, and ``contribute`` works."""

    @abstractmethod
    def open(self, deadline: Deadline, epoch: int | None = None) -> int:
        """Take ownership of the run and return this sender's epoch.

        Args:
            epoch: to be used instead of one drawn here, for a sender that publishes through
                several transports; may also be raised by opening again what is open.

        Raises:
            SenderBusyError: another live sender owns it. VersionError: the run has seen a sender
                of this epoch, or of a later one.
        """

    @abstractmethod
    def prepare(self, manifest: Manifest, deadline: Deadline) -> None:
        """Make room for weights of this layout, ahead of the first ``publish`` of them.

        Raises:
            NoRoomError: there is too little room; nothing was written.
        """

    @abstractmethod
    def publish(
        self,
        version: Version,
        weights: WeightSource,
        deadline: Deadline,
        receivers: Sequence[str] | None = None,
        crew: Crew | None = None,
    ) -> Published:
        """Make a version visible, whole, or leave everything as it was.

        Args:
            receivers: the ids of those the version is meant for; None for everybody.
            crew: the ranks that write rows too. None: everything comes from ``weights``.

        Raises:
            SourceError: a tensor cannot be sent. DeadlineError: no buffer got free in time.
            VersionError: not newer than the last, or the same number with other weights.
            ReceiverError: a transport that hands versions out itself reached nobody; its
            DeadlineError may also mean that nobody came.
        """

    def contribute(
        self, ticket: dict[str, Any], inventory: Inventory, deadline: Deadline
    ) -> dict[str, Any]:
        """Write this rank's rows into the version that another rank is publishing.

        Needs no ``open``.

        Returns:
            JSON-able, for the rank that publishes.
        """
        raise NotImplementedError(f"{type(self).__name__} takes no rows")

    @abstractmethod
    def receivers(self) -> list[ReceiverReport]:
        """What every known receiver last said of itself; dead ones say ``dead``."""

    @abstractmethod
    def wait_applied(
        self, version: Version, deadline: Deadline, receivers: Sequence[str] | None = None
    ) -> list[ReceiverReport]:
        """Wait until every live receiver answered for ``version``, or died, or is late.

        It is the last that was published, or an earlier one, for which a receiver has answered
        that holds a newer one.

        Never raises for a receiver's sake: the state of each report says what became of it.
        """

    def conclude(
        self, version: Version, deadline: Deadline, answered: Collection[str] = ()
    ) -> list[ReceiverReport]:
        """End an update, the last one published: the trainer may change its weights after this.

        For transports that keep no copy: they wait here until nobody reads any more, and take
        the version back from whoever is late. Others have nothing to wait for.

        Args:
            answered: ids of the receivers that the caller has heard already.

        Returns:
            What the receivers said that were waited for; late ones are ``waiting``.

        Raises:
            DeadlineError: somebody who is no receiver still reads. The version is taken back.
        """
        return []

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Idempotent."""


class Targets:
    """Tensors to write a version into. Worth keeping for as long as they stay where they are.

    Args:
        manifest: of the version.
        tensors: by name or alias, each of the shape that the manifest says. Where dtypes differ
            values are cast; devices are crossed.

    Attributes:
        addresses: int64, for each tensor of the manifest where to put its bytes as they are; 0
            where there is no such place.
        others: those of ``tensors`` that have none.
        on_gpus: those of ``others`` whose bytes can be written as they are, on GPUs.
        rest: the others that are not on_gpus.
    """

    def __init__(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
        self.manifest = manifest
        self.tensors = dict(tensors)
        self.others: dict[str, torch.Tensor] = {}
        at = {spec.name: number for number, spec in enumerate(manifest.tensors)}
        self.addresses: Addresses = np.zeros(len(at), dtype=np.int64)
        for name, tensor in tensors.items():
            spec = manifest.spec(name)
            address = plain_address(tensor, spec.dtype)
            if address and not self.addresses[at[spec.name]]:
                self.addresses[at[spec.name]] = address
            else:  # cast, strided, on another device, or one more copy of a tied tensor
                self.others[name] = tensor

    @cached_property
    def on_gpus(self) -> GPUTargets:
        from weightsync.gpu_targets import GPUTargets  # it builds on this module

        return GPUTargets(self.manifest, self.others)

    @property
    def rest(self) -> dict[str, torch.Tensor]:
        done = self.on_gpus.names
        return {name: tensor for name, tensor in self.others.items() if name not in done}


class Memory(ABC):
    """The bytes of a version where a transport holds them: one piece of host memory.

    Attributes:
        address: where the manifest's layout begins; ``nbytes`` bytes lie there.
        digests: what those of the 1 MiB chunks are to be; None: there is nothing to compare with.
        attempt: of the write that the bytes come from; see :class:`Arriving`. 0: not known.
    """

    address: int
    nbytes: int
    digests: Digests | None = None
    attempt: int = 0

    @abstractmethod
    def page_lock(self, device: Device) -> bool:
        """Have copies to the device run at the speed of the bus. Done once for a mapping, which
        may take seconds. False: it cannot be done, and they are slower."""

    @abstractmethod
    def wrong(self, chunks: Sequence[int]) -> CorruptError:
        """The error that says of chunks that they differ from their digests."""


class Arriving(ABC):
    """A version that is being written, and may never be announced.

    Its bytes may be read ahead. They are of use only if the snapshot leased later has memory of
    the same ``attempt``.

    Attributes:
        attempt: not 0, and another one for each time that a sender begins to write.
    """

    version: Version
    manifest: Manifest
    attempt: int
    memory: Memory

    @abstractmethod
    def written(self) -> int | None:
        """How many bytes, from the start of the layout, are as they will stay. None: given up."""


class Snapshot(ABC):
    """A lease on one whole, immutable version. While it is open nobody overwrites it.

    A context manager. Iterating yields ``(name, tensor)`` in stream order, without aliases. The
    tensors are read-only views that are valid while the snapshot is open.
    """

    version: Version
    manifest: Manifest

    @abstractmethod
    def tensor(self, name: str) -> torch.Tensor:
        """The tensor under a name or an alias, as it was sent. Not verified by itself."""

    @abstractmethod
    def verify(self, names: Sequence[str] | None = None) -> None:
        """Compare the bytes with their digests.

        Raises:
            CorruptError: they differ; names the tensors concerned.
        """

    def memory(self) -> Memory | None:
        """All its bytes, for those who move them themselves; None: it has tensors only.

        Valid while the snapshot is open.
        """
        return None

    def addresses(self, place: torch.device) -> Addresses | None:
        """int64: where each tensor of the manifest lies on a device, if they lie there already.

        The same array as long as they lie at the same places. None: they are elsewhere.
        """
        return None

    @abstractmethod
    def copy_into(self, targets: Targets) -> None:
        """Write tensors into the given ones, in place, verified on the way.

        Raises:
            CorruptError: some bytes are wrong; targets may then be half written.
        """

    def settle(self) -> None:
        """Called after the last read: only then it is sure that all reads were of this version.

        Raises:
            VersionGoneError: the bytes may have changed meanwhile. What was read is worthless.
        """

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for spec in self.manifest.tensors:
            yield spec.name, self.tensor(spec.name)

    @abstractmethod
    def close(self) -> None:
        """End the lease. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Subscriber(ABC):
    """The inference end of a transport. Any number may be open at any time."""

    def delegate(self, workers: int) -> None:
        """Say, before ``open``, that other processes read the snapshots for this receiver.

        Each of them has a reader (:meth:`WeightSyncScheme.create_reader`). This end then watches
        and acknowledges; its own snapshots need to know the manifest only.
        """

    @abstractmethod
    def open(self, deadline: Deadline) -> None:
        """Wait until there is a live sender, and make this receiver known to it if it has an id.

        Raises:
            DeadlineError: there is no sender.
        """

    @abstractmethod
    def wait(self, after: Version | None, deadline: Deadline) -> Version | None:
        """The newest version, once it is newer than ``after`` and meant for this receiver.

        Returns None at the deadline. Looks once if the deadline is already over.
        """

    @abstractmethod
    def snapshot(self, version: Version, deadline: Deadline) -> Snapshot:
        """Lease a version.

        Raises:
            VersionGoneError: it is no longer held, or was never announced here.
            DeadlineError: its lease was not to be had.
        """

    def arriving(self) -> Arriving | None:
        """A version that is being written right now, if this end can read it ahead.

        Asked often, so it costs next to nothing.
        """
        return None

    @abstractmethod
    def acknowledge(self, report: ReceiverReport) -> None:
        """Tell the sender where this receiver stands. Needs an id; is said anew to a new sender."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back, the record of this receiver included. Idempotent."""
