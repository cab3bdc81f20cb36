"""Versions read ahead out of another process's slots, whatever becomes of that process."""

import ctypes

import numpy as np
import pytest
import torch

import weightsync as ws
from tests.fakes import watched_windows
from tests.live.processes import (
    WAIT,
    PeerError,
    constants,
    eventually,
    publish,
    publish_until,
    send_from,
    value_of,
)
from weightsync.chunks import CHUNK, Geometry
from weightsync.deadline import Deadline
from weightsync.device import device_of
from weightsync.errors import VersionGoneError
from weightsync.readahead import ReadAhead
from weightsync.schemes.double_buffer import subscriber as module
from weightsync.selection import Selection
from weightsync.testing.roles import publish_haltingly, publish_made
from weightsync.testing.weights import Breaking
from weightsync.upload import Staging

WINDOWS = 8
NBYTES = WINDOWS * CHUNK


class Engine:
    """The half of an engine's worker that brings versions into its memory, read ahead or not."""

    def __init__(self, scheme, place="cpu"):
        self.subscriber, self._place = scheme.create_subscriber(), torch.device(place)
        self.subscriber.open(Deadline(WAIT))
        self.ahead = None

    def newest(self, after=None, timeout=WAIT):
        return self.subscriber.wait(after, Deadline(timeout))

    def take(self, version):
        """What the memory holds then: one number if it is a whole version."""
        with self.subscriber.snapshot(version, Deadline(WAIT)) as snapshot:
            if self.ahead is None:
                self._prepare(snapshot.manifest)
            self.ahead.take(snapshot.memory(), version, Deadline(WAIT))
            try:
                data = self.ahead.staging.buffer
                specs = snapshot.manifest.tensors
                held = {s.name: data[s.offset : s.offset + s.nbytes].view(s.dtype) for s in specs}
                return value_of(held)
            finally:
                self.ahead.release()

    def _prepare(self, manifest):
        geometry = Geometry(manifest)
        everything = Selection.everything(geometry.nbytes)
        staging = Staging(device_of(self._place), geometry, everything)
        self.ahead = ReadAhead(self.subscriber, staging, manifest.fingerprint)

    def close(self):
        if self.ahead is not None:
            self.ahead.close()
        self.subscriber.close()


@pytest.fixture
def copied(monkeypatch):
    monkeypatch.setattr(module, "_STILL", 0.2)
    return watched_windows(monkeypatch)


@pytest.fixture
def engine(copied):
    """Makes one; all end before the test does."""
    made = []

    def make(scheme):
        made.append(Engine(scheme))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def scheme(run_dir):
    return ws.DoubleBufferScheme(run_dir)


def test_half_of_a_version_is_here_before_it_is_whole(peer, engine, scheme, copied):
    trainer = peer()
    trainer.call(send_from, scheme, nbytes=NBYTES)
    trainer.call(publish, 1)
    reader = engine(scheme)
    first = reader.newest()
    assert reader.take(first) == 1
    copied.clear()
    trainer.start(publish_haltingly, 2, 0.15)
    eventually(lambda: len(copied) >= WINDOWS // 2)
    assert reader.newest(first, 0) is None  # nobody may know of it yet
    trainer.result()
    assert reader.take(reader.newest(first)) == 2
    assert sorted(copied) == list(range(WINDOWS))


@pytest.mark.parametrize("verify", [True, False])
def test_a_sender_killed_in_the_middle_leaves_nothing_that_counts(
    peer, engine, run_dir, copied, verify
):
    scheme = ws.DoubleBufferScheme(run_dir, verify=verify)
    trainer, reader = peer(), None
    trainer.call(send_from, scheme, nbytes=NBYTES)
    trainer.call(publish, 1)
    reader = engine(scheme)
    first = reader.newest()
    assert reader.take(first) == 1
    copied.clear()
    trainer.start(publish_haltingly, 2, 60)
    eventually(lambda: len(copied) >= WINDOWS // 2)
    trainer.kill()
    eventually(lambda: reader.subscriber.arriving() is None)
    assert reader.take(first) == 1  # still there, and not overwritten by half of the next
    again = peer()
    again.call(send_from, scheme, nbytes=NBYTES)
    again.call(publish, 2, 5)
    assert reader.take(reader.newest(first)) == 5


def breaking(value):
    return Breaking(constants(value, nbytes=NBYTES))


@pytest.mark.parametrize("verify", [True, False])
def test_a_second_attempt_at_a_version_is_not_mixed_with_the_first(
    peer, engine, run_dir, copied, verify
):
    scheme = ws.DoubleBufferScheme(run_dir, verify=verify)
    trainer = peer()
    trainer.call(send_from, scheme, nbytes=NBYTES)
    trainer.call(publish, 1)
    reader = engine(scheme)
    first = reader.newest()
    assert reader.take(first) == 1
    for value in (2, 3):
        with pytest.raises(PeerError, match="disk of the trainer"):
            trainer.call(publish_made, 2, breaking, value)
    trainer.call(publish, 2, 7)
    second = reader.newest(first)
    assert second.number == 2
    assert reader.take(second) == 7


def test_another_model_in_between_is_left_to_whoever_wants_it(peer, engine, scheme, copied):
    trainer = peer()
    trainer.call(send_from, scheme, nbytes=NBYTES)
    trainer.call(publish, 1)
    reader = engine(scheme)
    first = reader.newest()
    assert reader.take(first) == 1
    copied.clear()
    trainer.call(publish_made, 2, constants, 9, 2 * CHUNK)
    other = reader.newest(first)
    with reader.subscriber.snapshot(other, Deadline(WAIT)) as snapshot:
        assert not reader.ahead.fits(snapshot.manifest)
        trainer.call(publish_made, 3, constants, 9, 2 * CHUNK)
    assert copied == []
    trainer.call(publish, 4)
    assert reader.take(reader.newest(other)) == 4


def test_ten_thousand_looks_while_another_process_writes(peer, engine, run_dir):
    """R2: what was said to be there is there, and what is taken is exactly one version."""
    scheme = ws.DoubleBufferScheme(run_dir, slots=3)
    trainer = peer()
    trainer.call(send_from, scheme, nbytes=CHUNK // 4)
    trainer.call(publish, 1)
    reader = engine(scheme)
    held = reader.newest()
    assert reader.take(held) == 1
    looks = taken = seen = 0
    trainer.start(publish_until, 1.5, 2)
    while looks < 10_000 or not trainer.answered():
        looks += 1
        arriving = reader.subscriber.arriving()
        written = arriving.written() if arriving else None
        if arriving and written:
            data = np.frombuffer(ctypes.string_at(arriving.memory.address, written), np.int32)
            if arriving.written() is not None:  # the same attempt still
                seen += 1
                assert set(np.unique(data)) == {arriving.version.number}
        if looks % 20 == 0 and (version := reader.newest(held, 0)) is not None:
            try:
                assert reader.take(version) == version.number
            except VersionGoneError:
                continue
            held, taken = version, taken + 1
    last, _ = trainer.result()
    assert taken
    assert seen
    newest = reader.newest()
    assert newest.number == last
    assert reader.take(newest) == last
