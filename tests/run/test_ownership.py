"""A run has one sender at a time, and each begins a later epoch."""

import gc
import json

import pytest

from weightsync.deadline import Deadline
from weightsync.errors import SenderBusyError, VersionError, WeightSyncError
from weightsync.files import Directory
from weightsync.report import ReceiverReport
from weightsync.run.ownership import Ownership, epoch_of, has_ended, owner_of
from weightsync.run.records import report_to_json
from weightsync.version import Version


def take(path, **options):
    ownership = Ownership(str(path), **options)
    with ownership.taking(Deadline(1)):
        ownership.begin()
    return ownership


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run"


def test_a_second_sender_waits_for_the_first_one_to_end(path, monkeypatch):
    first = take(path)
    with pytest.raises(SenderBusyError, match="is alive and owns this run") as error:
        take(path)
    assert "in this very process: shutdown() it first" in str(error.value)
    first.release()
    assert take(path).epoch > first.epoch


def test_one_that_is_let_go_owns_nothing_any_more(path):
    ended = []
    first = take(path, at_end=lambda run: ended.append(run.path))
    del first
    gc.collect()
    assert ended == [str(path)]
    take(path)


def test_what_fails_while_it_is_taken_gives_it_back(path):
    ownership = Ownership(str(path))
    with pytest.raises(KeyError), ownership.taking(Deadline(1)):
        raise KeyError
    assert not ownership.held
    assert not (path / "sender.lock").exists()
    take(path)


def ended(path):
    return has_ended(owner_of(Directory.open(str(path))))


def test_one_that_ends_says_so_whatever_comes_in_between(path):
    def fail(run):
        raise KeyError

    def begin_and_fail():
        ownership = Ownership(str(path))
        with ownership.taking(Deadline(1)) as run:
            ownership.begin()
            fail(run)

    with pytest.raises(KeyError):
        begin_and_fail()
    assert ended(path)
    second = take(path, at_end=fail)
    assert not ended(path)
    with pytest.raises(KeyError):
        second.release()
    assert ended(path)


def test_one_that_did_not_begin_says_nothing_of_the_one_before(path):
    killed = json.dumps({"epoch": 5, "pid": 1})
    path.mkdir(mode=0o700)
    (path / "sender.lock").write_text(killed)
    with pytest.raises(KeyError), Ownership(str(path)).taking(Deadline(1)):
        raise KeyError
    assert (path / "sender.lock").read_text() == killed


def test_epochs_grow_over_everything_that_was_seen(path):
    ahead = 1 << 50
    ownership = Ownership(str(path))
    with ownership.taking(Deadline(1)) as run:
        ownership.begin(seen=Version(ahead, 3))
        assert ownership.epoch == ahead + 1 == epoch_of(run)
    with pytest.raises(VersionError, match="not later"):
        ownership.begin(ahead)
    ownership.begin(ahead + 5)
    assert ownership.epoch == ahead + 5
    ownership.release()
    assert take(path).epoch == ahead + 6


def test_a_refused_epoch_does_not_make_the_run_forget(path):
    ahead = 1 << 50
    first = take(path)
    first.begin(ahead)
    first.release()
    second = Ownership(str(path))
    with pytest.raises(VersionError), second.taking(Deadline(1)):
        second.begin(ahead)
    assert take(path).epoch == ahead + 1


@pytest.mark.parametrize("content", [b"", b"\x80\x04.", b"[]", b'{"epoch": -1}', b'{"epoch": "x"}'])
def test_a_lock_that_says_nonsense_is_no_hindrance(path, content):
    path.mkdir(mode=0o700)
    (path / "sender.lock").write_bytes(content)
    ownership = take(path)
    assert json.loads((path / "sender.lock").read_bytes())["epoch"] == ownership.epoch


def test_a_removed_directory_is_noticed(path):
    ownership = take(path)
    (path / "receivers").rmdir()
    (path / "sender.lock").unlink()
    path.rmdir()
    assert not ownership.held
    with pytest.raises(WeightSyncError, match="was removed"):
        ownership.directory()


def test_h3_what_receivers_say_while_the_run_is_taken_stays(path):
    """They come as soon as they see the lock; what dead ones said before is gone by then."""
    path.mkdir(mode=0o700)
    (path / "receivers").mkdir()
    record = report_to_json(ReceiverReport("old", "applied"))
    (path / "receivers/old.json").write_bytes(record)
    ownership = Ownership(str(path))
    with ownership.taking(Deadline(1)):
        assert not (path / "receivers/old.json").exists()
        (path / "receivers/new.json").write_bytes(record)
        ownership.begin()
    assert (path / "receivers/new.json").exists()
