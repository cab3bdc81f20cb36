"""Directories, whole replacement of files, and kernel locks."""

import gc
import os
import stat

import pytest

from weightsync.errors import ProtocolError, WeightSyncError
from weightsync.files import Directory, Lock, exchange, is_locked, lock_kinds


@pytest.fixture
def directory(tmp_path):
    return Directory.open(str(tmp_path / "run"), create=True)


def open_fds():
    return len(os.listdir("/proc/self/fd"))


def test_made_for_this_user_alone(tmp_path):
    path = tmp_path / "run"
    old = os.umask(0)
    try:
        directory = Directory.open(str(path), create=True)
        inner = directory.subdirectory("inner", create=True)
        inner.replace("file", b"")
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE((path / "inner").stat().st_mode) == 0o700
    assert stat.S_IMODE((path / "inner/file").stat().st_mode) == 0o600
    Directory.open(str(path), create=True)


def test_made_again_if_it_is_removed_meanwhile(tmp_path, monkeypatch):
    """Who removes it between the making and the opening: only a missing parent is an error."""
    path = tmp_path / "run"
    opened, left = os.open, [3]

    def removed_first(name, *args, **options):
        if name == str(path) and left[0]:
            left[0] -= 1
            path.rmdir()
        return opened(name, *args, **options)

    monkeypatch.setattr(os, "open", removed_first)
    path.mkdir(0o700)
    assert Directory.open(str(path), create=True).exists
    assert left == [0]
    with pytest.raises(FileNotFoundError):
        Directory.open(str(tmp_path / "none/run"), create=True)


def test_not_a_directory_of_our_own(tmp_path):
    """Neither a symlink, nor a file, nor what everybody may write to, nor somebody else's."""
    (tmp_path / "real").mkdir()
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o1777)
    os.mkfifo(tmp_path / "fifo")
    for create in (False, True):
        for name in ("file", "link", "dangling", "fifo", "open"):
            with pytest.raises(WeightSyncError, match=name):
                Directory.open(str(tmp_path / name), create=create)
        with pytest.raises(FileNotFoundError):
            Directory.open(str(tmp_path / "no" / "parent"), create=create)
    with pytest.raises(FileNotFoundError):
        Directory.open(str(tmp_path / "none"))
    assert sorted(os.listdir(tmp_path)) == ["dangling", "fifo", "file", "link", "open", "real"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a directory away")
def test_somebody_elses_directory(tmp_path):
    (tmp_path / "theirs").mkdir(mode=0o755)
    os.chown(tmp_path / "theirs", 54321, -1)
    with pytest.raises(WeightSyncError, match="belongs to user 54321"):
        Directory.open(str(tmp_path / "theirs"), create=True)


def test_nothing_is_followed(directory, tmp_path):
    """X4: a symlink at any name is refused, whatever it points to."""
    outside = tmp_path / "outside"
    outside.write_bytes(b"secret")
    (tmp_path / "run/link").symlink_to(outside)
    (tmp_path / "run/dirlink").symlink_to(tmp_path)
    with pytest.raises(ProtocolError, match="link"):
        directory.read("link", 100)
    with pytest.raises(ProtocolError, match="link"):
        Lock(directory, "link", create=True)
    with pytest.raises(ProtocolError, match="link"):
        directory.open_file("link", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with pytest.raises(WeightSyncError, match="dirlink"):
        directory.subdirectory("dirlink", create=True)
    directory.replace("link", b"new")
    assert directory.read("link", 100) == b"new"
    assert outside.read_bytes() == b"secret"


def test_only_regular_files(directory, tmp_path):
    """A FIFO would hang whoever opens it, a directory cannot be read."""
    os.mkfifo(tmp_path / "run/fifo")
    (tmp_path / "run/dir").mkdir()
    before = open_fds()
    for name in ("fifo", "dir"):
        with pytest.raises(ProtocolError, match=name):
            directory.read(name, 100)
        with pytest.raises(ProtocolError, match=name):
            Lock(directory, name, create=True)
        with pytest.raises(ProtocolError, match=name):
            directory.open_file(name, os.O_RDWR)
    with pytest.raises(ProtocolError, match="dir"):
        directory.replace("dir", b"new")
    with pytest.raises(ProtocolError, match="dir"):
        directory.remove("dir")
    assert sorted(directory.names()) == ["dir", "fifo"]
    assert open_fds() == before
    directory.remove("fifo")
    assert directory.names() == ["dir"]


def test_read_has_a_limit(directory):
    directory.replace("file", b"12345")
    assert directory.read("file", 5) == b"12345"
    with pytest.raises(ProtocolError, match="longer than 4"):
        directory.read("file", 4)
    with pytest.raises(FileNotFoundError):
        directory.read("none", 4)


def test_replace_is_whole(directory):
    """Who has the old file open goes on reading it; a reader of the name sees the new one."""
    directory.replace("file", b"old" * 100)
    first = directory.status("file")
    fd = directory.open_file("file", os.O_RDONLY)
    directory.replace("file", b"new")
    with open(fd, "rb") as old:
        assert old.read() == b"old" * 100
    assert directory.read("file", 1000) == b"new"
    assert not os.path.samestat(directory.status("file"), first)
    assert directory.status("none") is None
    assert directory.names() == ["file"]


def test_a_failed_replace_leaves_nothing(directory, monkeypatch):
    directory.replace("file", b"old")

    def fail(*args, **kwargs):
        raise OSError("no")

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="no"):
        directory.replace("file", b"new")
    assert directory.names() == ["file"]
    assert directory.read("file", 10) == b"old"


def test_remove(directory):
    directory.replace("file", b"")
    directory.remove("file")
    directory.remove("file")
    assert directory.names() == []
    inner = directory.subdirectory("inner", create=True)
    inner.replace("foreign", b"")
    directory.remove_subdirectory("inner")
    assert directory.names() == ["inner"]
    inner.remove("foreign")
    directory.remove_subdirectory("inner")
    directory.remove_subdirectory("inner")
    assert directory.names() == []


def test_exists(directory, tmp_path):
    path = tmp_path / "run"
    assert directory.exists
    path.rename(tmp_path / "moved")
    assert not directory.exists
    path.mkdir()
    assert not directory.exists  # another one of the same name
    path.rmdir()
    path.symlink_to("moved")
    assert not directory.exists


def test_descriptors_are_given_back(tmp_path):
    """G3."""
    gc.collect()
    before = open_fds()
    for _ in range(5):
        directory = Directory.open(str(tmp_path / "run"), create=True)
        lock = Lock(directory, "lock", create=True)
        lock.try_exclusive()
        directory.close()
        directory.close()
        del directory, lock
    gc.collect()
    assert open_fds() == before


def test_locks(directory):
    one, other = (Lock(directory, "lock", create=True) for _ in range(2))
    assert one.try_shared()
    assert other.try_shared()
    assert not one.try_exclusive()
    other.unlock()
    assert one.try_exclusive()
    assert one.try_exclusive()
    assert not other.try_shared()
    assert is_locked(directory, "lock")
    one.release()
    one.release()
    assert one.released
    assert not other.released
    assert not is_locked(directory, "lock")
    assert other.try_exclusive()
    assert not is_locked(directory, "none")
    with pytest.raises(FileNotFoundError):
        Lock(directory, "none")


def test_a_shared_lock_is_no_owner(directory):
    lock = Lock(directory, "lock", create=True)
    assert lock.try_shared()
    assert not is_locked(directory, "lock")


def test_a_lock_dies_with_its_object(directory):
    lock = Lock(directory, "lock", create=True)
    assert lock.try_exclusive()
    del lock
    gc.collect()
    assert not is_locked(directory, "lock")


def test_a_lock_on_a_removed_file(directory):
    lock = Lock(directory, "lock", create=True)
    assert lock.exists
    directory.remove("lock")
    assert not lock.exists
    again = Lock(directory, "lock", create=True)
    assert not lock.exists
    assert again.exists
    again.release()
    assert not again.exists


def test_a_forked_child_does_not_keep_or_end_its_parents_lock(directory):
    lock = Lock(directory, "lock", create=True)
    assert lock.try_exclusive()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if lock.released and is_locked(directory, "lock") else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert is_locked(directory, "lock")
    assert not lock.released


def test_lock_content(directory):
    lock = Lock(directory, "lock", create=True)
    lock.write(b"longer text")
    lock.write(b"short")
    assert directory.read("lock", 100) == b"short"


def test_lock_kinds(directory):
    lock = Lock(directory, "lock", create=True)
    inode = directory.status("lock").st_ino
    assert lock_kinds(inode) == set()
    lock.try_shared()
    assert lock_kinds(inode) == {"READ"}
    lock.unlock()
    lock.try_exclusive()
    assert lock_kinds(inode) == {"WRITE"}
    lock.unlock()
    assert lock_kinds(inode) == set()


def test_free_bytes(directory):
    assert directory.free_bytes() > 0


def test_two_files_change_places(tmp_path):
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").mkdir()
    exchange(str(tmp_path / "a"), str(tmp_path / "b"))
    assert (tmp_path / "b").read_text() == "1"
    assert (tmp_path / "a").is_dir()
    with pytest.raises(FileNotFoundError):
        exchange(str(tmp_path / "a"), str(tmp_path / "c"))
