"""Bytes on their way from host memory into a device's: all of them, verified, in whatever order.

The device is the processor here, either as it is or as one that does nothing before it is waited
for, as a GPU may.
"""

import threading
from collections import deque

import numpy as np
import pytest
import torch
from xxhash import xxh3_64_intdigest

import weightsync as ws
from tests.conftest import WAIT
from weightsync import upload
from weightsync.chunks import CHUNK, Geometry
from weightsync.deadline import Deadline
from weightsync.device import Lane, Mark, Moves
from weightsync.device.host import HostDevice
from weightsync.errors import CorruptError, DeadlineError, NoRoomError
from weightsync.selection import Selection
from weightsync.transport import Arriving, Memory
from weightsync.upload import Staging, Through, merged

VERSION = ws.Version(1, 1)


class LazyMark(Mark):
    def __init__(self, lane, upto):
        self._lane, self._upto = lane, upto

    def done(self):
        return self._lane.finished >= self._upto

    def wait(self):
        self._lane.work(self._upto)


class LazyLane(Lane):
    """Does what was queued when somebody waits for it, and no more than that."""

    def __init__(self, plain):
        self._plain, self._queue = plain, deque()
        self.finished = self.queued = self.most = 0

    def put(self, action):
        self._queue.append(action)
        self.queued += 1
        self.most = max(self.most, len(self._queue))

    def work(self, upto):
        while self.finished < upto:
            self._queue.popleft()()
            self.finished += 1

    def copy(self, *what):
        self.put(lambda: self._plain.copy(*what))

    def copy_rows(self, *what):
        self.put(lambda: self._plain.copy_rows(*what))

    def empty(self, count):
        return self._plain.empty(count)

    def after(self, mark):
        self.put(mark.wait)

    def mark(self):
        return LazyMark(self, self.queued)


class LazyMoves(Moves):
    def __init__(self, plain):
        self._plain = plain

    def run(self, lane, base=0):
        lane.put(lambda: self._plain.run(None, base))


class LazyDevice(HostDevice):
    def __init__(self):
        super().__init__()
        self.lanes = []

    def lane(self):
        self.lanes.append(LazyLane(super().lane()))
        return self.lanes[-1]

    def empty(self, nbytes):
        return super().empty(nbytes).fill_(0x55)

    def digests(self, lane, address, count, into):
        lane.put(lambda: HostDevice.digests(self, None, address, count, into))

    def moves(self, into, out_of, length, gentle=False):
        return LazyMoves(super().moves(into, out_of, length, gentle))


class Slot(Memory):
    """A version's bytes, and their digests."""

    def __init__(self, manifest, seed=0, attempt=1, verified=True):
        self.manifest = manifest
        self.data = np.random.default_rng(seed).integers(0, 256, manifest.nbytes, dtype=np.uint8)
        self.address = self.data.__array_interface__["data"][0]
        self.nbytes, self.attempt = manifest.nbytes, attempt
        digests = [
            xxh3_64_intdigest(self.data[at : at + CHUNK].tobytes())
            for at in range(0, self.nbytes, CHUNK)
        ]
        self.digests = np.array(digests, dtype=np.uint64) if verified else None

    def page_lock(self, device):
        return False

    def wrong(self, chunks):
        return CorruptError(f"chunks {chunks} are wrong")


class Writing(Arriving):
    """Grows by a step at every look, up to an end; then does what it is told to."""

    def __init__(self, memory, step=CHUNK, until=None, then=None):
        self.version, self.manifest, self.attempt = VERSION, memory.manifest, memory.attempt
        self.memory, self._step = memory, step
        self._upto, self._until, self._then = 0, until or memory.nbytes, then

    def written(self):
        if self._upto >= self._until and self._then is not None:
            return self._then()
        self._upto = min(self._upto + self._step, self._until)
        return self._upto


class Few(Deadline):
    """Is over after so many looks at it."""

    def __init__(self, looks):
        super().__init__(1)
        self.looks = looks

    @property
    def expired(self):
        self.looks -= 1
        return self.looks < 0


@pytest.fixture(autouse=True)
def short_windows(monkeypatch):
    monkeypatch.setattr(upload, "WINDOW", 2 * CHUNK)


@pytest.fixture(params=[HostDevice, LazyDevice])
def device(request):
    return request.param()


def manifest_of(*sizes):
    return ws.Manifest.build((f"t{n}", torch.uint8, (size,)) for n, size in enumerate(sizes))


def random_manifest(generator):
    sizes = [1, 77, 64, 4096, CHUNK - 64, CHUNK, CHUNK + 1, 3 * CHUNK + 9, 300_001]
    return manifest_of(*generator.choice(sizes, 6).tolist(), *sizes[:4], *sizes[6:])


def pieces_of(manifest, share, generator):
    """Offsets and lengths of parts of tensors: whole ones, blocks of rows, columns."""
    pairs = []
    for spec in manifest.tensors:
        kind = generator.integers(3) if share < 1 else 0
        if kind == 0 and generator.random() <= share:
            pairs.append((spec.offset, spec.nbytes))
        elif kind == 1:
            half = spec.nbytes // 2
            pairs.append((spec.offset + half // 2, half))
        elif kind == 2 and spec.nbytes > 4096:
            pairs += [(spec.offset + at, 512) for at in range(0, spec.nbytes - 1024, 1024)]
    return np.array(pairs, dtype=np.int64).T


class Places:
    """Memory with a place for each of some pieces, in another order than theirs."""

    def __init__(self, offset, length, generator):
        self.offset, self.length = offset, length
        order = generator.permutation(len(length))
        room = length + generator.integers(0, 40, len(length))
        self.begin = np.zeros(len(length), dtype=np.int64)
        self.begin[order] = np.cumsum(room[order]) - room[order]
        self.data = np.full(int(room.sum()), 7, dtype=np.uint8)
        self.into = self.begin + self.data.__array_interface__["data"][0]

    def through(self, device, manifest):
        selection = Selection.of(self.offset, self.length, manifest.nbytes)
        rows = merged(self.into, self.offset, self.length)
        return Through(device, Geometry(manifest), selection, *rows)

    def assert_filled(self, slot):
        wanted = np.full_like(self.data, 7)
        for begin, offset, length in zip(self.begin, self.offset, self.length, strict=True):
            wanted[begin : begin + length] = slot.data[offset : offset + length]
        assert (self.data == wanted).all()

    @property
    def untouched(self):
        return bool((self.data == 7).all())


@pytest.mark.parametrize("share", [1, 0.5, 0.1])
@pytest.mark.parametrize("seed", range(3))
def test_bytes_come_to_their_places(seed, share, device):
    generator = np.random.default_rng(seed)
    manifest = random_manifest(generator)
    places = Places(*pieces_of(manifest, share, generator), generator)
    through = places.through(device, manifest)
    for number in range(2):
        slot = Slot(manifest, number)
        through.run(slot, Deadline(WAIT))
        places.assert_filled(slot)


@pytest.mark.parametrize("share", [1, 0.5, 0.1])
@pytest.mark.parametrize("seed", range(3))
def test_bytes_are_staged_and_found_again(seed, share, device):
    generator = np.random.default_rng(seed)
    manifest = random_manifest(generator)
    offset, length = pieces_of(manifest, share, generator)
    offset, length = offset[length > 0], length[length > 0]
    selection = Selection.of(offset, length, manifest.nbytes)
    staging = Staging(device, Geometry(manifest), selection)
    for number in range(2):
        slot = Slot(manifest, number, attempt=number)
        staging.take(slot, VERSION, Deadline(WAIT))
        assert staging.version == VERSION
        begins = staging.addresses(offset) - staging.buffer.data_ptr()
        held = staging.buffer.numpy()
        for begin, at, count in zip(begins, offset, length, strict=True):
            assert (held[begin : begin + count] == slot.data[at : at + count]).all()


def whole(device, manifest):
    generator = np.random.default_rng(0)
    places = Places(*pieces_of(manifest, 1, generator), generator)
    return places, places.through(device, manifest)


LAYOUT = manifest_of(3 * CHUNK, 100, CHUNK, 2 * CHUNK, 12_345)
"""Six whole chunks, and one that is not."""


@pytest.mark.parametrize("at", [0, 2 * CHUNK + 1, 5 * CHUNK, LAYOUT.nbytes - 1])
def test_a_bit_that_is_wrong_is_found_where_it_arrives(at, device):
    places, through = whole(device, LAYOUT)
    slot = Slot(LAYOUT)
    slot.data[at] ^= 1
    with pytest.raises(CorruptError, match=rf"\[{at // CHUNK}\]"):
        through.run(slot, Deadline(WAIT))
    slot.data[at] ^= 1
    through.run(slot, Deadline(WAIT))
    places.assert_filled(slot)
    staging = Staging(device, Geometry(LAYOUT), Selection.everything(LAYOUT.nbytes))
    slot.data[at] ^= 1
    with pytest.raises(CorruptError, match=rf"\[{at // CHUNK}\]"):
        staging.take(slot, VERSION, Deadline(WAIT))
    assert staging.version is None


@pytest.mark.parametrize("at", [0, LAYOUT.nbytes - 1])
def test_what_the_bus_made_of_the_bytes_is_what_is_digested(at, monkeypatch):
    """The slot is right; what came to the device is not."""
    device = HostDevice()
    copy = upload._copy

    def flipping(lane, block, base, source):
        copy(lane, block, base, source)
        if block.begin <= at < block.end:
            device.tensor_at(base + block.place + at - block.begin, 1).bitwise_xor_(1)

    monkeypatch.setattr(upload, "_copy", flipping)
    _, through = whole(device, LAYOUT)
    with pytest.raises(CorruptError, match=rf"\[{at // CHUNK}\]"):
        through.run(Slot(LAYOUT), Deadline(WAIT))


def half(device):
    """A part of one tensor, in the chunks 3 and 4, and a part of the last one, in chunk 6."""
    offset = np.array([LAYOUT.tensors[2].offset + 1000, LAYOUT.tensors[4].offset])
    places = Places(offset, np.array([CHUNK - 1000, 5]), np.random.default_rng(0))
    return places, places.through(device, LAYOUT)


@pytest.mark.parametrize("chunk", [3, 4, 6])
def test_parts_of_chunks_are_verified_before_any_is_written(chunk, device):
    places, through = half(device)
    slot = Slot(LAYOUT)
    slot.data[chunk * CHUNK] ^= 1
    with pytest.raises(CorruptError, match=rf"\[{chunk}\]"):
        through.run(slot, Deadline(WAIT))
    assert places.untouched
    selection = Selection.of(places.offset, places.length, LAYOUT.nbytes)
    staging = Staging(device, Geometry(LAYOUT), selection)
    with pytest.raises(CorruptError, match=rf"\[{chunk}\]"):
        staging.take(slot, VERSION, Deadline(WAIT))
    assert staging.version is None
    assert (staging.buffer.numpy()[1000 % 16 :][:64] != slot.data[places.offset[0] :][:64]).any()


def test_chunks_that_nobody_needs_are_not_looked_at(device):
    places, through = half(device)
    slot = Slot(LAYOUT)
    slot.data[[0, 5 * CHUNK + 5]] ^= 1
    through.run(slot, Deadline(WAIT))
    places.assert_filled(slot)


def test_what_has_no_digests_is_taken_as_it_is(device):
    for places, through in (whole(device, LAYOUT), half(device)):
        slot = Slot(LAYOUT, verified=False)
        through.run(slot, Deadline(WAIT))
        places.assert_filled(slot)


def test_a_deadline_ends_it_between_two_windows(device):
    places, through = whole(device, LAYOUT)
    with pytest.raises(DeadlineError, match="0 of 4 windows"):
        through.run(Slot(LAYOUT), Few(0))
    assert places.untouched
    with pytest.raises(DeadlineError, match="2 of 4 windows"):
        through.run(Slot(LAYOUT), Few(2))
    assert not places.untouched
    slot = Slot(LAYOUT)
    through.run(slot, Deadline(WAIT))
    places.assert_filled(slot)


def test_what_was_staged_before_a_deadline_is_not_read_again(device):
    staging = Staging(device, Geometry(LAYOUT), Selection.everything(LAYOUT.nbytes))
    slot = Slot(LAYOUT)
    with pytest.raises(DeadlineError, match="3 of 4 windows"):
        staging.take(slot, VERSION, Few(3))
    assert staging.version is None
    staging.take(slot, VERSION, Few(1))
    assert (staging.buffer.numpy() == slot.data).all()


def test_a_few_windows_are_queued_at_a_time(monkeypatch):
    """What is queued cannot be taken back: a deadline would have to wait for all of it."""
    monkeypatch.setattr(upload, "WINDOW", CHUNK)
    device, manifest = LazyDevice(), manifest_of(40 * CHUNK)
    _, through = whole(device, manifest)
    slot = Slot(manifest)
    through.run(slot, Deadline(WAIT))
    staging = Staging(device, Geometry(manifest), Selection.everything(manifest.nbytes))
    staging.take(slot, VERSION, Deadline(WAIT))
    for lane in device.lanes:
        assert lane.queued == lane.finished >= 40
        assert lane.most <= 4 * (upload._QUEUED + 2)


@pytest.mark.parametrize("step", [1000, CHUNK, 5 * CHUNK])
def test_a_version_is_followed_while_it_grows(step, device, monkeypatch):
    monkeypatch.setattr(upload, "_LOOK", 0)
    staging = Staging(device, Geometry(LAYOUT), Selection.everything(LAYOUT.nbytes))
    slot = Slot(LAYOUT)
    assert staging.follow(Writing(slot, step), lambda: False)
    assert staging.version is None  # it was never announced
    staging.take(slot, VERSION, Few(0))  # nothing is left to be read
    assert staging.version == VERSION
    assert (staging.buffer.numpy() == slot.data).all()


def test_only_what_is_written_is_read(device, monkeypatch):
    """What lies behind changes until the very moment at which it is said to be there."""
    monkeypatch.setattr(upload, "_LOOK", 0)
    staging = Staging(device, Geometry(LAYOUT), Selection.everything(LAYOUT.nbytes))
    slot = Slot(LAYOUT)
    right, writing = slot.data.copy(), Writing(slot)
    slot.data[:] = 0
    plain = writing.written

    def written():
        upto = plain()
        slot.data[:upto] = right[:upto]
        return upto

    writing.written = written
    assert staging.follow(writing, lambda: False)
    assert (staging.buffer.numpy() == right).all()


def assert_kept(staging, places, slot):
    begins = staging.addresses(places.offset) - staging.buffer.data_ptr()
    for begin, at, count in zip(begins, places.offset, places.length, strict=True):
        assert (staging.buffer.numpy()[begin : begin + count] == slot.data[at : at + count]).all()


def test_parts_of_a_version_are_followed(device):
    places, _ = half(device)
    selection = Selection.of(places.offset, places.length, LAYOUT.nbytes)
    staging = Staging(device, Geometry(LAYOUT), selection)
    slot = Slot(LAYOUT)
    assert staging.follow(Writing(slot), lambda: False)
    slot.data[3 * CHUNK] ^= 1
    with pytest.raises(CorruptError):
        staging.take(slot, VERSION, Deadline(WAIT))
    slot.data[3 * CHUNK] ^= 1
    staging.take(slot, VERSION, Deadline(WAIT))
    assert_kept(staging, places, slot)


def test_parts_that_were_read_too_early_are_not_kept(device):
    """Whoever says that more is written than is there: only digests are believed."""
    places, _ = half(device)
    selection = Selection.of(places.offset, places.length, LAYOUT.nbytes)
    staging = Staging(device, Geometry(LAYOUT), selection)
    slot = Slot(LAYOUT)
    right = slot.data.copy()
    slot.data[:] = 0
    assert staging.follow(Writing(slot, LAYOUT.nbytes), lambda: False)
    slot.data[:] = right
    staging.take(slot, VERSION, Deadline(WAIT))
    assert (staging.version, staging.attempt) == (VERSION, slot.attempt)
    assert_kept(staging, places, slot)
    # From now on it is known that there is no use in it.
    assert not staging.follow(Writing(Slot(LAYOUT, seed=1, attempt=2)), lambda: False)
    assert staging.version == VERSION


def test_parts_that_are_not_verified_are_read_once(device, monkeypatch):
    places, _ = half(device)
    selection = Selection.of(places.offset, places.length, LAYOUT.nbytes)
    staging = Staging(device, Geometry(LAYOUT), selection)
    slot = Slot(LAYOUT, verified=False)
    assert staging.follow(Writing(slot), lambda: False)
    monkeypatch.setattr(Staging, "_fetch", None)
    staging.take(slot, VERSION, Deadline(WAIT))
    assert_kept(staging, places, slot)


def test_following_ends_when_it_is_told_to(device):
    staging = Staging(device, Geometry(LAYOUT), Selection.everything(LAYOUT.nbytes))
    slot, over = Slot(LAYOUT), threading.Event()
    threading.Timer(0.05, over.set).start()
    assert not staging.follow(Writing(slot, until=3 * CHUNK), over.is_set)
    assert not staging.follow(Writing(slot), lambda: True)
    staging.take(slot, VERSION, Few(3))  # one window of four is there
    assert (staging.buffer.numpy() == slot.data).all()


def test_following_ends_with_the_sender(device):
    staging = Staging(device, Geometry(LAYOUT), Selection.everything(LAYOUT.nbytes))
    gone = Writing(Slot(LAYOUT), until=3 * CHUNK, then=lambda: None)
    assert not staging.follow(gone, lambda: False)


@pytest.mark.parametrize("verified", [True, False])
def test_what_was_followed_of_another_attempt_is_not_used(verified, device):
    staging = Staging(device, Geometry(LAYOUT), Selection.everything(LAYOUT.nbytes))
    assert staging.follow(Writing(Slot(LAYOUT, seed=1, attempt=1)), lambda: False)
    slot = Slot(LAYOUT, seed=2, attempt=2, verified=verified)
    with pytest.raises(DeadlineError, match="0 of 4"):
        staging.take(slot, VERSION, Few(0))
    staging.take(slot, VERSION, Few(4))
    assert (staging.buffer.numpy() == slot.data).all()


def test_no_attempt_is_like_no_other(device):
    staging = Staging(device, Geometry(LAYOUT), Selection.everything(LAYOUT.nbytes))
    for seed in (1, 2):
        slot = Slot(LAYOUT, seed, attempt=0, verified=False)
        staging.take(slot, VERSION, Few(4))
        assert (staging.buffer.numpy() == slot.data).all()


def test_an_interrupt_leaves_nothing_under_way():
    device = LazyDevice()
    _, through = whole(device, LAYOUT)

    class Interrupting(Few):
        @property
        def expired(self):
            if super().expired:
                raise KeyboardInterrupt
            return False

    with pytest.raises(KeyboardInterrupt):
        through.run(Slot(LAYOUT), Interrupting(2))
    assert all(lane.queued == lane.finished for lane in device.lanes)


def test_too_little_room_is_said_with_numbers(monkeypatch):
    device = HostDevice()

    def none(nbytes):
        raise NoRoomError(f"no room for {nbytes:,} bytes")

    monkeypatch.setattr(device, "empty", none)
    with pytest.raises(NoRoomError, match=f"{LAYOUT.nbytes:,}"):
        Staging(device, Geometry(LAYOUT), Selection.everything(LAYOUT.nbytes))
    with pytest.raises(NoRoomError, match=f"{upload.WINDOW:,}"):
        whole(device, LAYOUT)


def test_rows_that_go_on_where_one_ends_are_joined():
    into, offset, length = merged(
        np.array([20, 100, 10, 40]), np.array([10, 40, 0, 30]), np.array([20, 5, 10, 10])
    )
    assert into.tolist() == [10, 100]
    assert offset.tolist() == [0, 40]
    assert length.tolist() == [40, 5]
    assert [len(each) for each in merged(*np.zeros((3, 0), dtype=np.int64))] == [0, 0, 0]
