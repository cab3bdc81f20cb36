"""Weights as a sequence of buckets: packed bytes, where they belong, and their digests.

A bucket is a few MiB of bytes, whole tensors or parts of them one after the other, in whatever order
the source gives them. It says of each piece where it lies in the version as the manifest lays it
out, so the two sides need not agree on an order, and a tensor may be larger than a bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash

from weightsync.chunks import CHUNK, Addresses, Copier, Digests, Rows, move
from weightsync.errors import ProtocolError, SourceError
from weightsync.manifest import Manifest, ParamSpec, describe
from weightsync.source import Inventory
from weightsync.tensors import plain_address

Pieces = list[tuple[int, int]]
"""``(offset in the version, length)`` in bytes, in the order in which they lie in the bucket."""


@dataclass
class Bucket:
    """
    Attributes:
        buffer: uint8, on the CPU; its first ``nbytes`` are the bucket's.
        digests: XXH3 of each MiB of them; none if digests are off.
    """

    number: int
    buffer: torch.Tensor
    nbytes: int = 0
    pieces: Pieces = field(default_factory=list)
    digests: list[int] = field(default_factory=list)

    def message(self) -> dict[str, Any]:
        return {
            "op": "bucket",
            "number": self.number,
            "nbytes": self.nbytes,
            "pieces": self.pieces,
            "digests": self.digests,
        }


class Packer:
    """Packs one version.

    Args:
        next_buffer: gives a buffer for the next bucket, all of one size, a multiple of 1 MiB.
        digest: whether to make digests.
    """

    def __init__(
        self,
        inventory: Inventory,
        copier: Copier,
        next_buffer: Callable[[], torch.Tensor],
        digest: bool,
    ) -> None:
        self._inventory = inventory
        self._manifest = inventory.manifest
        self._copier = copier
        self._next_buffer = next_buffer
        self._digest = digest
        self._bucket: Bucket | None = None
        self._count = 0
        self._sent: list[tuple[int, int]] = []
        self._digests: list[int] = []

    def buckets(self) -> Iterator[Bucket]:
        """All of it; a bucket's buffer is the caller's when the next one is asked for.

        Raises:
            SourceError: a tensor is not what the manifest says, comes twice, or does not come.
        """
        specs = self._manifest.tensors
        offsets = np.array([spec.offset for spec in specs], dtype=np.int64)
        sizes = np.array([spec.nbytes for spec in specs], dtype=np.int64)
        addresses = self._inventory.addresses
        at_once = np.flatnonzero((addresses != 0) & (sizes > 0))
        yield from self._add(at_once, offsets[at_once], sizes[at_once], addresses[at_once])
        for number, value in enumerate(self._inventory.values):
            if isinstance(value, torch.Tensor) and addresses[number] == 0:
                yield from self._add_tensor(number, value)
        awaited = set(self._inventory.streamed())
        index = {spec.name: number for number, spec in enumerate(specs)}
        for name, tensor in self._inventory.stream():
            number = index.get(name, -1)
            if number not in awaited:
                what = "sent twice" if number >= 0 else "not in the manifest"
                raise SourceError(f"tensor {name!r} is {what}")
            awaited.remove(number)
            yield from self._add_tensor(number, tensor)
            del tensor
        if awaited:
            names = ", ".join(repr(specs[number].name) for number in sorted(awaited)[:5])
            raise SourceError(f"{len(awaited)} tensors of the manifest were not sent: {names} ...")
        if self._bucket is not None:
            yield self._finished(self._bucket)

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
            if self._bucket is None:
                self._bucket = Bucket(self._count, self._next_buffer())
                self._count += 1
            bucket = self._bucket
            end = min(total, done + len(bucket.buffer) - bucket.nbytes)
            first = int(np.searchsorted(starts, done, side="right")) - 1
            last = int(np.searchsorted(starts, end, side="left"))
            begins = np.maximum(starts[first:last], done)
            lengths = np.minimum(starts[first + 1 : last + 1], end) - begins
            inside = begins - starts[first:last]
            self._copy(bucket, begins - done, lengths, addresses[first:last] + inside)
            _extend(bucket.pieces, offsets[first:last] + inside, lengths)
            bucket.nbytes += end - done
            done = end
            if bucket.nbytes == len(bucket.buffer):
                self._bucket = None
                yield self._finished(bucket)

    def _copy(
        self, bucket: Bucket, begins: Addresses, lengths: Addresses, addresses: Addresses
    ) -> None:
        """Copy bytes to the bucket's end; every MiB that gets whole is digested in the cache."""
        base = bucket.buffer.data_ptr()
        rows = Rows(begins + bucket.nbytes, lengths)
        into = rows.in_slot + base
        out_of = addresses[rows.piece] + rows.in_piece
        chunks, first_row = np.unique(rows.in_slot // CHUNK, return_index=True)
        bounds = [*first_row.tolist(), len(into)]
        numbers = chunks.tolist()
        end = bucket.nbytes + int(lengths.sum())
        view = memoryview(bucket.buffer.numpy())
        digests = bucket.digests
        digests += [0] * (len(numbers) if not digests else numbers[-1] + 1 - len(digests))

        def work(index: int) -> None:
            chunk = numbers[index]
            move(into, out_of, rows.length, bounds[index], bounds[index + 1], False)
            if self._digest and (chunk + 1) * CHUNK <= end:
                digests[chunk] = xxhash.xxh3_64_intdigest(view[chunk * CHUNK : (chunk + 1) * CHUNK])

        self._copier.each(len(numbers), work)

    def _finished(self, bucket: Bucket) -> Bucket:
        if not self._digest:
            bucket.digests = []
        elif bucket.nbytes % CHUNK:
            begin = bucket.nbytes // CHUNK * CHUNK
            rest = bucket.buffer.numpy()[begin : bucket.nbytes]
            bucket.digests[-1] = xxhash.xxh3_64_intdigest(memoryview(rest))
        self._digests += bucket.digests
        return bucket

    def summary(self) -> Summary:
        """What was packed, once all buckets were handed out."""
        return Summary(self._manifest.fingerprint, self._sent, np.array(self._digests, np.uint64))


@dataclass(frozen=True)
class Summary:
    """One version as it was packed.

    Attributes:
        sent: ``(index in the manifest, bytes)`` of each tensor, in the order of packing.
        digests: of each MiB; empty if digests are off.
    """

    fingerprint: str
    sent: Sequence[tuple[int, int]]
    digests: Digests

    @property
    def digest(self) -> str | None:
        """One 128-bit XXH3 of it all, as hexadecimal. None: there are no digests."""
        if len(self.digests) == 0 and any(size for _, size in self.sent):
            return None
        state = xxhash.xxh3_128(self.fingerprint.encode())
        state.update(np.array(self.sent, dtype="<i8").tobytes())
        state.update(self.digests.astype("<u8").tobytes())
        return state.hexdigest()

    def changed_since(self, former: Summary | None) -> int | None:
        """How many tensors lie in a MiB whose digest differs; None if that cannot be known."""
        if former is None or self.digest is None or former.digest is None:
            return None
        if self.fingerprint != former.fingerprint or self.sent != former.sent:
            return None
        sizes = np.array([size for _, size in self.sent], dtype=np.int64)
        ends = np.cumsum(sizes)
        begins, ends = (ends - sizes)[sizes > 0], ends[sizes > 0]
        different = np.concatenate([[0], np.cumsum(self.digests != former.digests)])
        touched = different[(ends - 1) // CHUNK + 1] > different[begins // CHUNK]
        return int(np.count_nonzero(touched))


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


@torch.no_grad()
def bytes_of(spec: ParamSpec, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's values as the manifest wants them: its own memory where that is so, else a copy.

    Raises:
        SourceError: it is not what the manifest says, or torch has no such conversion.
    """
    cast = tensor.dtype.is_floating_point and spec.dtype.is_floating_point
    if tensor.shape != spec.shape or not (cast or tensor.dtype == spec.dtype):
        sent = describe(tensor.dtype, tensor.shape)
        raise SourceError(f"tensor {spec.name!r} is {sent}, its manifest says {spec}")
    if plain_address(tensor, spec.dtype) or spec.nbytes == 0:
        return tensor
    made = torch.empty(spec.shape, dtype=spec.dtype)
    try:
        made.copy_(tensor)
    except NotImplementedError:
        # int1 to int7 and uint1 to uint7 have no copy kernel; their bytes are whole, though.
        if tensor.dtype != spec.dtype or spec.dtype.itemsize != 1:
            raise SourceError(
                f"tensor {spec.name!r}: torch cannot copy {tensor.dtype} to {spec.dtype}"
            ) from None
        made.view(torch.uint8).copy_(tensor.view(torch.uint8))
    return made


def unpack(
    message: dict[str, Any],
    buffer: torch.Tensor,
    slot: torch.Tensor,
    manifest: Manifest,
    copier: Copier,
) -> None:
    """Verify a bucket that has arrived, and put its pieces into place.

    Args:
        message: as :meth:`Bucket.message` made it; not believed.
        buffer: uint8 on the CPU, the bucket. slot: uint8 on the CPU, the version.

    Raises:
        ProtocolError: the message makes no sense, or the bytes are not those that were sent.
    """
    nbytes = message["nbytes"]
    pieces = np.array(message["pieces"], dtype=np.int64).reshape(-1, 2)
    offsets, lengths = pieces[:, 0], pieces[:, 1]
    inside = (offsets >= 0) & (lengths > 0) & (offsets + lengths <= manifest.nbytes)
    if not inside.all() or int(lengths.sum()) != nbytes or not 0 <= nbytes <= len(buffer):
        raise ProtocolError(f"bucket {message['number']!r:.20} has pieces that lie nowhere")
    digests = message["digests"]
    count = -(-nbytes // CHUNK)
    if digests and len(digests) != count:
        raise ProtocolError(f"bucket {message['number']!r:.20} has {len(digests)} digests")
    rows = Rows(np.cumsum(lengths) - lengths, lengths)
    out_of = rows.in_slot + buffer.data_ptr()
    into = offsets[rows.piece] + rows.in_piece + slot.data_ptr()
    first_row = np.searchsorted(rows.in_slot // CHUNK, np.arange(count + 1)).tolist()
    view = memoryview(buffer.numpy())
    wrong: list[int] = []

    def work(chunk: int) -> None:
        if digests:
            held = view[chunk * CHUNK : min((chunk + 1) * CHUNK, nbytes)]
            if xxhash.xxh3_64_intdigest(held) != digests[chunk]:
                wrong.append(chunk)
                return
        move(into, out_of, rows.length, first_row[chunk], first_row[chunk + 1], True)

    copier.each(count, work)
    if wrong:
        names = _names_at(manifest, offsets[rows.piece] + rows.in_piece, rows, wrong)
        raise ProtocolError(
            f"bucket {message['number']}: {len(wrong)} MiB are not what was sent; tensors in "
            f"them: {names}"
        )


def _names_at(manifest: Manifest, places: Addresses, rows: Rows, chunks: Sequence[int]) -> str:
    begins = np.array([spec.offset for spec in manifest.tensors], dtype=np.int64)
    hit = np.isin(rows.in_slot // CHUNK, np.array(chunks))
    first = np.searchsorted(begins, places[hit], side="right") - 1
    names = [manifest.tensors[number].name for number in np.unique(first).tolist()]
    return ", ".join(map(repr, names[:5]))
