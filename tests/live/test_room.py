"""Too little room, or none to write: an error before the first byte, and never a bus error."""

import os
import subprocess

import pytest

import weightsync as ws
from tests.live.processes import (
    PeerError,
    bytes_of,
    constants,
    end_receiver,
    end_sender,
    files_of,
    follow,
    held,
    poll,
    publish,
    receive_in,
    send_from,
)
from weightsync.files import Directory

MIB = 1 << 20


@pytest.fixture
def small(tmp_path):
    """A memory file system of 8 MiB."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m,mode=700", "weightsync-test", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"mounting is not permitted: {done.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def free(path):
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def fill_up(path, leave=0):
    """Take all room but ``leave`` bytes."""
    name = path / "filler"
    fd = os.open(name, os.O_RDWR | os.O_CREAT)
    try:
        os.posix_fallocate(fd, 0, free(path) - leave)
    finally:
        os.close(fd)
    return name


def test_two_runs_and_room_for_one(peer, small):
    """The second one is refused before it took anything, and the first one goes on."""
    one, two = (ws.DoubleBufferScheme(str(small / name)) for name in ("one", "two"))
    running, reader, refused = peer(), peer(), peer()
    running.call(send_from, one, nbytes=2 * MIB)
    reader.call(receive_in, one, "reader", nbytes=2 * MIB)
    reader.call(follow)
    for number in 1, 2:
        running.call(publish, number, wait="applied")
    before = free(small)
    with pytest.raises(PeerError, match=r"4,194,304 more bytes, [\d,]+ are free") as caught:
        refused.call(send_from, two, nbytes=2 * MIB)
    assert caught.value.kind == "NoRoomError"
    assert not [name for name in files_of(two.path) if "generation" in name]
    assert before - free(small) <= 16384  # its lock file
    assert running.call(publish, 3, wait="applied").receivers == {"reader": ("applied", 3)}
    refused.call(end_sender)
    assert not os.path.exists(two.path)
    assert free(small) == before
    # What fits, fits.
    refused.call(send_from, two, nbytes=1 * MIB)
    refused.call(publish, 1)
    for writer, scheme in ((refused, two), (running, one)):
        writer.call(end_sender)
        assert not os.path.exists(scheme.path)
    assert os.listdir(small) == []


def publish_model(state, number, nbytes):
    state.weights = constants(0, nbytes=nbytes)
    state.sender.register_model(state.weights)
    return publish(state, number)


def test_a_model_that_grows_too_big(peer, small):
    """The version before stays readable, and the sender can go on with what fits."""
    scheme = ws.DoubleBufferScheme(str(small / "run"))
    writer, reader = peer(), peer()
    writer.call(send_from, scheme)
    reader.call(receive_in, scheme, "reader")
    writer.call(publish, 1)
    size, files = bytes_of(scheme.path), files_of(scheme.path)
    with pytest.raises(PeerError) as caught:
        writer.call(publish_model, 2, 4 * MIB)
    assert caught.value.kind == "NoRoomError"
    assert (bytes_of(scheme.path), files_of(scheme.path)) == (size, files)
    assert reader.call(poll) == (1, 1)
    writer.call(publish_model, 2, 1 * MIB)
    assert reader.call(poll) == (2, 2)
    reader.call(end_receiver)
    writer.call(publish_model, 3, 2 * MIB)  # fits beside the former one, which then goes
    writer.call(publish_model, 4, 1 * MIB)
    assert bytes_of(scheme.path) < 2 * MIB + 65536


def test_room_that_is_gone_when_it_is_taken(peer, small):
    """Somebody else takes it after we looked: what was made is given back."""
    writer = peer()
    filler = fill_up(small, leave=3 * MIB)
    before = free(small)
    with pytest.raises(PeerError, match="No space left") as caught:
        writer.call(send_believing, ws.DoubleBufferScheme(str(small / "run")), 2 * MIB)
    assert caught.value.kind == "NoRoomError"
    assert before - free(small) <= 16384
    writer.call(end_sender)
    assert free(small) == before
    assert os.listdir(small) == [filler.name]


def send_believing(state, scheme, nbytes):
    Directory.free_bytes = lambda self: 1 << 40
    send_from(state, scheme, nbytes=nbytes)


def test_a_file_system_that_fills_up_between_updates(peer, small):
    """The buffers are there already. The few bytes of a record may lack: refused, not half done."""
    scheme = ws.DoubleBufferScheme(str(small / "run"))
    writer, reader = peer(), peer()
    writer.call(send_from, scheme)
    reader.call(receive_in, scheme, "reader")
    writer.call(publish, 1)
    filler = fill_up(small)
    assert free(small) == 0
    for number in 2, 3:
        with pytest.raises(PeerError, match="No space left") as caught:
            writer.call(publish, number)
        assert caught.value.kind == "NoRoomError"
        assert reader.call(poll, 0.0) in ((1, 1), None)
        assert reader.call(held) == (1, 1)
    os.unlink(filler)
    reader.start(poll)
    report = writer.call(publish, 3, 30, wait="applied")  # never was visible, so other weights may
    assert reader.result() == (3, 30)
    assert report.receivers == {"reader": ("applied", 3)}
    reader.call(end_receiver)
    writer.call(end_sender)
    assert os.listdir(small) == []


def test_a_receiver_that_has_no_room_for_its_word(peer, small):
    """It applies, and the sender hears that it is late; later it hears all."""
    scheme = ws.DoubleBufferScheme(str(small / "run"))
    writer, reader = peer(), peer()
    writer.call(send_from, scheme)
    reader.call(receive_in, scheme, "reader")
    writer.call(publish, 1)
    filler = fill_up(small)
    assert reader.call(poll) == (1, 1)
    os.unlink(filler)
    reader.call(follow)
    assert writer.call(publish, 2, wait="applied").receivers == {"reader": ("applied", 2)}


def test_a_directory_that_cannot_be_written(peer, small):
    path = str(small / "run")
    writer = peer()
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    with pytest.raises(PeerError, match=f"{path} cannot be made: Read-only") as caught:
        writer.call(send_from, ws.DoubleBufferScheme(path))
    assert caught.value.kind == "WeightSyncError"
    subprocess.run(["mount", "-o", "remount,rw", str(small)], check=True)
    os.mkdir(path, 0o700)
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    with pytest.raises(PeerError, match=f"{path}/sender.lock: Read-only"):
        writer.call(send_from, ws.DoubleBufferScheme(path))
    subprocess.run(["mount", "-o", "remount,rw", str(small)], check=True)
    writer.call(send_from, ws.DoubleBufferScheme(path))
    writer.call(end_sender)
    assert os.listdir(small) == []
