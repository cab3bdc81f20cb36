"""Weights as a sequence of buckets: some bytes, where they belong, and their digests.

What is here packs them on the CPU; ``windows`` does so on a GPU.

A bucket is a few MiB, in parts. A part is small tensors packed one after the other, or a large one
(or a piece of it) in its own memory. It says where its bytes lie in the version as the manifest
lays it out, so the two sides need not agree on an order, and a tensor may be larger than a bucket.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash

from weightsync.chunks import CHUNK, Addresses, Copier, Digests, Rows, move
from weightsync.deadline import Deadline
from weightsync.errors import CorruptError, ProtocolError
from weightsync.intake import Intake, copy_tensor
from weightsync.manifest import Manifest, ParamSpec
from weightsync.source import Inventory
from weightsync.tensors import plain_address

Pieces = list[tuple[int, int]]
"""``(offset in the version, length)`` in bytes, in the order in which they lie in the bucket."""


DIRECT = CHUNK
"""Bytes. From this size on a tensor travels out of its own memory, without being packed."""


@dataclass
class Part:
    """
    Attributes:
        buffer: uint8; its first ``nbytes`` are the part's.
        packed: whether it is one of the packer's buffers, not a trainer's tensor.
        digests: XXH3 of each MiB of them; none if digests are off, or follow at the end.
    """

    buffer: torch.Tensor
    packed: bool
    nbytes: int = 0
    pieces: Pieces = field(default_factory=list)
    digests: list[int] = field(default_factory=list)

    @property
    def payload(self) -> torch.Tensor:
        return self.buffer[: self.nbytes]


@dataclass
class Bucket:
    """Numbers count in the order in which buckets leave.

    Attributes:
        digests_follow: the digests come when all buckets have.
    """

    number: int
    parts: list[Part]
    digests_follow: bool = False

    def message(self) -> dict[str, Any]:
        return {
            "op": "bucket",
            "number": self.number,
            "digests_follow": self.digests_follow,
            "parts": [
                {"nbytes": part.nbytes, "pieces": part.pieces, "digests": part.digests}
                for part in self.parts
            ],
        }


class Packer:
    """Packs one version.

    Args:
        device: large tensors that lie there, or on the CPU, travel out of their own memory.
        next_buffer: gives a buffer for the next bucket that is packed, ``size`` bytes long.
        size: of a bucket at most, in bytes; a multiple of 1 MiB.
        digest: whether to make digests.
        deadline: for the source.

    Attributes:
        seconds: that the source has taken.
    """

    def __init__(
        self,
        inventory: Inventory,
        copier: Copier,
        device: torch.device,
        next_buffer: Callable[[], torch.Tensor],
        size: int,
        digest: bool,
        deadline: Deadline,
    ) -> None:
        self._inventory = inventory
        self._intake = Intake(inventory, inventory.streamed(), deadline)
        self._device = device
        self._manifest = inventory.manifest
        self._copier = copier
        self._next_buffer = next_buffer
        self._size = size
        self._bounce = Bounce(size)
        self._digest = digest
        self._packing: Part | None = None
        self._direct: list[Part] = []
        self._count = 0
        self._sent: list[tuple[int, int]] = []
        self._digests: list[int] = []
        self._large: list[tuple[int, int]] = []
        self._large_digests: list[int] = []

    def buckets(self) -> Iterator[Bucket]:
        """All of it; a bucket's buffer is the caller's when the next one is asked for.

        Raises:
            SourceError: a tensor is not what the manifest says, comes twice, or does not come.
        """
        specs = self._manifest.tensors
        offsets = np.array([spec.offset for spec in specs], dtype=np.int64)
        sizes = np.array([spec.nbytes for spec in specs], dtype=np.int64)
        addresses = self._inventory.addresses
        small = np.flatnonzero((addresses != 0) & (sizes > 0) & (sizes < DIRECT))
        yield from self._add(small, offsets[small], sizes[small], addresses[small])
        others = []
        for number, value in enumerate(self._inventory.values):
            if not isinstance(value, torch.Tensor):
                continue
            if sizes[number] >= DIRECT and self._is_plain(number, value):
                yield from self._cut(number, value)
            elif addresses[number] == 0:
                others.append(number)
        if self._direct:
            yield self._bucket(self._direct)
        for number in others:
            value = self._inventory.values[number]
            assert isinstance(value, torch.Tensor)
            yield from self._add_tensor(number, value)
        for number, tensor in self._intake:
            yield from self._add_tensor(number, tensor)
            del tensor
        if self._packing is not None:
            yield self._finished(self._packing)

    @property
    def seconds(self) -> float:
        return self._intake.seconds

    def _is_plain(self, number: int, tensor: torch.Tensor) -> bool:
        """Whether its memory is what is to be sent."""
        if self._inventory.addresses[number]:
            return True
        plain = tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()
        same = tensor.dtype == self._manifest.tensors[number].dtype
        return plain and same and tensor.is_cuda and tensor.device == self._device

    def _cut(self, number: int, tensor: torch.Tensor) -> Iterator[Bucket]:
        """A large tensor, out of its own memory."""
        spec = self._manifest.tensors[number]
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        self._large.append((number, spec.nbytes))
        for begin in range(0, spec.nbytes, self._size):
            buffer = flat[begin : begin + self._size]
            part = Part(buffer, False, len(buffer), [(spec.offset + begin, len(buffer))])
            if self._digest:
                part.digests = digests_of(self._bounce.fetch(buffer), self._copier)
                self._large_digests += part.digests
            if sum(other.nbytes for other in self._direct) + part.nbytes > self._size:
                yield self._bucket(self._direct)
                self._direct = []
            self._direct.append(part)

    def _add_tensor(self, number: int, tensor: torch.Tensor) -> Iterator[Bucket]:
        spec = self._manifest.tensors[number]
        plain = bytes_of(spec, tensor)
        if spec.nbytes:
            one = np.array([spec.nbytes], dtype=np.int64)
            address = np.array([plain.data_ptr()], dtype=np.int64)
            yield from self._add(np.array([number]), np.array([spec.offset]), one, address)

    def _add(
        self, numbers: Addresses, offsets: Addresses, sizes: Addresses, addresses: Addresses
    ) -> Iterator[Bucket]:
        """Pack tensors whose bytes lie at some addresses, and hand out what gets full."""
        done = 0  # bytes of these tensors
        starts = np.concatenate([[0], np.cumsum(sizes)])
        total = int(starts[-1])
        self._sent += zip(numbers.tolist(), sizes.tolist(), strict=True)
        while done < total:
            if self._packing is None:
                self._packing = Part(self._next_buffer(), True)
            part = self._packing
            end = min(total, done + len(part.buffer) - part.nbytes)
            first = int(np.searchsorted(starts, done, side="right")) - 1
            last = int(np.searchsorted(starts, end, side="left"))
            begins = np.maximum(starts[first:last], done)
            lengths = np.minimum(starts[first + 1 : last + 1], end) - begins
            inside = begins - starts[first:last]
            self._copy(part, begins - done, lengths, addresses[first:last] + inside)
            _extend(part.pieces, offsets[first:last] + inside, lengths)
            part.nbytes += end - done
            done = end
            if part.nbytes == len(part.buffer):
                self._packing = None
                yield self._finished(part)

    def _copy(
        self, part: Part, begins: Addresses, lengths: Addresses, addresses: Addresses
    ) -> None:
        """Copy bytes to the part's end; every MiB that gets whole is digested in the cache."""
        base = part.buffer.data_ptr()
        rows = Rows(begins + part.nbytes, lengths)
        into = rows.in_slot + base
        out_of = addresses[rows.piece] + rows.in_piece
        chunks, first_row = np.unique(rows.in_slot // CHUNK, return_index=True)
        bounds = [*first_row.tolist(), len(into)]
        numbers = chunks.tolist()
        end = part.nbytes + int(lengths.sum())
        view = _view(part.buffer)
        digests = part.digests
        digests += [0] * (numbers[-1] + 1 - len(digests))

        def work(index: int) -> None:
            chunk = numbers[index]
            move(into, out_of, rows.length, bounds[index], bounds[index + 1], False)
            if self._digest and (chunk + 1) * CHUNK <= end:
                digests[chunk] = xxhash.xxh3_64_intdigest(view[chunk * CHUNK : (chunk + 1) * CHUNK])

        self._copier.each(len(numbers), work)

    def _finished(self, part: Part) -> Bucket:
        if not self._digest:
            part.digests = []
        elif part.nbytes % CHUNK:
            begin = part.nbytes // CHUNK * CHUNK
            part.digests[-1] = xxhash.xxh3_64_intdigest(_view(part.buffer)[begin : part.nbytes])
        self._digests += part.digests
        return self._bucket([part])

    def _bucket(self, parts: list[Part]) -> Bucket:
        self._count += 1
        return Bucket(self._count - 1, parts)

    def summary(self) -> Summary:
        """What was packed, once all buckets were handed out."""
        # Of large tensors each begins a MiB of its own; of small ones several share one.
        places = []
        first = 0
        for number, size in self._large:
            places.append((number, first, first + -(-size // CHUNK)))
            first = places[-1][2]
        at = 0
        for number, size in self._sent:
            places.append((number, first + at // CHUNK, first + -(-(at + size) // CHUNK)))
            at += size
        digests = np.array([*self._large_digests, *self._digests], np.uint64)
        return Summary(self._manifest.fingerprint, places, digests if self._digest else None)


@dataclass(frozen=True)
class Summary:
    """One version as it was sent.

    Attributes:
        places: ``(index in the manifest, begin, end)`` of each tensor's digests, as sent; several
            of one that was sent in parts.
        digests: of each MiB; None if digests are off.
    """

    fingerprint: str
    places: Sequence[tuple[int, int, int]]
    digests: Digests | None

    @property
    def digest(self) -> str | None:
        """One 128-bit XXH3 of it all, as hexadecimal. None: there are no digests."""
        if self.digests is None:
            return None
        state = xxhash.xxh3_128(self.fingerprint.encode())
        state.update(np.array(self.places, dtype="<i8").tobytes())
        state.update(self.digests.astype("<u8").tobytes())
        return state.hexdigest()

    def same_as(self, other: Summary | None) -> bool:
        """Whether it is known that the weights are the same, bit for bit."""
        return other is not None and self.digest is not None and self.digest == other.digest

    def changed_since(self, former: Summary | None) -> int | None:
        """How many tensors lie in a MiB whose digest differs; None if that cannot be known."""
        if former is None or self.digests is None or former.digests is None:
            return None
        if self.fingerprint != former.fingerprint or self.places != former.places:
            return None
        different = np.concatenate([[0], np.cumsum(self.digests != former.digests)])
        places = np.array(self.places, dtype=np.int64).reshape(-1, 3)
        touched = different[places[:, 2]] > different[places[:, 1]]
        return len(np.unique(places[touched, 0]))


class Bounce:
    """Page-locked memory through which bytes of a GPU reach the CPU.

    Args:
        size: in bytes, of the most that is fetched at a time.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._memory: torch.Tensor | None = None

    def fetch(self, payload: torch.Tensor) -> torch.Tensor:
        """The same bytes on the CPU, until the next ones are fetched."""
        if payload.device.type == "cpu":
            return payload
        if self._memory is None:
            self._memory = torch.empty(self._size, dtype=torch.uint8, pin_memory=True)
        return self._memory[: len(payload)].copy_(payload)


def digests_of(payload: torch.Tensor, copier: Copier) -> list[int]:
    """XXH3 of each MiB of some bytes on the CPU."""
    view = _view(payload)
    digests = [0] * -(-len(view) // CHUNK)

    def work(chunk: int) -> None:
        digests[chunk] = xxhash.xxh3_64_intdigest(view[chunk * CHUNK : (chunk + 1) * CHUNK])

    copier.each(len(digests), work)
    return digests


def _extend(pieces: Pieces, offsets: Addresses, lengths: Addresses) -> None:
    """Append pieces, those that follow one another as one."""
    if len(offsets) == 0:
        return
    follows = offsets[1:] == offsets[:-1] + lengths[:-1]
    first = np.concatenate([[0], np.flatnonzero(~follows) + 1])
    joined = np.add.reduceat(lengths, first)
    added = list(zip(offsets[first].tolist(), joined.tolist(), strict=True))
    if pieces and pieces[-1][0] + pieces[-1][1] == added[0][0]:
        offset, length = pieces.pop()
        added[0] = offset, length + added[0][1]
    pieces += added


def bytes_of(spec: ParamSpec, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's values as the manifest wants them: its own memory where that is so, else a copy.

    Raises:
        SourceError: torch has no such conversion.
    """
    if plain_address(tensor, spec.dtype) or spec.nbytes == 0:
        return tensor
    made = torch.empty(spec.shape, dtype=spec.dtype)
    copy_tensor(made, tensor, spec.name)
    return made


def check(part: dict[str, Any], manifest: Manifest) -> Pieces:
    """The pieces of a part that is announced, as in :meth:`Bucket.message`; not believed.

    Raises:
        ProtocolError: the message makes no sense.
    """
    try:
        nbytes, count = int(part["nbytes"]), len(part["digests"])
        pieces = [(int(offset), int(length)) for offset, length in part["pieces"]]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"a bucket's message makes no sense: {error!r:.200}") from None
    # In numbers that do not overflow: what passes becomes an address.
    inside = all(0 <= at < at + length <= manifest.nbytes for at, length in pieces)
    if not inside or sum(length for _, length in pieces) != nbytes or nbytes <= 0:
        raise ProtocolError("a bucket has pieces that lie nowhere")
    if count and count != -(-nbytes // CHUNK):
        raise ProtocolError(f"a bucket of {nbytes} bytes has {count} digests")
    return pieces


def verify(
    digests: Sequence[int],
    pieces: Pieces,
    payload: torch.Tensor,
    manifest: Manifest,
    copier: Copier,
) -> None:
    """Compare a part that has arrived with its digests, if it has any.

    Raises:
        CorruptError: the bytes are not those that were sent; names the tensors concerned.
    """
    held = digests_of(payload, copier) if digests else []
    wrong = [n for n, (one, other) in enumerate(zip(held, digests, strict=True)) if one != other]
    if wrong:
        raise corrupt(len(wrong), names_at(manifest, pieces, wrong))


def corrupt(count: int, names: Sequence[str]) -> CorruptError:
    listed = ", ".join(map(repr, dict.fromkeys(names[:5])))
    return CorruptError(f"{count} MiB are not what was sent; tensors in them: {listed}")


def unpack(pieces: Pieces, payload: torch.Tensor, slot: torch.Tensor, copier: Copier) -> None:
    """Put a bucket's pieces into their places. Both are uint8 on the CPU."""
    table = np.array(pieces, dtype=np.int64)
    offsets, lengths = table[:, 0], table[:, 1]
    rows = Rows(np.cumsum(lengths) - lengths, lengths)
    out_of = rows.in_slot + payload.data_ptr()
    into = offsets[rows.piece] + rows.in_piece + slot.data_ptr()
    count = -(-len(payload) // CHUNK)
    first_row = np.searchsorted(rows.in_slot // CHUNK, np.arange(count + 1)).tolist()
    copier.each(
        count,
        lambda chunk: move(into, out_of, rows.length, first_row[chunk], first_row[chunk + 1], True),
    )


def names_at(manifest: Manifest, pieces: Pieces, chunks: Sequence[int]) -> list[str]:
    """The tensors that have bytes in some MiB of a part."""
    begins = [spec.offset for spec in manifest.tensors]
    names = []
    at = 0
    for offset, length in pieces:
        for chunk in chunks:
            low, high = max(at, chunk * CHUNK), min(at + length, (chunk + 1) * CHUNK)
            if low < high:
                first = bisect_right(begins, offset + low - at) - 1
                last = bisect_right(begins, offset + high - at - 1)
                names += [spec.name for spec in manifest.tensors[first:last] if spec.nbytes]
        at += length
    return names


def _view(buffer: torch.Tensor) -> memoryview:
    return memoryview(buffer.numpy())  # type: ignore[arg-type]
