"""Room, locks and mappings where a run lies."""

import fcntl
import os
from types import SimpleNamespace

import pytest
import torch

import weightsync as ws
from tests.conftest import WAIT
from weightsync.doctor import Subject, storage
from weightsync.testing import faults


def test_room_for_so_many_slots(tmp_path):
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    path = str(tmp_path / "run")
    for slots, state in ((2, "ok"), (4, "problem")):
        scheme = ws.DoubleBufferScheme(path, slots=slots)
        finding = storage.room(Subject(path, scheme, free // 3))
        assert finding.state == state
        assert f"{slots} copies" in finding.words


def test_a_version_more_than_are_kept(tmp_path):
    scheme = ws.DiskScheme(str(tmp_path / "run"), keep=5)
    assert "6 copies" in storage.room(Subject(scheme.path, scheme, 1)).words


def test_room_that_the_run_has_already_counts(tmp_path):
    try:
        with faults.small_disk(tmp_path, 16 << 20) as place:
            scheme = ws.DoubleBufferScheme(str(place / "run"))
            with scheme.create_sender({"w": torch.ones(1_500_000)}, timeout=WAIT) as sender:
                sender.connect(WAIT)
                sender.update_weights(version=1)
                assert storage.room(Subject(scheme.path, scheme, 6_000_000)).state == "ok"
            assert storage.room(Subject(scheme.path, scheme, 9_000_000)).state == "problem"
    except faults.UnavailableError as error:
        pytest.skip(str(error))


def test_a_container_s_default_is_a_warning(tmp_path):
    try:
        with faults.small_disk(tmp_path, 64 << 20) as place:
            finding = storage.room(Subject(str(place)))
    except faults.UnavailableError as error:
        pytest.skip(str(error))
    assert finding.state == "warning"
    assert "--shm-size" in finding.remedy


def test_a_container_s_memory_bounds_shared_memory(monkeypatch):
    monkeypatch.setattr(storage, "_cgroup_room", lambda: 1 << 20)
    finding = storage.room(Subject("/dev/shm/run", None, 1 << 20))
    assert finding.state == "problem"
    assert "this container may use" in finding.words


def test_locks_are_seen_by_another_process(tmp_path):
    finding = storage.locks(Subject(str(tmp_path)))
    assert finding.state == "ok"
    assert "flock is seen by another process, OFD locks are" in finding.words
    assert os.listdir(tmp_path) == []


def test_locks_that_do_not_hold_are_a_problem(tmp_path, monkeypatch):
    """As on a mount that keeps them to itself, or does not know them."""
    nothing = SimpleNamespace(**{**vars(fcntl), "flock": lambda file, kind: None})
    monkeypatch.setattr(storage, "fcntl", nothing)
    assert storage.locks(Subject(str(tmp_path))).state == "problem"

    def unknown(file, kind):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(nothing, "flock", unknown)
    assert "no flock: Function not implemented" in storage.locks(Subject(str(tmp_path))).words


def test_what_other_hosts_see_is_not_known(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "is_shared_by_hosts", lambda path: True)
    finding = storage.locks(Subject(str(tmp_path)))
    assert finding.state == "warning"
    assert "other hosts" in finding.remedy


def test_mappings(tmp_path):
    assert storage.mapping(Subject(str(tmp_path))).state == "ok"
    with faults.file_size_limit(10):
        assert storage.mapping(Subject(str(tmp_path))).state == "problem"


def test_the_place_of_a_run_is_where_it_is_made(tmp_path, disk_run):
    assert storage.place_of(str(tmp_path)) == str(tmp_path)
    assert storage.place_of(str(tmp_path / "new")) == str(tmp_path)
    assert storage.place_of(str(disk_run)) == str(tmp_path)  # nothing is written into a run
    with pytest.raises(FileNotFoundError):
        storage.place_of(str(tmp_path / "a/b"))


@pytest.fixture
def disk_run(tmp_path):
    with ws.DiskScheme(str(tmp_path / "run")).create_sender({"w": torch.ones(1)}) as sender:
        sender.connect(WAIT)
    return tmp_path / "run"
