"""Ends that die, stop, fail or come back: the others learn of it, and go on."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

import weightsync as ws
from tests.live.processes import (
    WAIT,
    PeerError,
    constants,
    end_receiver,
    end_sender,
    eventually,
    fill,
    follow,
    held,
    held_while_following,
    poll,
    publish,
    receive_in,
    send_from,
    summary,
    value_of,
)
from weightsync.deadline import Deadline
from weightsync.engines.module import ModuleEngine
from weightsync.files import Directory, Lock
from weightsync.schemes.double_buffer import layout


class StuckEngine(ModuleEngine):
    """Copies the first tensor of the second update, and never comes back."""

    updates = 0

    def apply(self, update, deadline):
        self.updates += 1
        if self.updates == 2:
            name = next(iter(self.target))
            self.target[name].copy_(update.snapshot.tensor(name))
            time.sleep(3600)
        super().apply(update, deadline)


class FailingEngine(ModuleEngine):
    def connect(self, url, deadline):
        raise RuntimeError("no nccl")


def publish_and_report(state, number, **options):
    """A publish that is to fail at a receiver: what the sender was told."""
    fill(state.weights, number)
    began = time.monotonic()
    with pytest.raises(ws.ReceiverError) as caught:
        state.sender.update_weights(version=number, wait="applied", **options)
    error = caught.value
    failed = {r.receiver: r.state for r in error.failures}
    return failed, str(error), summary(error.report), time.monotonic() - began


@pytest.mark.parametrize("slots", [2, 3])
def test_a_receiver_dies_while_it_applies(peer, run_dir, slots):
    """H1."""
    scheme = ws.DoubleBufferScheme(run_dir, slots=slots)
    writer, other, victim = peer(), peer(), peer()
    writer.call(send_from, scheme)
    other.call(receive_in, scheme, "other")
    victim.call(receive_in, scheme, "victim", engine=StuckEngine)
    other.call(follow)
    victim.start(poll)
    assert writer.call(publish, 1, wait="applied").receivers == {
        "other": ("applied", 1),
        "victim": ("applied", 1),
    }
    assert victim.result() == (1, 1)
    victim.start(poll)
    writer.start(publish_and_report, 2, timeout=5)
    eventually(lambda: other.call(held) == (2, 2))
    assert not writer.answered(0.3)  # it waits for the victim
    victim.kill()
    failed, words, report, _ = writer.result(10)
    assert failed == {"victim": "dead"}
    assert "'victim'" in words
    assert f"pid {victim.pid}" in words
    assert report.receivers["other"] == ("applied", 2)
    # Said once; the next update does without it, and has its slot.
    assert writer.call(publish, 3, wait="applied").receivers == {"other": ("applied", 3)}
    other.call(end_receiver)
    writer.call(end_sender)
    writer.end()
    assert not os.path.exists(run_dir)


def test_a_receiver_that_stands_still_is_late(peer, run_dir):
    """H1: stopped, not dead. The others are served, and it goes on when it can."""
    scheme = ws.DoubleBufferScheme(run_dir, slots=3)
    writer, other, stopped = peer(), peer(), peer()
    writer.call(send_from, scheme)
    for one, id in ((other, "other"), (stopped, "stopped")):
        one.call(receive_in, scheme, id)
        one.call(follow)
    writer.call(publish, 1, wait="applied")
    stopped.pause()
    for number in 2, 3:
        failed, words, report, took = writer.call(publish_and_report, number, timeout=1)
        assert failed == {"stopped": "waiting"}
        assert "'stopped'" in words
        assert "waiting" in words
        assert took < 10
        assert report.receivers["other"] == ("applied", number)
        assert other.call(held) == (number, number)
    stopped.go_on()
    assert stopped.call(held_while_following, 3) == (3, 3)
    assert writer.call(publish, 4, wait="applied").receivers == {
        "other": ("applied", 4),
        "stopped": ("applied", 4),
    }


def test_a_receiver_that_holds_the_only_free_slot(peer, run_dir):
    """Two slots, one reader stopped with a lease: the deadline names it, and nothing is lost."""
    scheme = ws.DoubleBufferScheme(run_dir)
    writer, stopped = peer(), peer()
    writer.call(send_from, scheme)
    stopped.call(receive_in, scheme, "stopped")
    stopped.start(poll)
    writer.call(publish, 1, wait="applied")
    stopped.result()
    stopped.pause()
    writer.call(publish, 2)
    with pytest.raises(PeerError, match="'stopped'") as caught:
        writer.call(publish, 3, timeout=0.5)
    assert caught.value.kind == "DeadlineError"
    assert read_newest(scheme) == (2, 2)
    stopped.go_on()
    assert stopped.call(poll) == (2, 2)
    writer.call(publish, 3)
    assert stopped.call(poll) == (3, 3)


def read_newest(scheme):
    subscriber = scheme.create_subscriber()
    try:
        with open(os.path.join(scheme.path, layout.HEAD), "rb") as file:
            head = layout.Commit.from_json(file.read(), "head")
        with subscriber.snapshot(head.version, Deadline(WAIT)) as snapshot:
            snapshot.verify()
            return head.version.number, value_of(dict(snapshot))
    finally:
        subscriber.close()


def connect(state, scheme, **options):
    state.sender = scheme.create_sender(constants(0))
    began = time.monotonic()
    try:
        state.sender.connect(**options)
    except ws.ReceiverError as error:
        return str(error), time.monotonic() - began
    return None


def test_a_receiver_that_cannot_be_set_up(peer, run_dir):
    """H3."""
    scheme = ws.DoubleBufferScheme(run_dir)
    writer, receiver = peer(), peer()
    writer.start(connect, scheme, receivers=1, timeout=30)
    with pytest.raises(PeerError, match="no nccl"):
        receiver.call(receive_in, scheme, "broken", engine=FailingEngine)
    words, took = writer.result()
    assert "no nccl" in words
    assert "'broken'" in words
    assert took < 10


def test_a_receiver_that_was_mended(peer, run_dir):
    """After H3 the same id, or another one, connects, and updates are not held up by the past."""
    scheme = ws.DoubleBufferScheme(run_dir)
    writer, broken, mended, newcomer = peer(), peer(), peer(), peer()
    writer.start(connect, scheme, receivers=1, timeout=30)
    with pytest.raises(PeerError, match="no nccl"):
        broken.call(receive_in, scheme, "one", engine=FailingEngine)
    writer.result()
    mended.call(receive_in, scheme, "one")
    assert writer.call(connect_again, receivers=1) is None
    with pytest.raises(PeerError, match="no nccl"):
        broken.call(receive_in, scheme, "two", engine=FailingEngine)
    newcomer.call(receive_in, scheme, "three")
    for one in mended, newcomer:
        one.call(follow)
    writer.call(keep_weights)
    failed, words, report, _ = writer.call(publish_and_report, 1)
    assert failed == {"two": "failed"}
    assert "no nccl" in words
    assert report.receivers["one"] == report.receivers["three"] == ("applied", 1)
    assert writer.call(publish, 2, wait="applied").receivers == {
        "one": ("applied", 2),
        "three": ("applied", 2),
    }


def connect_again(state, **options):
    state.sender.connect(**options)


def keep_weights(state):
    state.weights = constants(0)
    state.sender.register_model(state.weights)


def test_updates_for_some_of_three(peer, run_dir):
    """H5. Receivers keep a lease on what they hold: one slot more than receivers."""
    scheme = ws.DoubleBufferScheme(run_dir, slots=4)
    writer = peer()
    writer.call(send_from, scheme, nbytes=4096)
    ids = ("a", "b", "c")
    readers = {id: peer() for id in ids}
    for id, reader in readers.items():
        reader.call(receive_in, scheme, id, nbytes=4096)
        reader.call(follow)
    last = {}
    for number in range(1, 51):
        one = ids[number // 3 % 3]
        receivers = [None, [one], [id for id in ids if id != one]][(number - 1) % 3]
        report = writer.call(publish, number, wait="applied", receivers=receivers, timeout=5)
        for id in receivers or ids:
            last[id] = number
            assert report.receivers[id] == ("applied", number)
        for id in ids:
            assert readers[id].call(held) == (last[id], last[id])
    assert len(set(last.values())) > 1


@pytest.fixture
def killed_in_the_middle(peer, run_dir):
    """A run whose sender was killed while it wrote version 3: the scheme, and its epoch."""

    def make(**options):
        scheme = ws.DoubleBufferScheme(run_dir, **options)
        writer = peer()
        epoch = writer.call(send_from, scheme)
        return scheme, writer, epoch

    return make


def publish_and_hang(state, number):
    """Write half of a version, say so, and stay there."""
    weights = constants(number)

    def stream():
        for name, tensor in weights.items():
            yield name, tensor
            if name == "layer1":
                marker.add(1)
                while len(marker) < 2:
                    time.sleep(0.01)

    marker = set()
    passes = iter([1, 2])

    def twice():  # the first pass only describes
        return stream() if next(passes) == 2 else iter(weights.items())

    state.sender.update_weights(twice, version=number)


def test_a_sender_dies_while_it_publishes(peer, killed_in_the_middle):
    """The version before stays readable; a restarted sender is newer, and is followed."""
    scheme, writer, epoch = killed_in_the_middle()
    reader, late = peer(), peer()
    reader.call(receive_in, scheme, "reader")
    writer.call(publish, 1)
    writer.call(publish, 2)
    assert reader.call(poll) == (2, 2)
    writer.start(publish_and_hang, 3)
    lock = os.path.join(scheme.path, "generation-0001", layout.slot_lock(0))
    eventually(lambda: is_write_locked(lock))
    writer.kill()
    assert read_newest(scheme) == (2, 2)
    assert reader.call(poll, 0.0) is None
    assert reader.call(held) == (2, 2)
    # Nobody starts from a dead sender's version: there is nobody to acknowledge to.
    with pytest.raises(PeerError, match="no live sender"):
        late.call(receive_in, scheme, "late", timeout=0.2)
    second = peer()
    assert second.call(send_from, scheme) > epoch
    assert read_newest(scheme) == (2, 2)
    late.call(receive_in, scheme, "late")
    assert late.call(poll) == (2, 2)
    for one in reader, late:
        one.start(poll)
    report = second.call(publish, 1, 10, wait="applied")  # a lower number, and newer all the same
    assert report.receivers == {"reader": ("applied", 1), "late": ("applied", 1)}
    assert reader.result() == late.result() == (1, 10)
    for one in reader, late:
        one.call(end_receiver)
    second.call(end_sender)
    assert not os.path.exists(scheme.path)


def is_write_locked(path):
    directory, name = os.path.split(path)
    lock = Lock(Directory.open(directory), name)
    try:
        return not lock.try_shared()
    finally:
        lock.release()


def test_a_sender_that_starts_late(peer, run_dir):
    """C8: the first version counts, whatever its number."""
    scheme = ws.DoubleBufferScheme(run_dir)
    reader, writer = peer(), peer()
    reader.start(receive_in, scheme, "reader")
    writer.call(send_from, scheme, receivers=["reader"])
    reader.result()
    reader.call(follow)
    assert writer.call(publish, 40, wait="applied").receivers == {"reader": ("applied", 40)}
    assert reader.call(held_while_following, 40) == (40, 40)


def test_a_sender_that_resumes(peer, run_dir):
    """C8 after a crash: the same step again, with other weights."""
    scheme = ws.DoubleBufferScheme(run_dir)
    reader, writer = peer(), peer()
    writer.call(send_from, scheme)
    reader.call(receive_in, scheme, "reader")
    writer.call(publish, 40)
    assert reader.call(poll) == (40, 40)
    writer.kill()
    resumed = peer()
    resumed.call(send_from, scheme)
    reader.start(poll)
    resumed.call(publish, 40, 41, wait="applied")
    assert reader.result() == (40, 41)


def test_a_receiver_comes_back_at_once(peer, run_dir):
    """Killed and started again under its name, over and over, while the sender publishes."""
    scheme = ws.DoubleBufferScheme(run_dir, slots=3)
    writer, other = peer(), peer()
    writer.call(send_from, scheme)
    other.call(receive_in, scheme, "other")
    other.call(follow)
    for number in range(1, 9):
        again = peer()
        again.call(receive_in, scheme, "again")
        again.call(follow)
        report = writer.call(publish, number, wait="applied")
        assert report.receivers == {"other": ("applied", number), "again": ("applied", number)}
        again.kill()


def test_a_receiver_comes_back_while_it_is_waited_for(peer, run_dir):
    """What its predecessor said does not count for it, nor is it forgotten with it."""
    scheme = ws.DoubleBufferScheme(run_dir, slots=3)
    writer = peer()
    writer.call(send_from, scheme)
    for number in range(1, 7):
        first, second = peer(), peer()
        first.call(receive_in, scheme, "same")
        writer.start(publish, number, wait="applied", timeout=10)
        first.kill()
        second.call(receive_in, scheme, "same")
        second.call(poll)
        try:
            assert writer.result().receivers == {"same": ("applied", number)}
        except PeerError as error:
            saw = error.kind, "dead" in error.text
            assert saw == ("ReceiverError", True)
        second.call(follow)
        report = writer.call(publish, 100 * number, wait="applied")
        assert report.receivers == {"same": ("applied", 100 * number)}
        writer.call(send_again, scheme)
        second.kill()


def send_again(state, scheme):
    state.sender.shutdown()
    send_from(state, scheme)


def test_two_live_receivers_of_one_name(peer, run_dir):
    scheme = ws.DoubleBufferScheme(run_dir)
    writer, first, second = peer(), peer(), peer()
    writer.call(send_from, scheme)
    first.call(receive_in, scheme, "same")
    with pytest.raises(PeerError, match="another live receiver is called 'same'"):
        second.call(receive_in, scheme, "same")
    first.start(poll)
    assert writer.call(publish, 1, wait="applied").receivers == {"same": ("applied", 1)}


def test_the_sender_goes_over_while_receivers_stay(peer, run_dir):
    """Clean ends, and a receiver through all of them. A foreign file keeps the directory."""
    scheme = ws.DoubleBufferScheme(run_dir)
    reader = peer()
    for number in range(1, 5):
        writer = peer()
        writer.call(send_from, scheme)
        if number == 1:
            reader.call(receive_in, scheme, "reader")
            reader.call(follow)
            with open(os.path.join(run_dir, "notes.txt"), "w") as file:
                file.write("mine")
        else:
            writer.call(connect_again, receivers=["reader"])
        report = writer.call(publish, 7, number, wait="applied")
        assert report.receivers == {"reader": ("applied", 7)}
        assert reader.call(held) == (7, number)
        writer.call(end_sender)
        writer.end()
        assert os.listdir(run_dir) == ["notes.txt"]
    os.unlink(os.path.join(run_dir, "notes.txt"))


def test_the_run_is_removed_by_hand(peer, run_dir):
    """``rm -rf`` under everybody: an error says so, connecting again mends it."""
    scheme = ws.DoubleBufferScheme(run_dir)
    writer, reader = peer(), peer()
    writer.call(send_from, scheme)
    reader.call(receive_in, scheme, "reader")
    reader.call(follow)
    before = open_after(writer)
    for number in range(1, 4):
        assert writer.call(publish, number, wait="applied").receivers == {
            "reader": ("applied", number)
        }
        subprocess.run(["rm", "-rf", run_dir], check=True)
        with pytest.raises(PeerError, match=r"removed.*connect"):
            writer.call(publish, 10)
        writer.call(connect_again, receivers=["reader"])
    assert open_after(writer) <= before + 1
    writer.call(publish, 10, wait="applied")


def open_after(peer):
    return peer.call(count_own_files)


def count_own_files(state):
    return len(os.listdir("/proc/self/fd"))


def test_receivers_reported_to_several_threads(peer, run_dir):
    """A thread that looks at the receivers hides none of them from the one that waits."""
    scheme = ws.DoubleBufferScheme(run_dir)
    writer, *readers = peer(), peer(), peer(), peer()
    writer.call(send_from, scheme, nbytes=4096)
    for number, reader in enumerate(readers):
        reader.call(receive_in, scheme, f"reader{number}", nbytes=4096)
        reader.call(follow)
    assert writer.call(look_from_threads, 300) == []


def look_from_threads(state, times):
    from concurrent.futures import ThreadPoolExecutor

    def look(_):
        return [len(state.sender.receivers()) for _ in range(times)]

    with ThreadPoolExecutor(3) as pool:
        looking = pool.map(look, range(3))
        for number in range(1, 20):
            publish(state, number, wait="applied")
        return [count for counts in looking for count in counts if count != 3]


BACKWARDS = """
import sys, time
real = time.time
time.time = lambda: real() - 3600
import torch, weightsync as ws
path = sys.argv[1]
sender = ws.DoubleBufferScheme(path).create_sender({"w": torch.full((8,), 2.0)})
sender.connect()
try:
    print(sender.update_weights(version=1, wait="applied", timeout=20).receivers[0].state)
except ws.ReceiverError as error:
    print(error)
sys.stdout.flush()
sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["killed", "ended"])
def test_the_clock_goes_back(peer, run_dir, end):
    """A restarted sender whose clock is an hour behind: followed, or said to be behind."""
    scheme = ws.DoubleBufferScheme(run_dir)
    writer, reader = peer(), peer()
    writer.call(send_tiny, scheme, 1.0)
    reader.call(receive_tiny, scheme)
    reader.start(poll_tiny)
    writer.call(publish_tiny, 5)
    assert reader.result() == 1.0
    if end == "killed":
        writer.kill()
    else:
        writer.call(end_sender)
    reader.start(poll_tiny)
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", BACKWARDS, run_dir], stdin=pipe, stdout=pipe, text=True
    ) as behind:
        try:
            if end == "killed":
                assert reader.result() == 2.0
            else:
                with pytest.raises(PeerError, match="clock"):
                    reader.result()
            said, _ = behind.communicate(timeout=WAIT)
        finally:
            behind.kill()
    if end == "killed":
        assert said.strip() == "applied"
    else:
        assert "'reader'" in said
        assert "clock" in said


def send_tiny(state, scheme, value):
    state.sender = scheme.create_sender({"w": torch.full((8,), value)})
    state.sender.connect()


def publish_tiny(state, number):
    state.sender.update_weights(version=number)


def receive_tiny(state, scheme):
    state.weights = {"w": torch.zeros(8)}
    state.receiver = scheme.create_receiver(state.weights, id="reader")
    state.receiver.connect()


def poll_tiny(state):
    assert state.receiver.poll_and_apply(WAIT) is not None
    return state.weights["w"].unique().item()


def test_a_sender_that_is_told_to_stop(peer, run_dir):
    """SIGINT in the middle of many publishes: whole versions only, and the sender goes on."""
    scheme = ws.DoubleBufferScheme(run_dir)
    writer, reader = peer(), peer()
    writer.call(send_from, scheme, nbytes=4096)
    reader.call(receive_in, scheme, "reader", nbytes=4096)
    reader.call(follow)
    writer.start(publish_through_interrupts, 20)
    while not writer.answered(0.05):
        os.kill(writer.pid, signal.SIGINT)
    last, published = writer.result()
    assert published > 20
    assert reader.call(held_while_following, last) == (last, last)


def publish_through_interrupts(state, count):
    interrupts = published = number = 0
    while interrupts < count:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            while True:
                number += 1
                publish(state, number)
                published += 1
        except KeyboardInterrupt:
            interrupts += 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    publish(state, number + 1, wait="applied")
    return number + 1, published
