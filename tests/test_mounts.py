"""What file systems paths lie on."""

from weightsync.mounts import is_shared_by_hosts, mount_of


def test_shared_memory_is_this_host_s_own():
    mount = mount_of("/dev/shm/some/run")
    assert (mount.point, mount.kind) == ("/dev/shm", "tmpfs")
    assert not is_shared_by_hosts("/dev/shm/some/run")


def test_the_mount_is_the_innermost_one(monkeypatch, tmp_path):
    listing = tmp_path / "mountinfo"
    listing.write_text(
        "1 0 0:1 / / rw - ext4 /dev/sda rw\n"
        "2 1 0:2 / /mnt rw,relatime shared:1 - nfs4 server:/x rw\n"
        "3 2 0:3 / /mnt/with\\040space rw - tmpfs none rw\n"
    )
    opened = open
    monkeypatch.setattr("builtins.open", lambda name, *a, **k: opened(listing, *a, **k))
    assert mount_of("/mnt/run").kind == "nfs4"
    assert is_shared_by_hosts("/mnt/run")
    assert mount_of("/mnt/with space/run").kind == "tmpfs"
    assert mount_of("/mnty/run").kind == "ext4"


def test_what_nobody_knows_may_be_shared(monkeypatch):
    def unreadable(name, *args, **how):
        raise OSError(2, "no such file")

    monkeypatch.setattr("builtins.open", unreadable)
    assert mount_of("/anything") is None
    assert is_shared_by_hosts("/anything")
