"""Digests of buckets where they lie, on a GPU: made beside everything else, compared at the end.

The CPU would have to fetch what it digests, which takes longer than the broadcast.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass

import numpy as np
import torch
from xxhash import xxh3_64_intdigest

from weightsync.chunks import CHUNK, Digests
from weightsync.device import Device, Lane, Mark, settle
from weightsync.errors import ProtocolError
from weightsync.manifest import Manifest
from weightsync.schemes.nccl.buckets import Pieces, corrupt, names_at

_BLOCK = 1 << 14
"""Digests that one piece of the device's memory has room for: those of 16 GiB."""


@dataclass(frozen=True)
class _Part:
    """Where the digests of its whole MiB are, and the bytes behind those.

    Attributes:
        block, begin: which piece of the device's memory, and from where in it; count: how many.
    """

    block: int
    begin: int
    count: int
    tail: torch.Tensor
    pieces: Pieces


class Digester:
    """XXH3 of each MiB of the parts of one version's buckets.

    On a lane of its own, memory included: an engine that computes beside it is not waited for.

    Args:
        lane: to be used for one version after the other. A GPU has 32 of them, which are handed
            out again and again: after many new ones somebody else's would be among them.
    """

    def __init__(self, device: Device, lane: Lane) -> None:
        self._device, self._lane = device, lane
        self._blocks: list[torch.Tensor] = []
        self._used = 0
        self._parts: dict[tuple[int, int], _Part] = {}

    def add(
        self,
        bucket: int,
        part: int,
        payload: torch.Tensor,
        pieces: Pieces,
        after: Mark | None = None,
    ) -> Mark:
        """Queue those of a part, or queue them again.

        Args:
            after: when its bytes are there; None: they are.

        Returns:
            When they are done: the memory may be another's then.

        Raises:
            ProtocolError: a GPU could not read there. NoRoomError: it is full.
        """
        address, whole = payload.data_ptr(), len(payload) // CHUNK
        if address % 16:
            raise ProtocolError("a bucket has a part that begins between two words")
        if after is not None:
            self._lane.after(after)
        block, begin = self._room(whole)
        tail = torch.empty(len(payload) % CHUNK, dtype=torch.uint8)
        if whole:
            into = self._blocks[block][begin : begin + whole]
            self._device.digests(self._lane, address, whole, into)
        if len(tail):
            self._lane.copy(tail.data_ptr(), address + whole * CHUNK, len(tail))
        self._parts[bucket, part] = _Part(block, begin, whole, tail, pieces)
        return self._lane.mark()

    def _room(self, count: int) -> tuple[int, int]:
        if not self._blocks or self._used + count > len(self._blocks[-1]):
            self._blocks.append(self._lane.empty(max(_BLOCK, count)))
            self._used = 0
        begin, self._used = self._used, self._used + count
        return len(self._blocks) - 1, begin

    def wait(self) -> None:
        """Until nothing is queued any more."""
        settle(self._lane)

    def found(self) -> Digests:
        """All of them, in the order of the buckets."""
        blocks = [torch.empty(len(block), dtype=torch.int64) for block in self._blocks]
        for here, there in zip(blocks, self._blocks, strict=True):
            self._lane.copy(here.data_ptr(), there.data_ptr(), 8 * len(there))
        self.wait()
        made = [block.numpy().view(np.uint64) for block in blocks]
        found = [np.zeros(0, dtype=np.uint64)]
        for key in sorted(self._parts):
            part = self._parts[key]
            found.append(made[part.block][part.begin : part.begin + part.count])
            if len(part.tail):
                tail = xxh3_64_intdigest(part.tail.numpy().tobytes())
                found.append(np.array([tail], dtype=np.uint64))
        return np.concatenate(found)

    def compare(self, expected: Digests, manifest: Manifest) -> None:
        """
        Raises:
            CorruptError: some bytes are not what was sent; names the tensors concerned.
            ProtocolError: it is said of something else.
        """
        found = self.found()
        if len(found) != len(expected):
            raise ProtocolError(f"{len(expected)} digests came for {len(found)} MiB")
        wrong = np.flatnonzero(found != expected)
        if len(wrong):
            raise corrupt(len(wrong), self._names(wrong.tolist(), manifest))

    def _names(self, wrong: list[int], manifest: Manifest) -> list[str]:
        names: list[str] = []
        first = 0
        for key in sorted(self._parts):
            part = self._parts[key]
            count = part.count + (len(part.tail) > 0)
            mine = [number - first for number in wrong if first <= number < first + count]
            if mine:
                names += names_at(manifest, part.pieces, mine)
            first += count
        return names


def to_text(digests: Digests) -> str:
    return base64.b64encode(digests.astype("<u8").tobytes()).decode()


def from_text(text: str) -> Digests:
    """
    Raises:
        ProtocolError: these are no digests.
    """
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError):
        data = b"?"
    if len(data) % 8:
        raise ProtocolError("the digests of a version make no sense")
    return np.frombuffer(data, dtype="<u8").astype(np.uint64)
