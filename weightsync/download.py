"""Tensors on a GPU, on their way out of it: into a slot of host memory, or to other GPUs.

A window is a piece of the slot, aligned to its own size, that is assembled in a buffer on the GPU
and digested there. What it holds leaves in one long copy, while the next window is assembled: how
many tensors there are makes no difference to the bus. Works on the processor as a device too, which
is how it is tested without a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from weightsync.chunks import CHUNK, SlotWriter
from weightsync.device import Device, Lane, Mark, Moves, device_of, settle
from weightsync.errors import NoRoomError
from weightsync.intake import copy_tensor
from weightsync.manifest import ALIGNMENT, ParamSpec
from weightsync.tensors import Addresses

WINDOW = 64 * CHUNK
"""Bytes of the slot that cross the bus in one copy, at most."""

_SMALL = 8
"""By how much windows are smaller on a GPU that has little room left."""

_BUFFERS = 3

Run = tuple[int, int]
"""Where bytes of the slot that are neighbours begin and end."""

Landed = Callable[[int, int], None]
"""Is told of bytes of the slot, where they begin and end, once they are there."""


@dataclass(frozen=True)
class Blocks:
    """Where in the slot tensors belong, or parts of tensors: in ascending order, none empty.

    Attributes:
        specs: of the tensor that each is, or is a part of.
        begin, end: of each in the slot.
        reach: where something else than padding may follow behind it.
    """

    specs: Sequence[ParamSpec]
    begin: Addresses
    end: Addresses
    reach: Addresses

    @classmethod
    def of(cls, specs: Sequence[ParamSpec], begin: Sequence[int], nbytes: Sequence[int]) -> Blocks:
        starts = np.array(begin, dtype=np.int64)
        ends = starts + np.array(nbytes, dtype=np.int64)
        last = np.array([spec.offset + spec.nbytes for spec in specs], dtype=np.int64)
        padded = -(-ends // ALIGNMENT) * ALIGNMENT
        return cls(specs, starts, ends, np.where(ends == last, padded, ends))


@dataclass(frozen=True)
class Window:
    """What fills one window.

    Attributes:
        origin: where in the slot it begins; which: the buffer that it is assembled in.
        runs: what of it goes to the slot.
        padded: whether there is padding in them.
        moves: of what is sent as it is.
        conversions: of the rest: which block, from which of its elements to which, and where in
            the buffer.
    """

    origin: int
    which: int
    runs: list[Run]
    padded: bool
    moves: Moves | None
    conversions: list[tuple[int, int, int, int]]


@dataclass(frozen=True)
class Plan:
    """How tensors get into the slot, for as long as they stay where they are. Keeps none alive."""

    blocks: Blocks
    windows: list[Window]


class Download:
    """The way of one device's tensors into slots. Keeps its buffers for the next time.

    Args:
        window: bytes of each buffer.
        gentle: whether something else that is in a hurry runs on the device meanwhile.

    Raises:
        NoRoomError: the device has none for them.
    """

    def __init__(
        self, device: Device, window: int, buffers: int = _BUFFERS, gentle: bool = False
    ) -> None:
        self.device, self.window, self._gentle = device, window, gentle
        self.buffers = [device.empty(window) for _ in range(buffers)]
        self.lane = device.lane()

    def await_trainer(self) -> None:
        """Until what streams of the trainer's are still computing on the device is done."""
        if self.device.place.type == "cuda":
            torch.cuda.synchronize(self.device.place)

    @contextmanager
    def flow(self, slot: int, writer: SlotWriter, landed: Landed) -> Iterator[SlotFlow]:
        """Nothing is under way any more when this is left, however that is.

        Args:
            slot: its address.
            writer: is told the digests of the chunks that come as a whole.
        """
        self.await_trainer()
        flow = SlotFlow(self, slot, writer, landed)
        try:
            yield flow
            flow.finish()
        finally:
            settle(self.lane, flow.current)

    def plan(self, blocks: Blocks, tensors: Sequence[torch.Tensor]) -> Plan:
        """
        Args:
            tensors: of this device, one for each block.
        """
        addresses = [
            plain_on(self.device.place, tensor, spec.dtype)
            for spec, tensor in zip(blocks.specs, tensors, strict=True)
        ]
        source = np.array(addresses, dtype=np.int64)
        windows: list[Window] = []
        origins = np.unique(np.concatenate([blocks.begin, blocks.end - 1]) // self.window)
        last = int(origins[-1]) if len(origins) else -1
        for number in range(int(origins[0]) if len(origins) else 0, last + 1):
            origin = number * self.window
            inside = slice(
                int(np.searchsorted(blocks.end, origin, side="right")),
                int(np.searchsorted(blocks.begin, origin + self.window)),
            )
            if inside.start < inside.stop:
                which = len(windows) % len(self.buffers)
                gentle = self._gentle and bool(windows)  # nothing runs yet beside the first
                windows.append(self._window(blocks, source, inside, origin, which, gentle))
        return Plan(blocks, windows)

    def _window(
        self,
        blocks: Blocks,
        source: Addresses,
        inside: slice,
        origin: int,
        which: int,
        gentle: bool,
    ) -> Window:
        begin, end, addresses = blocks.begin[inside], blocks.end[inside], source[inside]
        low, high = np.maximum(begin, origin), np.minimum(end, origin + self.window)
        reach = np.where(high == end, blocks.reach[inside], high)
        cut = low[1:] > reach[:-1]
        first = np.flatnonzero(np.concatenate([[True], cut]))
        last = np.flatnonzero(np.concatenate([cut, [True]]))
        runs = list(zip(low[first].tolist(), high[last].tolist(), strict=True))
        padded = bool(((low[1:] > high[:-1]) & ~cut).any())
        plain = addresses != 0
        moves = None
        if plain.any():
            into = low + (self.buffers[which].data_ptr() - origin)
            out_of = addresses + low - begin
            table = into[plain], out_of[plain], (high - low)[plain]
            moves = self.device.moves(*table, gentle)
        conversions = []
        for index in np.flatnonzero(~plain).tolist():
            block = inside.start + index
            size = blocks.specs[block].dtype.itemsize
            elements = [int(at[index] - begin[index]) // size for at in (low, high)]
            conversions.append((block, *elements, int(low[index]) - origin))
        return Window(origin, which, runs, padded, moves, conversions)

    def run(self, plan: Plan, window: Window, tensors: Sequence[torch.Tensor], flow: Flow) -> None:
        """Queue one window of a plan; its windows in the order in which they are there.

        Args:
            tensors: as for the plan, or others of which the same holds.
        """
        buffer = flow.begin(window.which)
        if window.padded:
            buffer.zero_()  # padding is the same in every version
        if window.moves is not None:
            window.moves.run(flow.current)
        for block, first, last, at in window.conversions:
            convert(buffer, at, plan.blocks.specs[block], tensors[block], first, last)
        flow.send(window.which, window.origin, window.runs)


class Downloads:
    """Those of all devices that tensors come from.

    Attributes:
        window: the most bytes that a window of theirs may have.
    """

    def __init__(self, window: int = WINDOW) -> None:
        self.window = window
        self._known: dict[torch.device, Download] = {}
        self._noted: dict[str, bool] = {}

    def of(self, place: torch.device, nbytes: int) -> Download | None:
        """None: it is the processor, a device that only torch can use, or one without any room.

        Args:
            nbytes: of the slot.
        """
        device = None if place.type in ("cpu", "meta") else device_of(place)
        if device is None:
            return None
        needed = max(CHUNK, min(self.window, -(-nbytes // CHUNK) * CHUNK))
        small = max(CHUNK, min(needed, self.window // _SMALL))
        known = self._known.get(place)
        if known is not None and known.window >= small:
            return known
        self._known.pop(place, None)
        for window in (needed, small):
            try:
                self._known[place] = Download(device, window)
                return self._known[place]
            except NoRoomError as error:
                why = f"{error}: its tensors are copied one by one"
        self.note(why)
        return None

    def note(self, words: str) -> None:
        """Remember what people should know, each thing once."""
        self._noted.setdefault(words, False)

    def notes(self) -> tuple[str, ...]:
        """What was noted since this was asked last."""
        new = tuple(words for words, told in self._noted.items() if not told)
        self._noted.update(dict.fromkeys(new, True))
        return new

    def clear(self) -> None:
        """Give the devices' memory back."""
        self._known.clear()


class Flow(ABC):
    """Windows on their way: each is filled on torch's lane, and handed on.

    Attributes:
        current: torch's lane, as it was when something was last queued on it. When torch has
            turned to another one since, what is queued there begins after all of it.
    """

    def __init__(self, download: Download) -> None:
        self.download = download
        self.current = download.device.current()

    def turn(self) -> Lane:
        """Torch's lane now."""
        lane = self.download.device.current()
        if lane != self.current:
            lane.after(self.current.mark())
            self.current = lane
        return lane

    @abstractmethod
    def begin(self, which: int) -> torch.Tensor:
        """A buffer, to be filled on torch's lane."""

    @abstractmethod
    def send(self, which: int, origin: int, runs: Sequence[Run]) -> None:
        """Have runs of the window that is in a buffer leave."""


class SlotFlow(Flow):
    """Into a slot of host memory: windows are digested on torch's lane, and sent on another."""

    def __init__(self, download: Download, slot: int, writer: SlotWriter, landed: Landed) -> None:
        super().__init__(download)
        self._slot, self._writer, self._tell = slot, writer, landed
        self._free: list[Mark | None] = [None] * len(download.buffers)
        self._under_way: deque[tuple[Mark, list[Run]]] = deque()
        self._digests = torch.zeros(writer.chunks, dtype=torch.int64, device=download.device.place)
        self._chunks: list[range] = []

    def begin(self, which: int) -> torch.Tensor:
        lane, free = self.turn(), self._free[which]
        if free is not None:
            lane.after(free)
        return self.download.buffers[which]

    def send(self, which: int, origin: int, runs: Sequence[Run]) -> None:
        current, lane, device = self.turn(), self.download.lane, self.download.device
        address = self.download.buffers[which].data_ptr() - origin
        lane.after(current.mark())
        for begin, end in runs:
            lane.copy(self._slot + begin, address + begin, end - begin)
        mark = lane.mark()
        self._free[which] = mark
        self._under_way.append((mark, list(runs)))
        # While they are under way. The buffer is filled again on the same lane, so not before.
        for begin, end in runs:
            whole = range(-(-begin // CHUNK), end // CHUNK)
            if len(whole):
                into = self._digests[whole.start : whole.stop]
                device.digests(current, address + whole.start * CHUNK, len(whole), into)
                self._chunks.append(whole)
        while self._under_way and self._under_way[0][0].done():
            self._landed()

    def finish(self) -> None:
        """Wait until everything is in the slot, and hand over the digests."""
        while self._under_way:
            self._under_way[0][0].wait()
            self._landed()
        self.turn()
        found = self._digests.cpu().numpy().view(np.uint64)
        numbers = np.array([n for chunks in self._chunks for n in chunks], dtype=np.int64)
        self._writer.adopt(numbers, found[numbers])

    def _landed(self) -> None:
        for begin, end in self._under_way.popleft()[1]:
            self._tell(begin, end)


class Packer:
    """Puts tensors that come one by one, in the order of the slot mostly, into windows.

    A tensor is read on torch's lane: whatever is queued there later, by its source, finds it read.
    """

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._window = flow.download.window
        self._origin, self._which = -1, -1
        self._runs: list[Run] = []

    def put(self, spec: ParamSpec, tensor: torch.Tensor) -> None:
        """Take a tensor of the device, which may be overwritten or let go after this."""
        device = self._flow.download.device
        address = plain_on(device.place, tensor, spec.dtype)
        done = 0
        while done < spec.nbytes:
            at = spec.offset + done
            if not 0 <= at - self._origin < self._window or self._origin < 0:
                self._start(at // self._window * self._window)
            count = min(spec.nbytes - done, self._origin + self._window - at)
            self._extend(at, at + count)
            buffer = self._flow.download.buffers[self._which]
            if address:
                into = buffer.data_ptr() + at - self._origin
                self._flow.turn().copy(into, address + done, count)
            else:
                self._flow.turn()
                elements = done // spec.dtype.itemsize, (done + count) // spec.dtype.itemsize
                convert(buffer, at - self._origin, spec, tensor, *elements)
            done += count
        if tensor.is_cuda:  # it may be of another stream, on which its memory is used again
            tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def _start(self, origin: int) -> None:
        self.flush()
        self._origin = origin
        self._which = (self._which + 1) % len(self._flow.download.buffers)
        self._flow.begin(self._which)

    def _extend(self, begin: int, end: int) -> None:
        former, last = self._runs[-1] if self._runs else (0, -ALIGNMENT)
        if not 0 <= begin - last < ALIGNMENT:  # else there is nothing but padding between
            self._runs.append((begin, end))
            return
        if begin > last:
            self._flow.turn()
            buffer = self._flow.download.buffers[self._which]
            buffer[last - self._origin : begin - self._origin].zero_()
        self._runs[-1] = former, end

    def flush(self) -> None:
        """Send what is there."""
        if self._runs:
            self._flow.send(self._which, self._origin, self._runs)
        self._runs, self._origin = [], -1


def plain_on(place: torch.device, tensor: torch.Tensor, dtype: torch.dtype) -> int:
    """Where a tensor's bytes lie on a device if they are its values in that dtype; otherwise 0."""
    plain = (
        tensor.device == place
        and tensor.dtype == dtype
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.is_conj()
        and tensor.numel() > 0
    )
    return tensor.data_ptr() if plain else 0


def convert(
    buffer: torch.Tensor, at: int, spec: ParamSpec, tensor: torch.Tensor, first: int, last: int
) -> None:
    """Write some elements of a tensor into a buffer, as they are sent, without a copy of them all.

    Args:
        at: where in the buffer, in bytes.
    """
    into = buffer[at : at + (last - first) * spec.dtype.itemsize].view(spec.dtype)
    _copy_elements(into, tensor.detach(), first, last, spec.name)


def _copy_elements(
    into: torch.Tensor, tensor: torch.Tensor, first: int, last: int, name: str
) -> None:
    """Copy the elements from ``first`` to ``last``, in the order of rows, to a flat tensor."""
    if first == last:
        return
    if tensor.is_contiguous():
        copy_tensor(into, tensor.view(-1)[first:last], name)
        return
    if tensor.dim() == 1:
        copy_tensor(into, tensor[first:last], name)
        return
    row = tensor[0].numel()
    low, high = -(-first // row), last // row
    if low > high:  # all of them are in one row
        _copy_elements(into, tensor[high], first - high * row, last - high * row, name)
        return
    head, tail = low * row - first, last - high * row
    if head:
        _copy_elements(into[:head], tensor[low - 1], row - head, row, name)
    if low < high:
        whole = into[head : len(into) - tail].view(high - low, *tensor.shape[1:])
        copy_tensor(whole, tensor[low:high], name)
    if tail:
        _copy_elements(into[len(into) - tail :], tensor[high], 0, tail, name)
