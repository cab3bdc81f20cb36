"""Copies and digests, on plain memory: no files, no tensors of torch but as sources."""

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.chunks import CHUNK, Copier, Geometry, SlotWriter
from weightsync.manifest import Manifest

KIB = 1024

sizes = st.lists(
    st.one_of(
        st.just(0),
        st.integers(1, 300),
        st.sampled_from([CHUNK - 1, CHUNK, CHUNK + 1, CHUNK - 64, 2 * CHUNK, 3 * CHUNK + 7]),
    ),
    max_size=10,
)


def manifest_of(sizes):
    return Manifest.build((f"t{n}", torch.uint8, (size,)) for n, size in enumerate(sizes))


def random_bytes(size, seed):
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def address(array):
    return array.__array_interface__["data"][0] if array.size else 0


def reference(manifest, arrays):
    """The slot's bytes and digests, made the slow way."""
    slot = np.zeros(manifest.nbytes, dtype=np.uint8)
    for spec, array in zip(manifest.tensors, arrays, strict=True):
        slot[spec.offset : spec.offset + spec.nbytes] = array
    chunks = [slot[begin : begin + CHUNK] for begin in range(0, manifest.nbytes, CHUNK)]
    return slot, [xxhash.xxh3_64_intdigest(chunk.tobytes()) for chunk in chunks]


@pytest.fixture(params=[1, 3])
def copier(request):
    copier = Copier(request.param)
    yield copier
    copier.close()


@settings(deadline=None, max_examples=60)
@given(sizes, st.randoms(use_true_random=False), st.booleans())
def test_write_then_read(sizes, random, threads):
    """Any sizes, any order, any buckets: the bytes, and the digests, are those of the slow way."""
    manifest = manifest_of(sizes)
    geometry = Geometry(manifest)
    copier = Copier(3 if threads else 1)
    arrays = [random_bytes(size, seed) for seed, size in enumerate(sizes)]
    slot = bytearray(max(1, manifest.nbytes))
    writer = SlotWriter(geometry, memoryview(slot), copier)
    order = list(range(len(sizes)))
    random.shuffle(order)
    while order:
        cut = random.randint(1, len(order))
        bucket, order = order[:cut], order[cut:]
        writer.write(bucket, [address(arrays[n]) for n in bucket])
    expected, digests = reference(manifest, arrays)
    assert bytes(slot[: manifest.nbytes]) == expected.tobytes()
    assert writer.digests().tolist() == digests

    targets = [np.zeros(size, dtype=np.uint8) for size in sizes]
    addresses = np.array([address(array) for array in targets], dtype=np.int64)
    assert copier.read(geometry, memoryview(slot), addresses, writer.digests()) == []
    for array, target in zip(arrays, targets, strict=True):
        assert array.tobytes() == target.tobytes()
    assert copier.verify(geometry, memoryview(slot), writer.digests(), range(len(digests))) == []
    copier.close()


@settings(deadline=None, max_examples=60)
@given(sizes)
def test_geometry(sizes):
    """Every byte of every tensor lies in one row, and every row in one chunk."""
    manifest = manifest_of(sizes)
    geometry = Geometry(manifest)
    assert geometry.chunks == -(-manifest.nbytes // CHUNK)
    covered = [0] * len(sizes)
    r = geometry.rows
    rows = zip(r.piece, r.in_slot, r.in_piece, r.length, strict=True)
    for tensor, in_slot, in_tensor, length in rows:
        assert length > 0
        assert in_slot == manifest.tensors[tensor].offset + in_tensor
        assert in_slot // CHUNK == (in_slot + length - 1) // CHUNK
        assert in_tensor == covered[tensor]
        covered[tensor] += length
    assert covered == sizes
    bounds = [geometry.bounds(chunk) for chunk in range(geometry.chunks)]
    assert [end for _, end in bounds[:-1]] == [begin for begin, _ in bounds[1:]]
    assert not bounds or (bounds[0][0], bounds[-1][1]) == (0, manifest.nbytes)


@settings(deadline=None, max_examples=60)
@given(sizes)
def test_the_chunks_of_a_tensor(sizes):
    """Exactly those that hold a byte of it: none for an empty tensor, wherever it lies."""
    manifest = manifest_of(sizes)
    geometry = Geometry(manifest)
    for number, spec in enumerate(manifest.tensors):
        held = {byte // CHUNK for byte in (spec.offset, spec.offset + spec.nbytes - 1)}
        held = set(range(min(held), max(held) + 1)) if spec.nbytes else set()
        assert set(geometry.chunks_of(number)) == held
        if held:
            assert number in geometry.tensors_in(sorted(held))


def test_tensors_in_chunks():
    geometry = Geometry(manifest_of([10, CHUNK, 0, 10, 2 * CHUNK]))
    assert geometry.tensors_in([0]) == [0, 1]
    assert geometry.tensors_in([1]) == [1, 3, 4]
    assert geometry.tensors_in([2, 3]) == [4]
    assert geometry.tensors_in([]) == []


def test_what_changed():
    manifest = manifest_of([10, CHUNK, 0, 10, 2 * CHUNK])
    geometry = Geometry(manifest)
    before = np.arange(geometry.chunks, dtype=np.uint64)

    def changed(*chunks):
        after = before.copy()
        after[list(chunks)] += 1
        return geometry.changed(before, after)

    assert changed() == 0
    assert changed(0) == 2
    assert changed(1) == 3
    assert changed(2) == 1
    assert changed(0, 1, 2, 3) == 4
    assert Geometry(manifest_of([])).changed(before[:0], before[:0]) == 0


def filled(copier, sizes, seed=0):
    manifest = manifest_of(sizes)
    geometry = Geometry(manifest)
    arrays = [random_bytes(size, seed + n) for n, size in enumerate(sizes)]
    slot = bytearray(manifest.nbytes)
    writer = SlotWriter(geometry, memoryview(slot), copier)
    writer.write(range(len(sizes)), [address(array) for array in arrays])
    return geometry, arrays, slot, writer.digests()


def test_a_wrong_chunk_is_found_and_not_copied(copier):
    """Every single flipped bit, padding included, is in exactly the chunk that is named."""
    sizes = [100, 3 * CHUNK, 5, CHUNK]
    geometry, _, slot, digests = filled(copier, sizes)
    for at in (0, 99, 110, CHUNK - 1, CHUNK, 2 * CHUNK + 5, len(slot) - 1):
        slot[at] ^= 4
        targets = [np.zeros(size, dtype=np.uint8) for size in sizes]
        addresses = np.array([address(array) for array in targets], dtype=np.int64)
        wrong = copier.read(geometry, memoryview(slot), addresses, digests)
        assert wrong == [at // CHUNK]
        assert copier.verify(geometry, memoryview(slot), digests, range(geometry.chunks)) == wrong
        others = [chunk for chunk in range(geometry.chunks) if chunk not in wrong]
        assert copier.verify(geometry, memoryview(slot), digests, others) == []
        begin = max(0, at // CHUNK * CHUNK - geometry.rows.in_slot[1])
        if at // CHUNK == 2:
            assert not targets[1][begin : begin + CHUNK].any()
        slot[at] ^= 4


def test_without_digests_anything_is_read(copier):
    sizes = [100, CHUNK]
    geometry, _, slot, _ = filled(copier, sizes)
    slot[3] ^= 1
    target = np.zeros(100, dtype=np.uint8)
    addresses = np.array([address(target), 0], dtype=np.int64)
    assert copier.read(geometry, memoryview(slot), addresses, None) == []
    assert target.tobytes() == slot[:100]


def test_only_what_was_asked_for_is_written(copier):
    sizes = [100, 2 * CHUNK, 50]
    geometry, arrays, slot, digests = filled(copier, sizes)
    frame = np.full(2 * CHUNK + 20, 7, dtype=np.uint8)
    addresses = np.array([0, address(frame) + 10, 0], dtype=np.int64)
    assert copier.read(geometry, memoryview(slot), addresses, digests) == []
    assert frame[10:-10].tobytes() == arrays[1].tobytes()
    assert (frame[:10] == 7).all()
    assert (frame[-10:] == 7).all()


def test_tensors_that_are_in_the_slot_already(copier):
    """Address 0: a cast was written there; it is digested, not copied over."""
    manifest = manifest_of([100, CHUNK])
    geometry = Geometry(manifest)
    slot = bytearray(manifest.nbytes)
    slot[:100] = b"x" * 100
    other = random_bytes(CHUNK, 0)
    writer = SlotWriter(geometry, memoryview(slot), copier)
    writer.write([0], [0])
    writer.write([1], [address(other)])
    assert slot[:100] == b"x" * 100
    assert writer.digests().tolist()[0] == xxhash.xxh3_64_intdigest(bytes(slot[:CHUNK]))


def test_a_failing_worker_is_heard(copier):
    def work(index):
        if index == 17:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        copier.each(40, work)
    done = []
    copier.each(40, done.append)
    assert sorted(done) == list(range(40))


def test_a_closed_copier_starts_again(copier):
    for _ in range(2):
        done = []
        copier.each(10, done.append)
        assert sorted(done) == list(range(10))
        copier.close()
        copier.close()


def test_threads_by_default():
    assert 1 <= Copier().threads <= 8
    assert Copier(5).threads == 5


@settings(max_examples=60, deadline=None)
@given(sizes, st.randoms(use_true_random=False), st.integers(2, 4))
def test_several_writers_fill_one_slot(sizes, random, writers):
    """Each byte by any of them: bytes and digests are those of one that writes everything."""
    manifest = manifest_of(sizes)
    geometry = Geometry(manifest)
    arrays = [random_bytes(size, seed) for seed, size in enumerate(sizes)]
    slot = bytearray(max(1, manifest.nbytes))
    shares = [[] for _ in range(writers)]
    for spec, array in zip(manifest.tensors, arrays, strict=True):
        cuts = sorted(random.randint(0, spec.nbytes) for _ in range(writers - 1))
        for share, low, high in zip(shares, [0, *cuts], [*cuts, spec.nbytes], strict=True):
            share.append((spec.offset + low, high - low, address(array) + low if high > low else 0))
    ends = [SlotWriter(geometry, memoryview(slot), Copier(1)) for _ in range(writers)]
    for writer, share in zip(ends, shares, strict=True):
        random.shuffle(share)
        columns = np.array(share, dtype=np.int64).reshape(-1, 3).T
        writer.write_pieces(columns[0], columns[1], columns[2])
    first, *others = ends
    for writer in others:
        first.adopt(*writer.digested())
    expected, digests = reference(manifest, arrays)
    assert bytes(slot[: manifest.nbytes]) == expected.tobytes()
    assert first.digests().tolist() == digests
