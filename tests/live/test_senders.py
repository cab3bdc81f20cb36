"""Several senders on one path: at the same time, and one after the other."""

import os
import socket
import time

import pytest

import weightsync as ws
from tests.live.processes import (
    WAIT,
    PeerError,
    end_receiver,
    end_sender,
    files_of,
    follow,
    held,
    held_while_following,
    poll,
    publish,
    publish_range,
    receive_in,
    send_from,
    value_of,
)
from weightsync.deadline import Deadline


def test_two_senders_on_one_path(peer, run_dir):
    """P3: the second one fails quickly and says who is there; the first one notices nothing."""
    scheme = ws.DoubleBufferScheme(run_dir)
    first, second, reader = peer(), peer(), peer()
    first.call(send_from, scheme)
    reader.call(receive_in, scheme, "reader")
    reader.call(follow)
    first.call(publish, 1)
    files = files_of(run_dir)
    began = time.monotonic()
    with pytest.raises(PeerError) as caught:
        second.call(send_from, scheme)
    assert time.monotonic() - began < 3
    assert caught.value.kind == "SenderBusyError"
    assert f"pid {first.pid} on {socket.gethostname()}" in caught.value.text
    assert run_dir in caught.value.text
    assert "give each trainer a path of its own" in caught.value.text
    second.end()  # its end removes nothing of the first one's
    assert set(files) <= set(files_of(run_dir))
    assert first.call(publish, 2, wait="applied").receivers == {"reader": ("applied", 2)}


def test_many_senders_start_at_once(peer, run_dir):
    """Exactly one of them gets the run, over and over."""
    scheme = ws.DoubleBufferScheme(run_dir)
    senders = [peer() for _ in range(3)]
    for _ in range(2):
        for sender in senders:
            sender.start(send_or_be_told, scheme)
        owners = [sender for sender in senders if sender.result()]
        assert len(owners) == 1
        owners[0].call(publish_range, 1, 2)
        owners[0].call(end_sender)
        assert not os.path.exists(run_dir)


def send_or_be_told(state, scheme):
    try:
        send_from(state, scheme, nbytes=4096)
    except ws.SenderBusyError:
        return False
    return True


def test_handover_between_senders_that_wait_for_each_other(peer, run_dir):
    """The next one waits while the former one ends: it gets the run, whatever step it meets."""
    scheme = ws.DoubleBufferScheme(run_dir)
    first, second, reader = peer(), peer(), peer()
    first.call(send_from, scheme, nbytes=4096)
    reader.call(receive_in, scheme, "reader", nbytes=4096)
    reader.call(follow)
    epochs = []
    for number in range(30):
        second.start(send_from, scheme, nbytes=4096)
        assert not second.answered(0.01)
        first.call(end_sender)
        epochs.append(second.result())
        second.call(connect_again, ["reader"])
        report = second.call(publish, 3, number, wait="applied")
        assert report.receivers == {"reader": ("applied", 3)}
        assert reader.call(held) == (3, number)
        first, second = second, first
    assert epochs == sorted(set(epochs))
    reader.call(end_receiver)
    first.call(end_sender)
    assert not os.path.exists(run_dir)


def connect_again(state, receivers):
    state.sender.connect(WAIT, receivers)


@pytest.mark.parametrize("how", ["ended", "killed"])
def test_files_that_are_kept(peer, run_dir, how):
    """``keep_files``: the last version outlives its sender, and the next one takes it over."""
    scheme = ws.DoubleBufferScheme(run_dir, keep_files=True)
    first, second = peer(), peer()
    epoch = first.call(send_from, scheme)
    first.call(publish_range, 1, 3)
    if how == "ended":
        first.call(end_sender)
        first.end()
    else:
        first.kill()
    version = ws.Version(epoch, 3)
    subscriber = scheme.create_subscriber()
    with subscriber.snapshot(version, Deadline(WAIT)) as snapshot:
        snapshot.verify()
        assert value_of(dict(snapshot)) == 3
        assert second.call(send_from, scheme) > epoch
        second.call(publish, 1, 10)
        assert value_of(dict(snapshot)) == 3
    reader = peer()
    reader.call(receive_in, scheme, "reader")
    assert reader.call(poll) == (1, 10)
    subscriber.close()
    second.call(end_sender)
    assert "head.json" in files_of(run_dir)
    last = peer()  # one that keeps nothing also removes what others kept
    last.call(send_from, ws.DoubleBufferScheme(run_dir))
    last.call(publish, 1)
    reader.call(end_receiver)
    last.call(end_sender)
    assert not os.path.exists(run_dir)


def test_runs_side_by_side(peer, run_dir):
    os.mkdir(run_dir, 0o700)
    runs = []
    for name in "abc":
        scheme = ws.DoubleBufferScheme(f"{run_dir}/{name}")
        writer, reader = peer(), peer()
        writer.call(send_from, scheme)
        reader.call(receive_in, scheme, "same-id")
        reader.call(follow)
        runs.append((writer, reader))
    for number in range(1, 6):
        for index, (writer, _) in enumerate(runs):
            writer.start(publish, number, 10 * number + index, wait="applied")
        for index, (writer, reader) in enumerate(runs):
            assert writer.result().receivers == {"same-id": ("applied", number)}
            assert reader.call(held_while_following, number) == (number, 10 * number + index)
    for writer, reader in runs:
        reader.call(end_receiver)
        writer.call(end_sender)
    os.rmdir(run_dir)
