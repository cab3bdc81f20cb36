"""GPU kernels in Triton, which comes with torch: XXH3 digests, and many copies as one.

Triton compiles them the first time, for which it needs a C compiler on the machine.

A chunk is 1024 blocks of 1024 bytes to XXH3. What a block adds to the eight lanes does not depend
on the lanes: these sums are made side by side, each by one thread. Only what happens between two
blocks goes one after the other, for each chunk: that has only the sums to read.

What runs beside something that is in a hurry keeps to a part of the GPU: a program that sits on
every processor keeps NCCL's kernels waiting, whose blocks need most of one.
"""

import functools

import numpy as np
import torch
import triton
import triton.language as tl

from weightsync.chunks import CHUNK
from weightsync.device import xxh3
from weightsync.device.device import split
from weightsync.errors import NoRoomError
from weightsync.tensors import Addresses

_LONGEST = 1 << 16
"""Bytes that one program of the copying kernel moves."""

_BLOCKS = CHUNK // 1024
"""Of a chunk."""

_FEW = 48
"""Programs that leave most of a large GPU, of 132 processors, to others. Three times as many bytes
as NVLink carries pass through them."""

_WARPS = 8
"""Of a program that makes sums."""

_AT_A_TIME = 31
"""Sums of a chunk that are loaded at a time; there are 33 times so many, and one."""

_SLICE = 256
"""Chunks whose sums are kept at a time: 16 MiB, which a GPU's cache holds."""

_SHORT = 16
"""The same on a GPU that is full: 1 MiB, for which torch mostly needs none of the GPU's memory."""

assert _BLOCKS == 33 * _AT_A_TIME + 1


@triton.jit
def _product(keyed):  # type: ignore[no-untyped-def]
    return (keyed & 0xFFFFFFFF) * (keyed >> 32)


@triton.jit
def _add(even, odd, word, keys, last_keys, is_last):  # type: ignore[no-untyped-def]
    """A pair of lanes, and what two words add to them: the two trade words."""
    first, second = tl.split(tl.load(word))
    even += _product(first ^ tl.where(is_last, tl.load(last_keys), tl.load(keys))) + second
    odd += _product(second ^ tl.where(is_last, tl.load(last_keys + 1), tl.load(keys + 1))) + first
    return even, odd


@triton.jit(do_not_specialize=["address", "sums", "tiles"])  # type: ignore[untyped-decorator]
def _sum(  # type: ignore[no-untyped-def]
    address,
    sums,
    table,
    tiles,
    BLOCKS: tl.constexpr,
    IN_CHUNK: tl.constexpr,
):
    """What each block adds to the lanes: a block is one thread's, so that no two trade words."""
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        number = tile * BLOCKS + tl.arange(0, BLOCKS).to(tl.int64)
        is_last = (number + 1) % IN_CHUNK == 0
        block = (address.to(tl.int64) + number * 1024).to(tl.pointer_type(tl.uint64))
        word = tl.multiple_of(block, 16)[:, None] + tl.arange(0, 2)[None, :]
        into = (sums.to(tl.int64) + number * 64).to(tl.pointer_type(tl.uint64))
        sum0 = tl.zeros((BLOCKS,), dtype=tl.uint64)
        sum1, sum2, sum3, sum4, sum5, sum6, sum7 = sum0, sum0, sum0, sum0, sum0, sum0, sum0
        for stripe in tl.static_range(16):
            at, keys, last = word + stripe * 8, table + stripe, table + 24
            ends = is_last & (stripe == 15)  # the stripe that ends a chunk has keys of its own
            sum0, sum1 = _add(sum0, sum1, at, keys, last, ends)
            sum2, sum3 = _add(sum2, sum3, at + 2, keys + 2, last + 2, ends)
            sum4, sum5 = _add(sum4, sum5, at + 4, keys + 4, last + 4, ends)
            sum6, sum7 = _add(sum6, sum7, at + 6, keys + 6, last + 6, ends)
        tl.store(into, sum0)
        tl.store(into + 1, sum1)
        tl.store(into + 2, sum2)
        tl.store(into + 3, sum3)
        tl.store(into + 4, sum4)
        tl.store(into + 5, sum5)
        tl.store(into + 6, sum6)
        tl.store(into + 7, sum7)


@triton.jit(do_not_specialize=["sums", "into"])  # type: ignore[untyped-decorator]
def _finish(  # type: ignore[no-untyped-def]
    sums,
    into,
    table,
    ROUNDS: tl.constexpr,
    UNROLL: tl.constexpr,
    PRIME: tl.constexpr,
    AVALANCHE: tl.constexpr,
):
    chunk = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, 8)
    block = sums.to(tl.int64).to(tl.pointer_type(tl.uint64)) + chunk * ((ROUNDS * UNROLL + 1) * 8)
    block += lanes
    scramble = tl.load(table + 16 + lanes)
    lane_sums = tl.load(table + 40 + lanes)
    for number in range(ROUNDS):
        for part in tl.static_range(UNROLL):
            lane_sums += tl.load(block + (number * UNROLL + part) * 8)
            lane_sums = ((lane_sums ^ (lane_sums >> 47)) ^ scramble) * PRIME
    lane_sums += tl.load(block + ROUNDS * UNROLL * 8)
    mixed = lane_sums ^ tl.load(table + 32 + lanes)
    even, odd = tl.split(tl.reshape(mixed, (4, 2)))
    folded = (even * odd) ^ tl.umulhi(even, odd)
    digest = tl.sum(folded, axis=0) + tl.load(table + 48)
    digest = (digest ^ (digest >> 37)) * AVALANCHE
    digest = digest ^ (digest >> 32)
    tl.store(into.to(tl.int64).to(tl.pointer_type(tl.uint64)) + chunk, digest)


@triton.jit(do_not_specialize=["base", "rows"])  # type: ignore[untyped-decorator]
def _move(  # type: ignore[no-untyped-def]
    table, rows, base, BYTES: tl.constexpr, BLOCK: tl.constexpr
):
    each = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        entry = table + row * 3
        into = tl.load(entry)
        out_of = tl.load(entry + 1) + base
        count = tl.load(entry + 2)
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


_full: set[torch.device] = set()
"""Where there was no room once. It is not asked for again: before torch says so, it has given back
all that it keeps, and waited for the whole GPU."""


def _room_for_sums(count: int, device: torch.device) -> torch.Tensor:
    """Memory of the current stream's, for as many chunks as there is room for, up to ``count``.

    Raises:
        NoRoomError: there is too little even for a few.
    """
    if device not in _full:
        try:
            return _sums(min(count, _SLICE), device)
        except torch.cuda.OutOfMemoryError:
            _full.add(device)
    try:
        return _sums(min(count, _SHORT), device)
    except torch.cuda.OutOfMemoryError:
        raise NoRoomError(f"{device} has no room to make digests in") from None


def _sums(chunks: int, device: torch.device) -> torch.Tensor:
    return torch.empty((chunks, _BLOCKS, 8), dtype=torch.int64, device=device)


def digest_chunks(address: int, count: int, into: torch.Tensor) -> None:
    """Queue digests on the current stream of the device of ``into``; see ``Device.digests``."""
    if not count:
        return
    table = _table(into.device)
    sums = _room_for_sums(count, into.device)
    for first in range(0, count, len(sums)):
        some = min(len(sums), count - first)
        begin = address + first * CHUNK
        tiles = some * _BLOCKS // (32 * _WARPS)
        _sum[(min(tiles, _FEW),)](
            begin,
            sums.data_ptr(),
            table,
            tiles,
            BLOCKS=32 * _WARPS,
            IN_CHUNK=_BLOCKS,
            num_warps=_WARPS,
        )
        _finish[(some,)](
            sums.data_ptr(),
            into.data_ptr() + 8 * first,
            table,
            ROUNDS=33,
            UNROLL=_AT_A_TIME,
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
    """A table of the copies in the GPU's memory, and a program for each row; or a few for all."""

    def __init__(
        self,
        device: torch.device,
        into: Addresses,
        out_of: Addresses,
        length: Addresses,
        gentle: bool = False,
    ) -> None:
        self._most = _FEW if gentle else None
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
            rows = len(table)
            programs = min(rows, self._most or rows)
            _move[(programs,)](table, rows, base, BYTES=unit, BLOCK=2048, num_warps=4)
