"""Two GPU kernels, in Triton, which comes with torch: XXH3 digests, and many copies as one.

Triton compiles them the first time, for which it needs a C compiler on the machine.

A chunk is blocks of 1024 bytes to XXH3. What a block adds to the eight lanes does not depend on
the lanes, only the step between two blocks does. So one warp takes the blocks of a chunk one after
the other, many of them being loaded at a time, and chunks are taken side by side.
"""

import functools

import numpy as np
import torch
import triton
import triton.language as tl

from weightsync.chunks import CHUNK
from weightsync.device import xxh3
from weightsync.device.device import split
from weightsync.tensors import Addresses

_LONGEST = 1 << 16
"""Bytes that one program of the copying kernel moves."""

_AT_A_TIME = 11
"""Blocks of a chunk that are loaded at a time; there are 93 times so many, and one."""

assert CHUNK // 1024 == 93 * _AT_A_TIME + 1


@triton.jit(do_not_specialize=["address", "into"])  # type: ignore[untyped-decorator]
def _digest(  # type: ignore[no-untyped-def]
    address,
    into,
    table,
    ROUNDS: tl.constexpr,
    UNROLL: tl.constexpr,
    WORDS: tl.constexpr,
    PRIME: tl.constexpr,
    AVALANCHE: tl.constexpr,
):
    chunk = tl.program_id(0).to(tl.int64)
    stripe = tl.arange(0, 16)[:, None]
    lane = tl.arange(0, 8)[None, :]
    lanes = tl.arange(0, 8)
    words = stripe * 8 + lane
    crossed = stripe * 8 + (lane ^ 1)
    data = (address.to(tl.int64) + chunk * (WORDS * 8)).to(tl.pointer_type(tl.uint64))
    keys = tl.load(table + stripe + lane)
    scramble = tl.load(table + 16 + lanes)
    lane_sums = tl.load(table + 40 + lanes)
    for number in range(ROUNDS):
        block = data + number * (UNROLL * 128)
        for part in tl.static_range(UNROLL):
            key = tl.load(block + part * 128 + words) ^ keys
            other = tl.load(block + part * 128 + crossed)
            added = (key & 0xFFFFFFFF) * (key >> 32) + other
            lane_sums += tl.sum(added, axis=0)
            lane_sums = ((lane_sums ^ (lane_sums >> 47)) ^ scramble) * PRIME
    # The last block: fifteen stripes, and one that ends the chunk under keys of its own.
    block = data + ROUNDS * (UNROLL * 128)
    last = tl.load(table + 24 + lane)
    key = tl.load(block + words) ^ tl.where(stripe == 15, last, keys)
    added = (key & 0xFFFFFFFF) * (key >> 32) + tl.load(block + crossed)
    lane_sums += tl.sum(added, axis=0)
    mixed = lane_sums ^ tl.load(table + 32 + lanes)
    even, odd = tl.split(tl.reshape(mixed, (4, 2)))
    folded = (even * odd) ^ tl.umulhi(even, odd)
    digest = tl.sum(folded, axis=0) + tl.load(table + 48)
    digest = (digest ^ (digest >> 37)) * AVALANCHE
    digest = digest ^ (digest >> 32)
    tl.store(into.to(tl.int64).to(tl.pointer_type(tl.uint64)) + chunk, digest)


@triton.jit(do_not_specialize=["base"])  # type: ignore[untyped-decorator]
def _move(table, base, BYTES: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * 3
    into = tl.load(table + row)
    out_of = tl.load(table + row + 1) + base
    count = tl.load(table + row + 2)
    each = tl.arange(0, BLOCK)
    if BYTES == 16:
        # Two words at a time; all three are multiples of 16.
        to = tl.multiple_of(into, 16).to(tl.pointer_type(tl.int64))
        source = tl.multiple_of(out_of, 16).to(tl.pointer_type(tl.int64))
        words = tl.multiple_of(count // 8, 2)
        for begin in range(0, words, BLOCK):
            at = begin + each
            tl.store(to + at, tl.load(source + at, mask=at < words), mask=at < words)
    else:
        narrow_to = into.to(tl.pointer_type(tl.uint8))
        narrow_source = out_of.to(tl.pointer_type(tl.uint8))
        for begin in range(0, count, BLOCK):
            at = begin + each
            value = tl.load(narrow_source + at, mask=at < count)
            tl.store(narrow_to + at, value, mask=at < count)


@functools.cache
def _table(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(xxh3.table(CHUNK)).to(device)


def digest_chunks(address: int, count: int, into: torch.Tensor) -> None:
    """Queue digests on the current stream of the device of ``into``; see ``Device.digests``."""
    if count:
        _digest[(count,)](
            address,
            into.data_ptr(),
            _table(into.device),
            ROUNDS=93,
            UNROLL=_AT_A_TIME,
            WORDS=CHUNK // 8,
            PRIME=xxh3.PRIME32[0],
            AVALANCHE=xxh3.AVALANCHE,
            num_warps=1,
        )


def compile_moves(device: torch.device) -> None:
    """Have the copying kernels compiled now, in all the forms in which they are used."""
    memory = torch.zeros(64, dtype=torch.uint8, device=device)
    into, out_of = np.array([memory.data_ptr()]), np.array([memory.data_ptr() + 32])
    for length in (16, 1):
        moves = GPUMoves(device, into, out_of, np.array([length]))
        moves.run_on_current(0)
        moves = GPUMoves(device, into, out_of - memory.data_ptr(), np.array([length]))
        moves.run_on_current(memory.data_ptr())


class GPUMoves:
    """A table of the copies in the GPU's memory, and a program for each row."""

    def __init__(
        self, device: torch.device, into: Addresses, out_of: Addresses, length: Addresses
    ) -> None:
        into, out_of, length = split(into, out_of, length, _LONGEST)
        aligned = (into | out_of | length) % 16 == 0
        self._tables = [
            (unit, self._upload(device, into[rows], out_of[rows], length[rows]))
            for unit, rows in ((16, aligned), (1, ~aligned))
            if rows.any()
        ]

    @staticmethod
    def _upload(
        device: torch.device, into: Addresses, out_of: Addresses, length: Addresses
    ) -> torch.Tensor:
        return torch.from_numpy(np.stack([into, out_of, length], axis=1)).to(device)

    def run_on_current(self, base: int) -> None:
        """Queue them on torch's current stream. ``base`` is a multiple of 16."""
        for unit, table in self._tables:
            _move[(len(table),)](table, base, BYTES=unit, BLOCK=2048, num_warps=4)
