"""Tensors on a GPU, on their way into a slot of host memory.

Windows of the slot are assembled on the GPU and digested there, and each goes over the bus in one
long copy, while the next ones are assembled. How many tensors there are makes no difference to the
bus. Works on the processor as a device too, which is how it is tested without a GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from weightsync.chunks import CHUNK, Geometry, SlotWriter
from weightsync.device import Device, Lane, Mark, Moves, device_of
from weightsync.intake import copy_tensor
from weightsync.manifest import ALIGNMENT, Manifest, ParamSpec
from weightsync.source import Inventory
from weightsync.tensors import Addresses

WINDOW = 64 * CHUNK
"""Bytes of the slot that cross the bus in one copy, at most."""

_BUFFERS = 3


def plain_on(device: torch.device, tensor: torch.Tensor, dtype: torch.dtype) -> int:
    """Where a tensor's bytes lie on a device if they are its values in that dtype; otherwise 0."""
    plain = (
        tensor.device == device
        and tensor.dtype == dtype
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.is_conj()
        and tensor.numel() > 0
    )
    return tensor.data_ptr() if plain else 0


@dataclass(frozen=True)
class _Part:
    """A piece of the slot that one window brings: ``begin`` to ``end``.

    Attributes:
        moves: of what is sent as it is into the window's buffer.
        conversions: of the rest: which tensor, from which of its elements to which, and where in
            the buffer.
    """

    begin: int
    end: int
    moves: Moves | None
    conversions: list[tuple[int, int, int, int]]


class Download:
    """The way of one device's tensors into slots. Keeps its buffers for the next time.

    Args:
        nbytes: of the largest slot.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self.device, self.nbytes = device, nbytes
        room = min(WINDOW, (nbytes // CHUNK + 2) * CHUNK)
        self._buffers = [device.empty(room) for _ in range(_BUFFERS)]
        self._lane = device.lane()
        self._known: tuple[Addresses, Geometry, list[_Part]] | None = None

    @contextmanager
    def flow(
        self, geometry: Geometry, slot: int, writer: SlotWriter, wrote: Callable[[int], None]
    ) -> Iterator[Flow]:
        """Nothing is under way any more when it is left, however that is.

        Args:
            slot: its address.
            writer: is told the digests.
            wrote: told how far, in bytes of the slot, what was sent has arrived.
        """
        flow = Flow(self.device, self._lane, self._buffers, geometry, slot, writer, wrote)
        try:
            yield flow
            flow.finish()
        finally:
            self._lane.wait()
            flow.current.wait()

    def write(
        self, inventory: Inventory, geometry: Geometry, flow: Flow, numbers: Sequence[int]
    ) -> None:
        """Write tensors of this device that exist anyway, by their indices in the manifest."""
        known = self._known
        # The very same array, if nothing of what it was found out about has changed.
        if known is None or known[0] is not inventory.addresses or known[1] is not geometry:
            known = inventory.addresses, geometry, self._parts(inventory, geometry, numbers)
            self._known = known
        specs = inventory.manifest.tensors
        for part in known[2]:
            buffer = flow.begin(part.begin, part.end)
            if part.moves is not None:
                part.moves.run(flow.current)
            for number, first, last, at in part.conversions:
                spec, tensor = specs[number], inventory.values[number]
                assert isinstance(tensor, torch.Tensor)
                place = buffer[at : at + (last - first) * spec.dtype.itemsize].view(spec.dtype)
                copy_tensor(place, tensor.detach().reshape(-1)[first:last], spec.name)
            flow.send(part.begin, part.end)

    def _parts(
        self, inventory: Inventory, geometry: Geometry, numbers: Sequence[int]
    ) -> list[_Part]:
        """Windows over every run of neighbours, and what fills each."""
        addresses = np.zeros(len(geometry.sizes), dtype=np.int64)
        for number in numbers:
            tensor, spec = inventory.values[number], inventory.manifest.tensors[number]
            assert isinstance(tensor, torch.Tensor)
            addresses[number] = plain_on(self.device.place, tensor, spec.dtype)
        mine = np.zeros(len(addresses), dtype=bool)
        mine[list(numbers)] = True
        # A run ends where a tensor with bytes comes that is not on this device.
        others = np.cumsum(geometry.nonempty & ~mine)
        there = np.flatnonzero(mine)
        cuts = (np.flatnonzero(np.diff(others[there])) + 1).tolist()
        parts: list[_Part] = []
        for run in np.split(there, cuts):
            parts += self._windows(inventory.manifest, geometry, run, addresses, len(parts))
        return parts

    def _windows(
        self, manifest: Manifest, geometry: Geometry, run: Addresses, addresses: Addresses, n: int
    ) -> list[_Part]:
        offsets, ends = geometry.offsets[run], geometry.offsets[run] + geometry.sizes[run]
        begin, end = int(offsets[0]), int(ends[-1])
        parts: list[_Part] = []
        while begin < end:
            upto = min(end, (begin // WINDOW + 1) * WINDOW)
            inside = np.flatnonzero((ends > begin) & (offsets < upto))
            low = np.maximum(offsets[inside], begin)
            high = np.minimum(ends[inside], upto)
            buffer = self._buffers[(n + len(parts)) % _BUFFERS].data_ptr()
            source = addresses[run[inside]]
            plain = source != 0
            into = buffer + low - origin(begin)
            out_of = source + low - offsets[inside]
            length = high - low
            moves = None
            if plain.any():
                moves = self.device.moves(into[plain], out_of[plain], length[plain])
            conversions = []
            for index in np.flatnonzero(~plain).tolist():
                number = int(run[inside[index]])
                size = manifest.tensors[number].dtype.itemsize
                first = int(low[index] - offsets[inside[index]]) // size
                last = int(high[index] - offsets[inside[index]]) // size
                at = int(low[index]) - origin(begin)
                conversions.append((number, first, last, at))
            parts.append(_Part(begin, upto, moves, conversions))
            begin = upto
        return parts


class Downloads:
    """Those of all devices that tensors come from."""

    def __init__(self) -> None:
        self._known: dict[torch.device, Download | None] = {}

    def of(self, place: torch.device, nbytes: int) -> Download | None:
        """None: it is the processor, or a device that only torch can use.

        Raises:
            NoRoomError: the device has no room for the windows.
        """
        known = self._known.get(place)
        if place not in self._known or (known is not None and known.nbytes < nbytes):
            device = None if place.type == "cpu" else device_of(place)
            self._known[place] = None
            self._known[place] = None if device is None else Download(device, nbytes)
        return self._known[place]

    def clear(self) -> None:
        self._known.clear()


def origin(begin: int) -> int:
    """What of the slot lies at the beginning of the buffer of a window that begins there."""
    return begin // CHUNK * CHUNK


class Flow:
    """Windows, one after the other: filled on torch's lane, digested there, sent on another.

    What is put into a buffer on torch's lane is read before its source, on the same lane, writes
    something else there.
    """

    def __init__(
        self,
        device: Device,
        lane: Lane,
        buffers: Sequence[torch.Tensor],
        geometry: Geometry,
        slot: int,
        writer: SlotWriter,
        wrote: Callable[[int], None],
    ) -> None:
        self.device, self.current = device, device.current()
        self._lane, self._buffers = lane, buffers
        self._geometry, self._slot = geometry, slot
        self._writer, self._wrote = writer, wrote
        self._free: list[Mark | None] = [None] * len(buffers)
        self._number = 0
        self._landed: deque[tuple[Mark, int]] = deque()
        self._digests = torch.zeros(geometry.chunks, dtype=torch.int64, device=device.place)
        self._chunks: list[range] = []

    def begin(self, begin: int, end: int) -> torch.Tensor:
        """The buffer of the window that goes to ``begin`` to ``end`` of the slot.

        What :func:`origin` says comes first in it. To be filled on torch's lane.
        """
        number = self._number % len(self._buffers)
        free = self._free[number]
        if free is not None:
            self.current.after(free)
        buffer = self._buffers[number]
        payload = self._geometry.payload[begin // CHUNK : -(-end // CHUNK)]
        if (payload < CHUNK).any():
            buffer.zero_()  # padding is the same in every version
        return buffer

    def send(self, begin: int, end: int) -> None:
        """Have the bytes of the window begun last go to the slot."""
        number = self._number % len(self._buffers)
        address = self._buffers[number].data_ptr() - origin(begin)
        whole = range(-(-begin // CHUNK), end // CHUNK)
        if len(whole):
            into = self._digests[whole.start : whole.stop]
            at = address + whole.start * CHUNK
            self.device.digests(self.current, at, len(whole), into)
            self._chunks.append(whole)
        self._lane.after(self.current.mark())
        self._lane.copy(self._slot + begin, address + begin, end - begin)
        self._free[number] = self._lane.mark()
        self._landed.append((self._lane.mark(), end))
        self._number += 1
        while self._landed and self._landed[0][0].done():
            self._wrote(self._landed.popleft()[1])

    def finish(self) -> None:
        """Wait until everything is in the slot, and hand over the digests."""
        while self._landed:
            mark, end = self._landed.popleft()
            mark.wait()
            self._wrote(end)
        found = self._digests.cpu().numpy().view(np.uint64)
        for chunks in self._chunks:
            numbers = np.arange(chunks.start, chunks.stop)
            self._writer.adopt(numbers, found[numbers])


class Packer:
    """Puts tensors that come one by one, in the order of the slot mostly, into windows."""

    def __init__(self, flow: Flow, geometry: Geometry) -> None:
        self._flow, self._geometry = flow, geometry
        self._begin = self._end = self._limit = -1
        self._buffer: torch.Tensor | None = None

    def put(self, number: int, spec: ParamSpec, tensor: torch.Tensor) -> None:
        """Take a tensor of the device, which may be overwritten on torch's lane afterwards."""
        address = plain_on(self._flow.device.place, tensor, spec.dtype)
        if address == 0:
            whole = torch.empty(spec.shape, dtype=spec.dtype, device=self._flow.device.place)
            copy_tensor(whole, tensor, spec.name)
            tensor, address = whole, whole.data_ptr()
        offset, done = spec.offset, 0
        # A gap of this size is padding; in a longer one lies another tensor.
        if self._begin < 0 or not 0 <= offset - self._end < ALIGNMENT:
            self._start(offset)
        while done < spec.nbytes:
            at = offset + done
            if at >= self._limit:
                self._start(at)
            count = min(spec.nbytes - done, self._limit - at)
            assert self._buffer is not None
            into = self._buffer.data_ptr() + at - origin(self._begin)
            self._flow.current.copy(into, address + done, count)
            done += count
            self._end = at + count

    def _start(self, begin: int) -> None:
        self.flush()
        self._begin = self._end = begin
        self._limit = (begin // WINDOW + 1) * WINDOW
        self._buffer = self._flow.begin(begin, min(self._limit, self._geometry.nbytes))

    def flush(self) -> None:
        """Send what is there."""
        if self._end > self._begin >= 0:
            self._flow.send(self._begin, self._end)
        self._begin = -1
