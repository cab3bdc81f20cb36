"""Faults do what they say, and are over when they are over."""

import errno
import os
import pickle
import signal
import stat
import time

import pytest

from weightsync.testing import faults
from weightsync.testing.processes import Peer, PeerError


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    return path


def test_one_bit_is_flipped(file):
    faults.corrupt(file)
    assert sum(byte.bit_count() for byte in file.read_bytes()) == 1
    faults.corrupt(file)
    faults.corrupt(file, byte=99, bit=7)
    assert file.read_bytes() == bytes(99) + b"\x80"


def test_a_file_is_cut_off(file):
    faults.truncate(file)
    assert file.read_bytes() == bytes(50)
    faults.truncate(file, 1)
    assert file.read_bytes() == bytes(1)


def test_a_replaced_file_is_another_one(file):
    with open(file, "rb") as before:
        faults.replace(file, b"new")
        assert file.read_bytes() == b"new"
        assert before.read() == bytes(100)


def test_a_bomb_explodes_when_it_is_loaded(tmp_path):
    bomb = faults.Bomb(tmp_path / "marker")
    data = bytes(bomb)
    assert not bomb.exploded
    pickle.loads(data).close()
    assert bomb.exploded


def test_access_is_refused_and_given_again(file):
    mode = stat.S_IMODE(file.stat().st_mode)
    with faults.refused(file):
        with faults.unprivileged(), pytest.raises(PermissionError):
            file.read_bytes()
        assert stat.S_IMODE(file.stat().st_mode) == 0
    assert stat.S_IMODE(file.stat().st_mode) == mode
    assert file.read_bytes()


def test_files_do_not_grow(file):
    with faults.file_size_limit(1000):
        with pytest.raises(OSError, match="too large") as refused:
            os.truncate(file, 1001)
        assert refused.value.errno == errno.EFBIG
    os.truncate(file, 1001)


def test_a_disk_is_small_and_fills_up(tmp_path):
    try:
        with faults.small_disk(tmp_path, 1 << 20) as disk:
            with faults.filled(disk), pytest.raises(OSError, match="No space"):
                (disk / "file").write_bytes(bytes(4096))
            (disk / "file").write_bytes(bytes(4096))
    except faults.UnavailableError as reason:
        pytest.skip(str(reason))
    assert os.listdir(tmp_path) == []


def test_the_clock_goes_back_and_forth():
    with faults.clock_back(3600.0):
        behind = time.time()
    assert 3599.0 < time.time() - behind < 3700.0


@pytest.mark.live
def test_a_process_is_killed_also_where_it_stands():
    for before in faults.stop, lambda pid: None:
        peer = Peer()
        before(peer.pid)
        faults.kill(peer.pid)
        peer.process.join(10.0)
        assert peer.process.exitcode == -signal.SIGKILL
        peer.dispose()


@pytest.mark.live
def test_a_process_stands_still_and_goes_on():
    peer = Peer()
    try:
        with faults.stalled(peer.pid):
            peer.start(os.path.join, "")  # any function of a module
            assert not peer.answered(0.1)
        with pytest.raises(PeerError, match="TypeError"):
            peer.result()
    finally:
        peer.dispose()
