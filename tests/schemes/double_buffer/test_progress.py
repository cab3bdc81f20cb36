"""How much of a slot is written, as its writer says it."""

import random

import pytest

from weightsync.errors import NoRoomError
from weightsync.files import Directory
from weightsync.schemes.double_buffer import layout
from weightsync.schemes.double_buffer.progress import Arrived, Progress, ProgressView
from weightsync.version import Version


@pytest.fixture
def generation(tmp_path):
    return Directory.open(str(tmp_path / "generation"), create=True)


def test_a_reader_sees_what_the_writer_says(generation):
    progress = Progress(generation, 3)
    view = ProgressView.open(generation, 3)
    assert view.look() is None
    attempt = progress.begin(Version(5, 7))
    assert view.look() == (attempt, (5, 7), 0)
    progress.wrote(100)
    progress.wrote(90)
    assert view.look() == (attempt, (5, 7), 100)
    progress.give_up()
    assert view.look() is None
    assert progress.begin(Version(5, 7)) not in (0, attempt)
    assert view.look()[2] == 0


def test_a_version_of_any_length_is_written(generation):
    progress = Progress(generation, 0)
    assert progress.begin(Version((1 << 70) + 3, 1 << 64)) > 0
    assert ProgressView.open(generation, 0).look()[1] == (3, 0)


def test_its_file_is_as_the_format_says(generation):
    attempt = Progress(generation, 0).begin(Version(1 << 41, 2))
    data = generation.read("slot0.progress", 64)
    assert len(data) == 64
    numbers = [int.from_bytes(data[at : at + 8], "little") for at in (0, 8, 16, 24)]
    assert numbers == [attempt, 1 << 41, 2, 0]
    assert layout.is_generation_file("slot0.progress")


def test_a_new_writer_takes_back_what_a_dead_one_said(generation):
    Progress(generation, 0).begin(Version(1, 2))
    view = ProgressView.open(generation, 0)
    Progress(generation, 0)
    assert view.look() is None


def test_too_little_room_is_said(generation, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(NoRoomError, match=r"slot0\.progress: No space left"):
        Progress(generation, 0)


@pytest.mark.parametrize("seed", range(5))
def test_what_has_arrived_counts_once_all_before_it_has(generation, seed):
    """In any order; padding, and tensors without bytes, are not waited for."""
    generator = random.Random(seed)
    progress = Progress(generation, 0)
    progress.begin(Version(1, 1))
    view = ProgressView.open(generation, 0)
    pieces, end = [], 0
    for _ in range(30):
        begin = -(-end // 64) * 64
        end = begin + generator.choice([0, 0, 1, 64, 100, 1 << 20])
        pieces.append((begin, end))
    nbytes = end
    arrived = Arrived(progress, nbytes)
    order = generator.sample(pieces, len(pieces))
    for count, piece in enumerate(order):
        arrived.add(*piece)
        missing = [begin for begin, end in order[count + 1 :] if end > begin]
        there = min(missing, default=nbytes)
        assert view.look()[2] == min(there, nbytes)
