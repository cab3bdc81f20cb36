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
from weightsync.device import Device, Mark
from weightsync.errors import ProtocolError
from weightsync.manifest import Manifest
from weightsync.schemes.nccl.buckets import Pieces, corrupt, names_at


@dataclass(frozen=True)
class _Part:
    """``digests``: int64 on the device, of whole MiB; ``tail``: the bytes behind them."""

    digests: torch.Tensor
    tail: torch.Tensor
    pieces: Pieces

    @property
    def count(self) -> int:
        return len(self.digests) + (len(self.tail) > 0)


class Digester:
    """XXH3 of each MiB of the parts of one version's buckets."""

    def __init__(self, device: Device) -> None:
        self._device, self._lane = device, device.lane()
        self._parts: dict[tuple[int, int], _Part] = {}

    def add(self, bucket: int, part: int, payload: torch.Tensor, pieces: Pieces) -> Mark:
        """Queue those of a part, or queue them again.

        Returns:
            When they are done: the memory may be another's then.

        Raises:
            ProtocolError: a GPU could not read there.
        """
        address = payload.data_ptr()
        if address % 8:
            raise ProtocolError("a bucket has a part that begins between two words")
        whole = len(payload) // CHUNK
        made = torch.empty(whole, dtype=torch.int64, device=self._device.place)
        tail = torch.empty(len(payload) % CHUNK, dtype=torch.uint8)
        self._lane.after(self._device.current().mark())
        if whole:
            self._device.digests(self._lane, address, whole, made)
        if len(tail):
            self._lane.copy(tail.data_ptr(), address + whole * CHUNK, len(tail))
        self._parts[bucket, part] = _Part(made, tail, pieces)
        return self._lane.mark()

    def wait(self) -> None:
        """Until nothing is queued any more."""
        self._lane.wait()

    def found(self) -> Digests:
        """All of them, in the order of the buckets."""
        self._lane.wait()
        parts = [self._parts[key] for key in sorted(self._parts)]
        if not parts:
            return np.zeros(0, dtype=np.uint64)
        whole: Digests = torch.cat([each.digests for each in parts]).cpu().numpy().view(np.uint64)
        found, at = [], 0
        for each in parts:
            found.append(whole[at : at + len(each.digests)])
            at += len(each.digests)
            if len(each.tail):
                tail = xxh3_64_intdigest(each.tail.numpy().tobytes())
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
            mine = [number - first for number in wrong if first <= number < first + part.count]
            if mine:
                names += names_at(manifest, part.pieces, mine)
            first += part.count
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
