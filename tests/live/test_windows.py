"""A kill in every window between two file operations, one after the other."""

import os
import signal
import sys

import pytest

import weightsync as ws
from tests.live.processes import (
    WAIT,
    constants,
    end_receiver,
    end_sender,
    files_of,
    follow,
    held_while_following,
    poll,
    publish,
    receive_in,
    send_from,
    value_of,
)
from weightsync.deadline import Deadline
from weightsync.schemes.double_buffer import layout

OPERATIONS = {
    "open",
    "os.listdir",
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.truncate",
    "fcntl.flock",
    "mmap.__new__",
}


def die_at(operation):
    """Be killed just before an operation on files, counted from now."""
    left = operation

    def count(event, _):
        nonlocal left
        if event in OPERATIONS:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def a_senders_life(state, scheme, operation):
    """Start, publish, change the model, publish, end; or die on the way."""
    weights = constants(1, nbytes=8192)
    die_at(operation)
    state.sender = scheme.create_sender(weights)
    state.sender.connect()
    for number in 1, 2:
        state.weights = constants(number, nbytes=8192)
        state.sender.update_weights(state.weights, version=number)
    for number in 3, 4:
        state.weights = constants(number, nbytes=4096)
        state.sender.update_weights(state.weights, version=number)
    state.sender.shutdown()


def a_receivers_life(state, scheme, operation):
    weights = constants(-1, nbytes=4096)
    die_at(operation)
    state.receiver = scheme.create_receiver(weights, id="mortal")
    state.receiver.connect(WAIT)
    for _ in range(2):
        report = state.receiver.apply_weights()
        assert value_of(weights) == report.version.number
    state.receiver.shutdown()


def died(peer):
    """Wait for the end of the life that was started; whether it ended early."""
    try:
        peer.result()
    except EOFError:
        return True
    return False


def read_head(path):
    """The version that is announced, read whole; None if none is."""
    try:
        with open(os.path.join(path, layout.HEAD), "rb") as file:
            head = layout.Commit.from_json(file.read(), "head")
    except FileNotFoundError:
        return None
    subscriber = ws.DoubleBufferScheme(path).create_subscriber()
    try:
        with subscriber.snapshot(head.version, Deadline(WAIT)) as snapshot:
            snapshot.verify()
            assert value_of(dict(snapshot)) == head.version.number
    finally:
        subscriber.close()
    return head.version


@pytest.mark.slow
@pytest.mark.parametrize("then", ["ended", "killed"])
def test_a_sender_killed_in_every_window(peer, run_dir, then):
    """What is announced is readable, the next sender takes over, and leaves nothing."""
    scheme = ws.DoubleBufferScheme(run_dir)
    operation = announced = 0
    last = ws.Version(0, 0)
    while True:
        operation += 1
        mortal, heir = peer(), peer()
        mortal.start(a_senders_life, scheme, operation)
        if not died(mortal):
            break
        version = read_head(run_dir)
        announced += version is not None
        heir.call(send_from, scheme, nbytes=4096)
        if version is not None:
            last = max(last, version)
            assert read_head(run_dir) in (version, None)  # None: it made room for another model
        heir.call(publish, 1)
        version = read_head(run_dir)
        assert version.number == 1
        assert version > last
        last = version
        generations = {name.split("/")[0] for name in files_of(run_dir) if "slot" in name}
        assert len(generations) == 1
        assert not [name for name in files_of(run_dir) if name.endswith(".tmp")]
        if then == "ended":
            heir.call(end_sender)
            assert not os.path.exists(run_dir)
        heir.dispose()
        mortal.dispose()
    assert operation > 100
    assert announced > 20
    assert not os.path.exists(run_dir)


@pytest.mark.slow
def test_a_receiver_killed_in_every_window(peer, run_dir):
    """The sender and the other receiver go on, and the next one of its name is welcome."""
    scheme = ws.DoubleBufferScheme(run_dir)
    sender, other = peer(), peer()
    sender.call(send_from, scheme, nbytes=4096)
    other.call(receive_in, scheme, "other", nbytes=4096)
    other.call(follow)
    operation, number = 0, 1
    sender.call(publish, number)
    while True:
        operation += 1
        mortal, heir = peer(), peer()
        mortal.start(a_receivers_life, scheme, operation)
        alive = not died(mortal)
        heir.call(receive_in, scheme, "mortal", nbytes=4096)
        heir.start(poll)
        assert heir.result() == (number, number)
        heir.start(poll)
        number += 1
        report = sender.call(publish, number, wait="applied")
        assert report.receivers == {"mortal": ("applied", number), "other": ("applied", number)}
        assert heir.result() == (number, number)
        assert other.call(held_while_following, number) == (number, number)
        heir.call(end_receiver)
        heir.dispose()
        mortal.dispose()
        if alive:
            break
    assert operation > 20
    other.call(end_receiver)
    sender.call(end_sender)
    assert not os.path.exists(run_dir)
