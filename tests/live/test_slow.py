"""Soak: either side is killed at random moments, over and over; and very many reads."""

import os
import random
import threading
import time

import pytest

import weightsync as ws
from tests.live.processes import (
    WAIT,
    bytes_of,
    constants,
    end_receiver,
    end_sender,
    eventually,
    fill,
    follow,
    open_files,
    publish,
    publish_until,
    read_until,
    send_from,
    value_of,
)

pytestmark = pytest.mark.slow

NBYTES = 256 << 10


def publish_in_background(state, scheme, first):
    """Publish one number after the other, now and then waiting for the receivers."""
    send_from(state, scheme, nbytes=NBYTES)
    state.number, state.errors, state.stop = first, [], threading.Event()

    def loop():
        while not state.stop.is_set():
            number = state.number + 1
            wait = "applied" if number % 7 == 0 else "published"
            fill(state.weights, number)
            try:
                state.sender.update_weights(version=number, wait=wait, timeout=WAIT)
            except ws.ReceiverError as error:
                if any(failure.state != "dead" for failure in error.failures):
                    state.errors.append(str(error))
            except Exception as error:
                state.errors.append(repr(error))
                return
            state.number = number

    state.thread = threading.Thread(target=loop, daemon=True)
    state.thread.start()


def published(state):
    assert not state.errors, state.errors
    return state.number


def stop_publishing(state):
    state.stop.set()
    state.thread.join(WAIT)
    return published(state)


def receive_in_background(state, scheme, id, log):
    """Apply everything; write each version down with what the weights then hold."""
    state.weights = constants(-1, nbytes=NBYTES)
    state.receiver = scheme.create_receiver(state.weights, id=id)
    state.receiver.connect(WAIT)
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    state.last = -1

    def write(report):
        state.last = report.version.number
        os.write(file, f"{report.version} {value_of(state.weights)}\n".encode())

    state.errors = []
    state.receiver.follow(write, lambda error: state.errors.append(repr(error)))


def received(state):
    assert not state.errors, state.errors
    return state.last


def check_log(log):
    """Every version that was accepted was whole, was what its label says, and was newer."""
    with open(log) as file:
        lines = [line.split(" ", 1) for line in file.read().splitlines()]
    versions = [ws.Version.parse(version) for version, _ in lines]
    for version, (_, value) in zip(versions, lines, strict=True):
        assert str(version.number) == value, (version, value)
    return versions


@pytest.mark.parametrize("seed", range(4))
def test_either_side_is_killed_at_random(peer, run_dir, tmp_path, seed):
    """60 kills each: of the sender, also while it starts, and of two receivers."""
    dice = random.Random(seed)
    logs = {id: str(tmp_path / id) for id in ("a", "b")}
    lives = {"a": 0, "b": 0, "sender": 0}
    slots = 2

    def scheme():
        return ws.DoubleBufferScheme(run_dir, slots=slots)

    def start_sender(number):
        sender = peer()
        sender.call(publish_in_background, scheme(), number)
        return sender

    def start_receiver(id):
        receiver = peer()
        receiver.call(receive_in_background, scheme(), id, logs[id])
        return receiver

    sender = start_sender(0)
    receivers = {id: start_receiver(id) for id in logs}
    kills = 0
    while kills < 60:
        time.sleep(dice.uniform(0, 0.03))
        victim = dice.choice(["sender", "sender", "a", "b"])
        lives[victim] += 1
        kills += 1
        if victim == "sender":
            number = sender.call(published)
            time.sleep(dice.uniform(0, 0.005))
            sender.kill()
            slots = dice.choice([2, 2, 3])  # another number makes another generation
            number += 1000
            while dice.random() < 0.4:
                short = peer()
                short.start(publish_in_background, scheme(), number)
                time.sleep(dice.uniform(0, 0.03))
                short.kill()
                kills += 1
                number += 1000
                slots = dice.choice([2, 3])
            sender = start_sender(number)
        else:
            receivers[victim].kill()
            while dice.random() < 0.3:
                short = peer()
                short.start(receive_in_background, scheme(), victim, logs[victim])
                time.sleep(dice.uniform(0, 0.02))
                short.kill()
                kills += 1
            receivers[victim] = start_receiver(victim)
            number = sender.call(published) + 1
        for receiver in receivers.values():
            eventually(lambda r=receiver, n=number: r.call(received) >= n)
        assert bytes_of(run_dir) <= 8 * (NBYTES + 65536)
        for one in (sender, *receivers.values()):
            assert open_files(one.pid) < 60
    last = sender.call(stop_publishing)
    for receiver in receivers.values():
        eventually(lambda r=receiver: r.call(received) == last)
        receiver.call(end_receiver)
    for id, log in logs.items():
        versions = check_log(log)
        assert len(set(versions)) > 20
        assert lives[id] > 0
    sender.call(publish, last + 1)
    assert bytes_of(run_dir) <= 3 * (NBYTES + 65536)
    sender.call(end_sender)
    assert not os.path.exists(run_dir)


def test_ten_thousand_reads(peer, run_dir):
    """Three readers against a writer at full speed: none is torn."""
    scheme = ws.DoubleBufferScheme(run_dir, slots=3, verify=False)
    writer, *readers = peer(), peer(), peer(), peer()
    writer.call(send_from, scheme)
    writer.call(publish, 1)
    reads = versions = 0
    for reader in readers:
        reader.start(read_until, scheme, 300.0, count=3334)
    number = 1
    while not all(reader.answered() for reader in readers):
        number, _ = writer.call(publish_until, 1.0, first=number + 1)
    for reader in readers:
        seen = reader.result()
        assert all(number == value for number, value in seen)
        reads += len(seen)
        versions += len({number for number, _ in seen})
    assert reads >= 10_000
    assert versions > 100
    writer.call(end_sender)


def test_a_reader_and_a_sender_that_never_stop(peer, run_dir):
    """Thousands of updates, each applied: nothing grows, nothing is missed at the end."""
    scheme = ws.DoubleBufferScheme(run_dir)
    writer, reader = peer(), peer()
    writer.call(send_from, scheme, nbytes=4096)
    reader.call(receive_small, scheme)
    reader.call(follow)
    fds = []
    number = 0
    for _ in range(8):
        number, _ = writer.call(publish_until, 2.0, first=number + 1, wait="applied")
        # The reader may have some open for a moment.
        fds.append([min(open_files(one.pid) for _ in range(100)) for one in (writer, reader)])
    assert all(count == fds[0] for count in fds), fds
    assert number > 100
    reader.call(end_receiver)
    writer.call(end_sender)
    assert not os.path.exists(run_dir)


def receive_small(state, scheme):
    state.weights = constants(-1, nbytes=4096)
    state.receiver = scheme.create_receiver(state.weights, id="reader")
    state.receiver.connect(WAIT)
