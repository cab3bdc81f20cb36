"""Weights as a sequence of buckets that never leave the GPU: windows of the version's layout.

A bucket is assembled on the trainer's GPU by one kernel, digested there, and lands where it
belongs: nothing is unpacked, and how many tensors there are makes no difference to NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from weightsync.chunks import CHUNK
from weightsync.deadline import Deadline
from weightsync.device import Device, Mark, device_of
from weightsync.download import Blocks, Download, Flow, Packer, Plan, Run
from weightsync.errors import NoRoomError
from weightsync.intake import Intake
from weightsync.manifest import Manifest
from weightsync.schemes.nccl.buckets import Bucket, Part, Summary
from weightsync.schemes.nccl.digests import Digester
from weightsync.source import Inventory
from weightsync.tensors import Addresses

IN_FLIGHT = 4
"""Buckets under way at a time: the words for one take about as long as the bytes of two."""

LEAST = 64 << 20
"""Bytes of a bucket whose size nobody has said, unless the weights are less."""

_SHARE = 16
"""Of such weights, rather one part in so many, up to what the scheme says."""

_SMALL = 8
"""By how much buckets are smaller on a GPU that has little room left."""


def gpu_of(place: torch.device) -> Device | None:
    """The GPU that buckets stay on; None: the processor packs them."""
    return None if place.type == "cpu" else device_of(place)


class Windows:
    """A trainer's GPU as the place where versions are assembled. Keeps its buffers.

    Args:
        size: of a bucket at most, in bytes; a multiple of 1 MiB. They are smaller if the GPU has
            little room left, or weights do not fill one.
        exact: whether that was asked for. If not, buckets of small weights are smaller, so that
            their buffers take a quarter of the weights.
    """

    def __init__(self, device: Device, size: int, exact: bool = True) -> None:
        self._device, self._size, self._exact = device, size, exact
        self._digesting = device.lane()
        self._download: Download | None = None
        self._wanted = 0
        self._planned: tuple[Addresses, list[int], Plan] | None = None

    def size_for(self, nbytes: int) -> int:
        """Bytes of a bucket at most, for so many bytes of weights: receivers' buffers are as long.

        Buffers that larger weights had before are kept, and filled.
        """
        most = self._size if self._exact else max(LEAST, nbytes // _SHARE)
        held = 0 if self._download is None else self._download.window
        whole = -(-min(max(most, held), nbytes) // CHUNK) * CHUNK
        return max(CHUNK, min(self._size, whole))

    def _download_for(self, nbytes: int) -> Download:
        """
        Raises:
            NoRoomError: there is no room for the smallest buffers.
        """
        wanted = self.size_for(nbytes)
        if self._download is None or self._wanted < wanted:
            self._download = self._planned = None
            self._wanted = wanted  # if there is no room, it is not asked for each time
            try:
                self._download = Download(self._device, wanted, IN_FLIGHT, gentle=True)
            except NoRoomError:
                small = max(CHUNK, wanted // _SMALL // CHUNK * CHUNK)
                self._download = Download(self._device, small, IN_FLIGHT, gentle=True)
        return self._download

    def assemble(
        self,
        inventory: Inventory,
        send: Callable[[Bucket], None],
        let_go: Callable[[torch.Tensor], None],
        digest: bool,
        deadline: Deadline,
    ) -> Assembled:
        """Hand out one version, bucket by bucket.

        Args:
            send: takes a bucket.
            let_go: waits until no bucket under way is in a buffer any more.
            deadline: for the source.

        Raises:
            SourceError: a tensor is not what the manifest says, comes twice, or does not come.
            NoRoomError: the GPU has no room for the smallest buckets.
        """
        download = self._download_for(inventory.manifest.nbytes)
        download.await_trainer()
        digester = Digester(self._device, self._digesting)
        flow = _BucketFlow(download, send, let_go, digester if digest else None)
        try:
            numbers, plan = self._plan(download, inventory)
            resident = _tensors(inventory, numbers)
            for window in plan.windows:
                download.run(plan, window, resident, flow)
            intake = Intake(inventory, inventory.streamed(), deadline)
            packer = Packer(flow)
            specs = inventory.manifest.tensors
            for number, tensor in intake:
                packer.put(specs[number], tensor)
                del tensor  # before the next one is made
            packer.flush()
        finally:
            digester.wait()  # it reads the buffers
        return Assembled(inventory.manifest, flow.runs, flow.digester, intake)

    def _plan(self, download: Download, inventory: Inventory) -> tuple[list[int], Plan]:
        """Which tensors exist anyway, and how they get into windows."""
        if self._planned is None or self._planned[0] is not inventory.addresses:
            tensors = inventory.manifest.tensors
            numbers = [
                number
                for number, value in enumerate(inventory.values)
                if isinstance(value, torch.Tensor) and tensors[number].nbytes
            ]
            specs = [tensors[number] for number in numbers]
            blocks = Blocks.of(specs, [s.offset for s in specs], [s.nbytes for s in specs])
            plan = download.plan(blocks, _tensors(inventory, numbers))
            self._planned = inventory.addresses, numbers, plan
        return self._planned[1:]


class _BucketFlow(Flow):
    """Windows on their way into buckets.

    Attributes:
        runs: what was sent, in that order.
    """

    def __init__(
        self,
        download: Download,
        send: Callable[[Bucket], None],
        let_go: Callable[[torch.Tensor], None],
        digester: Digester | None,
    ) -> None:
        super().__init__(download)
        self._send, self._let_go, self.digester = send, let_go, digester
        self._digested: list[Mark | None] = [None] * len(download.buffers)
        self._count = 0
        self.runs: list[Run] = []

    def begin(self, which: int) -> torch.Tensor:
        buffer = self.download.buffers[which]
        self._let_go(buffer)
        lane, digested = self.turn(), self._digested[which]
        if digested is not None:
            lane.after(digested)
        return buffer

    def send(self, which: int, origin: int, runs: Sequence[Run]) -> None:
        filled = self.turn().mark()
        buffer = self.download.buffers[which]
        parts = [
            Part(buffer[begin - origin : end - origin], True, end - begin, [(begin, end - begin)])
            for begin, end in runs
        ]
        self.runs += runs
        self._send(Bucket(self._count, parts, digests_follow=self.digester is not None))
        if self.digester is not None:  # while it is under way
            for number, part in enumerate(parts):
                digested = self.digester.add(self._count, number, part.payload, part.pieces, filled)
                self._digested[which] = digested
        self._count += 1


class Assembled:
    """What was handed out.

    Attributes:
        seconds: that the source has taken.
    """

    def __init__(
        self, manifest: Manifest, runs: list[Run], digester: Digester | None, intake: Intake
    ) -> None:
        self._manifest, self._runs, self._digester = manifest, runs, digester
        self.seconds = intake.seconds

    def summary(self) -> Summary:
        digests = self._digester.found() if self._digester is not None else None
        return Summary(self._manifest.fingerprint, self._places(), digests)

    def _places(self) -> list[tuple[int, int, int]]:
        specs = self._manifest.tensors
        offsets = np.array([spec.offset for spec in specs], dtype=np.int64)
        ends = offsets + np.array([spec.nbytes for spec in specs], dtype=np.int64)
        begin, end = np.array(self._runs, dtype=np.int64).reshape(-1, 2).T
        chunks = -(-(end - begin) // CHUNK)
        low = np.searchsorted(ends, begin, side="right")
        count = np.searchsorted(offsets, end) - low
        run = np.repeat(np.arange(len(begin)), count)
        which = low[run] + np.arange(len(run)) - (np.cumsum(count) - count)[run]
        some = ends[which] > offsets[which]
        run, which = run[some], which[some]
        first, begin, end = (np.cumsum(chunks) - chunks)[run], begin[run], end[run]
        at = first + (np.maximum(offsets[which], begin) - begin) // CHUNK
        upto = first - (begin - np.minimum(ends[which], end)) // CHUNK
        return list(zip(which.tolist(), at.tolist(), upto.tolist(), strict=True))


def _tensors(inventory: Inventory, numbers: Sequence[int]) -> list[torch.Tensor]:
    return [v for v in map(inventory.values.__getitem__, numbers) if isinstance(v, torch.Tensor)]
