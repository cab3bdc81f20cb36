"""What is read while it is written: used when it is announced, and worth nothing before.

The device is the processor here, and the host's memory a tensor.
"""

import threading
import time

import numpy as np
import pytest
import torch
from xxhash import xxh3_64_intdigest

import weightsync as ws
from tests.conftest import WAIT
from tests.fakes import watched_windows
from weightsync.chunks import CHUNK, Geometry
from weightsync.deadline import Deadline
from weightsync.device import device_of
from weightsync.errors import CorruptError, DeadlineError
from weightsync.readahead import ReadAhead
from weightsync.selection import Selection
from weightsync.testing.processes import eventually
from weightsync.transport import Arriving, Memory
from weightsync.upload import Staging

CHUNKS = 8
MANIFEST = ws.Manifest.build(
    [(f"t{n}", torch.uint8, (CHUNK,)) for n in range(CHUNKS - 1)] + [("last", torch.uint8, (777,))]
)


class Slot(Memory):
    """A version's bytes, and their digests."""

    def __init__(self, number, attempt=None, verified=True):
        self.version = ws.Version(1, number)
        self.data = torch.randint(0, 256, (MANIFEST.nbytes,), dtype=torch.uint8)
        self.address, self.nbytes = self.data.data_ptr(), MANIFEST.nbytes
        self.attempt = 1000 + number if attempt is None else attempt
        pieces = [part.numpy() for part in torch.split(self.data, CHUNK)]
        digests = [xxh3_64_intdigest(piece) for piece in pieces]
        self.digests = np.array(digests, np.uint64) if verified else None

    def page_lock(self, device):
        return False

    def wrong(self, chunks):
        return CorruptError(f"chunks {chunks} are wrong")


class Writing(Arriving):
    def __init__(self, slot, written=0):
        self.version, self.manifest, self.attempt = slot.version, MANIFEST, slot.attempt
        self.memory, self.upto = slot, written

    def written(self):
        return self.upto


class Subscriber:
    """Shows one version that is being written; counts how often it is asked."""

    def __init__(self):
        self.shown, self.looks, self.error = None, 0, None

    def arriving(self):
        self.looks += 1
        if self.error is not None:
            raise self.error
        return self.shown


@pytest.fixture
def copied(monkeypatch):
    return watched_windows(monkeypatch)


@pytest.fixture
def subscriber():
    return Subscriber()


@pytest.fixture
def ahead(copied, subscriber):
    geometry = Geometry(MANIFEST)
    staging = Staging(
        device_of(torch.device("cpu")), geometry, Selection.everything(geometry.nbytes)
    )
    made = ReadAhead(subscriber, staging, MANIFEST.fingerprint)
    yield made
    made.close()
    assert not made._thread.is_alive()


def holds(ahead, slot):
    return ahead.staging.version == slot.version and ahead.staging.buffer.equal(slot.data)


def test_what_was_read_ahead_is_not_read_again(ahead, subscriber, copied):
    slot = Slot(1)
    subscriber.shown = writing = Writing(slot)
    for chunk in range(CHUNKS):
        writing.upto = min((chunk + 1) * CHUNK, MANIFEST.nbytes)
        eventually(lambda chunk=chunk: copied == list(range(chunk + 1)))
    assert ahead.staging.version is None
    ahead.take(slot, slot.version, Deadline(WAIT))
    assert holds(ahead, slot)
    assert copied == list(range(CHUNKS))


def test_what_comes_late_is_read_when_it_is_wanted(ahead, subscriber, copied):
    slot = Slot(1)
    subscriber.shown = writing = Writing(slot, 3 * CHUNK)
    eventually(lambda: len(copied) == 3)
    writing.upto = None
    eventually(lambda: ahead._following == 0)
    subscriber.shown = None
    ahead.take(slot, slot.version, Deadline(WAIT))
    assert holds(ahead, slot)
    assert copied == list(range(CHUNKS))


def test_a_sender_that_pauses_is_followed_again(ahead, subscriber, copied):
    slot = Slot(1)
    subscriber.shown = writing = Writing(slot, 3 * CHUNK)
    eventually(lambda: len(copied) == 3)
    subscriber.shown, writing.upto = None, None
    eventually(lambda: ahead._following == 0)
    subscriber.shown = Writing(slot, MANIFEST.nbytes)
    eventually(lambda: len(copied) == CHUNKS)
    ahead.take(slot, slot.version, Deadline(WAIT))
    assert holds(ahead, slot)
    assert copied == list(range(CHUNKS))


def test_whoever_wants_a_version_waits_for_its_end(ahead, subscriber, copied):
    slot = Slot(1)
    subscriber.shown = writing = Writing(slot, 3 * CHUNK)
    eventually(lambda: len(copied) == 3)
    timer = threading.Timer(0.1, lambda: setattr(writing, "upto", MANIFEST.nbytes))
    timer.start()
    ahead.take(slot, slot.version, Deadline(WAIT))
    timer.join()
    assert holds(ahead, slot)
    assert copied == list(range(CHUNKS))


def test_a_version_that_is_wanted_ends_another(ahead, subscriber, copied):
    other, slot = Slot(2), Slot(1)
    subscriber.shown = Writing(other, 3 * CHUNK)
    eventually(lambda: len(copied) == 3)
    ahead.take(slot, slot.version, Deadline(WAIT))
    assert holds(ahead, slot)
    time.sleep(0.02)  # some looks later
    assert holds(ahead, slot)
    assert len(copied) == 3 + CHUNKS


def test_a_version_stays_until_it_is_released(ahead, subscriber, copied):
    slot, after = Slot(1), Slot(2)
    ahead.take(slot, slot.version, Deadline(WAIT))
    subscriber.shown = Writing(after, MANIFEST.nbytes)
    time.sleep(0.02)
    assert holds(ahead, slot)
    ahead.take(slot, slot.version, Deadline(WAIT))
    assert len(copied) == CHUNKS
    ahead.release()
    eventually(lambda: len(copied) == 2 * CHUNKS)
    assert ahead.staging.version is None
    ahead.take(after, after.version, Deadline(WAIT))
    assert holds(ahead, after)
    assert len(copied) == 2 * CHUNKS


def test_a_version_that_was_read_ahead_and_overwritten_is_read_ahead_anew(
    ahead, subscriber, copied
):
    slot, after = Slot(1), Slot(2)
    subscriber.shown = Writing(after, MANIFEST.nbytes)
    eventually(lambda: len(copied) == CHUNKS)
    ahead.take(slot, slot.version, Deadline(WAIT))
    ahead.release()
    eventually(lambda: len(copied) == 3 * CHUNKS)


def test_the_bytes_of_another_attempt_are_not_used(ahead, subscriber, copied):
    """The sender wrote this version twice: what was read belongs to the time that failed."""
    slot = Slot(1, verified=False)
    failed = Slot(1, attempt=5)
    subscriber.shown = Writing(failed, MANIFEST.nbytes)
    eventually(lambda: len(copied) == CHUNKS)
    ahead.take(slot, slot.version, Deadline(WAIT))
    assert holds(ahead, slot)


def test_bytes_that_changed_after_they_were_read_are_found_and_read_again(
    ahead, subscriber, copied
):
    slot = Slot(1)
    right = slot.data.clone()
    slot.data[2 * CHUNK + 5] ^= 1
    slot.data[5 * CHUNK] ^= 1
    subscriber.shown = Writing(slot, MANIFEST.nbytes)
    eventually(lambda: len(copied) == CHUNKS and ahead._done)
    slot.data.copy_(right)
    ahead.take(slot, slot.version, Deadline(WAIT))
    assert holds(ahead, slot)
    assert copied[CHUNKS:] == [2, 5]


def test_wrong_bytes_are_refused_and_leave_nothing(ahead, subscriber):
    slot, after = Slot(1), Slot(2)
    slot.data[3 * CHUNK] ^= 1
    with pytest.raises(CorruptError, match=r"\[3\]"):
        ahead.take(slot, slot.version, Deadline(WAIT))
    assert ahead.staging.version is None
    subscriber.shown = Writing(after, MANIFEST.nbytes)
    eventually(lambda: ahead._done == after.attempt)  # nobody has to release what was refused
    ahead.take(after, after.version, Deadline(WAIT))
    assert holds(ahead, after)


def test_a_version_without_an_attempt_ends_what_is_read(ahead, subscriber, copied):
    """Of a transport that knows no attempts, beside one that does."""
    slot = Slot(1, attempt=0)
    subscriber.shown = Writing(Slot(2), 3 * CHUNK)
    eventually(lambda: len(copied) == 3)
    ahead.take(slot, slot.version, Deadline(WAIT))
    assert holds(ahead, slot)


def test_another_model_is_not_read(ahead, subscriber, copied):
    slot = Slot(1)
    subscriber.shown = writing = Writing(slot, MANIFEST.nbytes)
    writing.manifest = ws.Manifest.build([("other", torch.uint8, (3,))])
    assert not ahead.fits(writing.manifest)
    before = subscriber.looks
    eventually(lambda: subscriber.looks > before + 3)
    assert copied == []


def test_taking_has_a_deadline(ahead, subscriber, copied):
    """A copy that hangs: whoever wants a version is told, and the next one is told too."""
    slot, stuck = Slot(1), threading.Event()
    subscriber.shown = writing = Writing(Slot(2))
    writing.written = lambda: stuck.wait(WAIT) and None
    eventually(lambda: ahead._following)
    for _ in range(2):
        with pytest.raises(DeadlineError, match="read ahead"):
            ahead.take(slot, slot.version, Deadline(0.02))
    with pytest.raises(DeadlineError):
        ahead.take(slot, slot.version, Deadline(0))
    stuck.set()
    subscriber.shown = None
    ahead.take(slot, slot.version, Deadline(WAIT))
    assert holds(ahead, slot)


def test_too_late_for_all_of_it(ahead):
    slot = Slot(1)
    with pytest.raises(DeadlineError, match="0 of 8 windows"):
        ahead.take(slot, slot.version, Deadline(0))
    assert ahead.staging.version is None
    ahead.take(slot, slot.version, Deadline(WAIT))
    assert holds(ahead, slot)


@pytest.mark.parametrize("where", ["arriving", "written", "copy"])
def test_what_goes_wrong_on_the_way_costs_the_head_start_only(ahead, subscriber, where):
    slot, words = Slot(1), RuntimeError("broken")

    def fail(*args):
        raise words

    if where == "arriving":
        subscriber.error = words
    else:
        subscriber.shown = writing = Writing(slot, MANIFEST.nbytes)
        if where == "written":
            writing.written = fail
        else:
            slot.page_lock = fail
    before = subscriber.looks
    eventually(lambda: subscriber.looks > before)
    time.sleep(0.01)
    if where == "copy":
        del slot.page_lock
    ahead.take(slot, slot.version, Deadline(WAIT))
    assert holds(ahead, slot)
    assert ahead._thread.is_alive()


def test_it_ends_in_the_middle_of_a_version(ahead, subscriber, copied):
    subscriber.shown = Writing(Slot(1), 3 * CHUNK)
    eventually(lambda: len(copied) == 3)
    ahead.close()
    assert not ahead._thread.is_alive()
    ahead.close()


def test_it_ends_although_somebody_waits_in_vain(ahead, subscriber, copied):
    subscriber.shown = Writing(Slot(2), 3 * CHUNK)
    eventually(lambda: len(copied) == 3)
    closing = threading.Thread(target=ahead.close)
    closing.start()
    slot = Slot(1)
    ahead.take(slot, slot.version, Deadline(WAIT))
    closing.join(WAIT)
    assert not ahead._thread.is_alive()
    assert holds(ahead, slot)
