"""A version that is being written, as its readers see it: how far it is, and when it is over."""

import ctypes
import os

import pytest
import torch

import weightsync as ws
from tests.conftest import WAIT, as_bytes
from weightsync.deadline import Deadline
from weightsync.device import device_of
from weightsync.errors import SourceError, WeightSyncError
from weightsync.files import Directory
from weightsync.schemes.double_buffer import subscriber as module
from weightsync.schemes.double_buffer.progress import Progress

NAMES = [f"t{number}" for number in range(8)]
SIZE = 307_200


def weights(value):
    return {name: torch.full((SIZE,), value, dtype=torch.uint8) for name in NAMES}


class Stream:
    """Weights that come one by one; ``look(number)`` is called before each, the first pass over."""

    def __init__(self, value, look):
        self._weights, self._look, self._passes = weights(value), look, 0

    def __call__(self):
        self._passes += 1
        for number, entry in enumerate(self._weights.items()):
            if self._passes > 1:
                self._look(number)
            yield entry


@pytest.fixture
def sender(ends):
    return ends.sender()


@pytest.fixture
def first(sender):
    return sender.update_weights(weights(1), version=1).version


@pytest.fixture
def reader(ends, first):
    """One of an engine's workers, which was told of the first version."""
    reader = ends.scheme().create_reader(0, 1)
    reader.snapshot(first, Deadline(WAIT)).close()
    yield reader
    reader.close()


@pytest.fixture
def generation(ends, first):
    return Directory.open(ends.path).subdirectory("generation-0001")


def test_nothing_arrives_while_nothing_is_written(ends, sender):
    reader = ends.scheme().create_reader(0, 1)
    assert reader.arriving() is None
    version = sender.update_weights(weights(1), version=1).version
    reader.snapshot(version, Deadline(WAIT)).close()
    assert reader.arriving() is None
    reader.close()
    assert reader.arriving() is None


def test_it_is_seen_as_it_grows_and_only_bytes_that_stay(ends, sender, reader, first):
    seen = []

    def look(number):
        arriving = reader.arriving()
        written = arriving.written()
        data = ctypes.string_at(arriving.memory.address, written)
        sent = {data[n * SIZE] for n in range(number) if len(data) > n * SIZE}
        seen.append((arriving.version, arriving.attempt, written, sent))

    second = sender.update_weights(Stream(2, look), version=2).version
    assert {version for version, *_ in seen} == {second}
    assert len({attempt for _, attempt, *_ in seen}) == 1
    lengths = [written for *_, written, _ in seen]
    assert lengths == sorted(lengths)
    assert lengths[0] == 0
    assert lengths[-1] > 5 * SIZE
    assert all(sent <= {2} for *_, sent in seen)
    assert reader.arriving().version == second
    with reader.snapshot(second, Deadline(WAIT)) as snapshot:
        assert snapshot.memory().attempt == seen[0][1]
    assert reader.arriving() is None


def test_what_was_written_in_vain_is_over(sender, reader):
    found = []

    def fail(number):
        if number == 4:
            found.append(reader.arriving())
            raise RuntimeError("the disk of the trainer is gone")

    with pytest.raises((SourceError, RuntimeError)):
        sender.update_weights(Stream(2, fail), version=2)
    assert found[0].written() is None
    assert reader.arriving() is None


def test_each_attempt_at_a_version_is_another(sender, reader):
    found = []

    def fail(number):
        if number == 4:
            found.append(reader.arriving())
            raise RuntimeError("again")

    for _ in range(2):
        with pytest.raises((SourceError, RuntimeError)):
            sender.update_weights(Stream(2, fail), version=2)
    version = sender.update_weights(weights(2), version=2).version
    assert [each.version for each in found] == [version] * 2
    with reader.snapshot(version, Deadline(WAIT)) as snapshot:
        attempts = [each.attempt for each in found] + [snapshot.memory().attempt]
    assert len(set(attempts)) == 3
    assert 0 not in attempts
    assert [each.written() for each in found] == [None, None]


def test_a_sender_that_stands_still_is_not_waited_for(generation, reader, first, monkeypatch):
    monkeypatch.setattr(module, "_STILL", 0.05)
    progress = Progress(generation, 1)
    progress.begin(ws.Version(first.epoch, 2))
    arriving = reader.arriving()
    assert arriving.written() == 0
    assert Deadline(WAIT).wait(lambda: reader.arriving() is None or None)
    assert Deadline(WAIT).wait(lambda: arriving.written() is None or None)
    progress.wrote(1000)
    assert reader.arriving().written() == 1000
    progress.wrote(10_000_000)  # whole: there is nothing to wait for
    arriving = reader.arriving()
    arriving.written()
    assert Deadline(0.15).wait(lambda: arriving.written() is None or None) is None
    assert reader.arriving() is not None


def test_one_that_stands_still_does_not_hide_another(ends, monkeypatch):
    """The newest is shown, whichever slots others were left in."""
    monkeypatch.setattr(module, "_STILL", 0.05)
    sender = ends.sender(scheme=ends.scheme(slots=4))
    first = sender.update_weights(weights(1), version=1).version
    reader = ends.scheme().create_reader(0, 1)
    reader.snapshot(first, Deadline(WAIT)).close()
    generation = Directory.open(ends.path).subdirectory("generation-0001")
    slots = {}
    for slot, number in ((1, 3), (2, 4), (3, 2)):
        slots[number] = Progress(generation, slot)
        slots[number].begin(ws.Version(first.epoch, number))
    assert reader.arriving().version.number == 4
    growing = iter(range(1, 100_000))

    def look():
        slots[2].wrote(next(growing))
        return reader.arriving()

    assert Deadline(WAIT).wait(lambda: look().version.number == 2 or None)
    for _ in range(100):
        assert look().version.number == 2
    reader.close()


def test_what_was_read_already_is_not_shown(generation, reader, first):
    Progress(generation, 1).begin(first)
    assert reader.arriving() is None


@pytest.mark.parametrize(
    "content", [b"", b"x", b"\xff" * 64, b"\xff" * 4096, bytes(range(64))], ids=len
)
def test_garbage_is_harmless(ends, generation, first, content):
    for slot in range(2):
        with open(f"{ends.path}/generation-0001/slot{slot}.progress", "r+b") as file:
            file.truncate(0)
            file.write(content)
    reader = ends.scheme().create_reader(0, 1)
    with reader.snapshot(first, Deadline(WAIT)) as snapshot:
        arriving = reader.arriving()
        if len(content) == 64:
            assert arriving.memory.nbytes == snapshot.manifest.nbytes
        else:
            assert arriving is None
    reader.close()


@pytest.mark.parametrize("how", ["removed", "directory", "link"])
def test_without_its_file_nothing_arrives(ends, first, how):
    for slot in range(2):
        path = f"{ends.path}/generation-0001/slot{slot}.progress"
        os.unlink(path)
        if how == "directory":
            os.mkdir(path)
        elif how == "link":
            os.symlink("/dev/zero", path)
    reader = ends.scheme().create_reader(0, 1)
    reader.snapshot(first, Deadline(WAIT)).close()
    assert reader.arriving() is None
    reader.close()
    for slot in range(2):
        path = f"{ends.path}/generation-0001/slot{slot}.progress"
        if how == "directory":
            os.rmdir(path)


class TestMemory:
    def test_it_is_the_whole_layout(self, reader, first):
        with reader.snapshot(first, Deadline(WAIT)) as snapshot:
            memory = snapshot.memory()
            assert memory.nbytes == snapshot.manifest.nbytes
            assert len(memory.digests) == -(-memory.nbytes // (1 << 20))
            for spec in snapshot.manifest.tensors:
                data = ctypes.string_at(memory.address + spec.offset, spec.nbytes)
                assert data == bytes(as_bytes(snapshot.tensor(spec.name)).numpy())
            assert not memory.page_lock(device_of(torch.device("cpu")))
        with pytest.raises(WeightSyncError, match="closed"):
            snapshot.memory()

    def test_wrong_chunks_are_said_by_name(self, reader, first):
        with reader.snapshot(first, Deadline(WAIT)) as snapshot:
            words = str(snapshot.memory().wrong([0]))
        assert "'t0', 't1', 't2', 't3'" in words
        assert "'t4'" not in words
        assert str(first) in words

    def test_without_verification_there_are_no_digests(self, ends, first):
        reader = ends.scheme(verify=False).create_reader(0, 1)
        with reader.snapshot(first, Deadline(WAIT)) as snapshot:
            assert snapshot.memory().digests is None
            assert snapshot.memory().attempt
        reader.close()
