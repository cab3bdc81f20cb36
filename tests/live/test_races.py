"""Readers and a writer at full speed, and readers that are slow at the worst moments."""

import os
import random
import threading
import time

import pytest

import weightsync as ws
from tests.live.processes import (
    WAIT,
    constants,
    end_receiver,
    eventually,
    follow,
    held,
    held_while_following,
    poll,
    publish,
    publish_range,
    publish_until,
    read_until,
    receive_in,
    send_from,
    value_of,
)
from weightsync.deadline import Deadline
from weightsync.engines.module import ModuleEngine
from weightsync.files import Directory, WatchedFile
from weightsync.transport import Targets


class SlowEngine(ModuleEngine):
    """Copies one tensor, takes a second, and copies the others."""

    def apply(self, update, deadline):
        target = dict(self.target)
        name, tensor = target.popitem()
        manifest = update.snapshot.manifest
        update.snapshot.copy_into(Targets(manifest, {name: tensor}))
        time.sleep(1.0)
        update.snapshot.copy_into(Targets(manifest, target))


def apply_until(state, number):
    """Apply versions until the number is reached: what each left in the weights."""
    seen = []
    while not seen or seen[-1][0] < number:
        seen.append(poll(state))
    return seen


@pytest.mark.parametrize(("slots", "on_busy"), [(2, "wait"), (3, "wait"), (2, "skip")])
def test_nothing_is_overwritten_under_a_slow_reader(peer, run_dir, slots, on_busy):
    """R1."""
    scheme = ws.DoubleBufferScheme(run_dir, slots=slots, on_busy=on_busy)
    writer, quick, slow = peer(), peer(), peer()
    writer.call(send_from, scheme)
    quick.call(receive_in, scheme, "quick")
    slow.call(receive_in, scheme, "slow", engine=SlowEngine)
    writer.call(publish, 1)
    slow.start(apply_until, 6)
    eventually(lambda: any(slot.state == "leased" for slot in scheme.inspect().slots))
    quick.start(apply_until, 6)
    if on_busy == "wait":
        reports = writer.call(publish_range, 2, 6)
        assert not any(report.skipped for report in reports)
    else:
        skipped = 0
        for number in range(2, 6):
            skipped += writer.call(publish, number).skipped
        assert skipped > 0  # the slow one is inside its first copy all the while
        while writer.call(publish, 6).skipped:
            assert not quick.answered() or not slow.answered()
    for reader in quick, slow:
        seen = reader.result()
        assert seen[-1] == (6, 6)
        assert all(number == value for number, value in seen), seen
        assert [number for number, _ in seen] == sorted({number for number, _ in seen})


def race(peer, run_dir, seconds, readers, nbytes, **options):
    """A writer and readers at full speed; returns what the readers read."""
    scheme = ws.DoubleBufferScheme(run_dir, **options)
    writer, *reading = [peer() for _ in range(1 + readers)]
    writer.call(send_from, scheme, nbytes=nbytes)
    writer.call(publish, 1)
    for reader in reading:
        reader.start(read_until, scheme, seconds)
    last, _ = writer.call(publish_until, seconds, first=2, within=seconds + WAIT)
    reads = [reader.result(seconds + WAIT) for reader in reading]
    for seen in reads:
        assert all(number == value for number, value in seen), [s for s in seen if s[0] != s[1]]
        assert len({number for number, _ in seen}) > 5  # they did follow the writer
        assert max(number for number, _ in seen) <= last
    return reads


@pytest.mark.parametrize("verify", [True, False])
def test_no_read_is_torn(peer, run_dir, verify):
    """R3. Without digests it is the leases alone that keep reads whole."""
    race(peer, run_dir, 2.0, 2, 8 << 20, verify=verify)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [2, 3])
def test_no_read_is_torn_for_long(peer, run_dir, slots):
    race(peer, run_dir, 10.0, 2, 8 << 20, verify=False, slots=slots)


@pytest.mark.parametrize("slots", [2, 3])
def test_versions_go_while_a_reader_is_between_seeing_and_opening(peer, run_dir, slots):
    """R6, with a reader that knows what it does."""
    scheme = ws.DoubleBufferScheme(run_dir, slots=slots)
    writer = peer()
    writer.call(send_from, scheme)
    writer.call(publish, 1)
    subscriber = scheme.create_subscriber()
    subscriber.open(Deadline(WAIT))
    seen = subscriber.wait(None, Deadline(WAIT))
    assert seen.number == 1
    writer.call(publish_range, 2, 1 + slots)
    with pytest.raises(ws.VersionGoneError, match=f"{seen}.*newer"):
        subscriber.snapshot(seen, Deadline(WAIT))
    newest = subscriber.wait(seen, Deadline(WAIT))
    with subscriber.snapshot(newest, Deadline(WAIT)) as snapshot:
        snapshot.verify()
        assert value_of(dict(snapshot)) == newest.number == 1 + slots
    subscriber.close()


class LateScheme(ws.DoubleBufferScheme):
    """Receivers that stop at a gate between seeing a version and opening it."""

    def create_subscriber(self, receiver=None):
        subscriber = super().create_subscriber(receiver)
        gate = self.gate = threading.Event()
        self.seen = threading.Event()
        wait = subscriber.wait

        def see(after, deadline):
            version = wait(after, deadline)
            if version is not None:
                self.seen.set()
                assert gate.wait(WAIT)
            return version

        subscriber.wait = see
        return subscriber

    def __setattr__(self, name, value):  # the scheme itself is frozen
        object.__setattr__(self, name, value)


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("on_busy", ["wait", "skip"])
def test_a_receiver_that_opens_late_takes_the_newest(peer, run_dir, slots, on_busy):
    """R6: nothing escapes, whatever was removed meanwhile."""
    writer = peer()
    options = {"slots": slots, "on_busy": on_busy}
    writer.call(send_from, ws.DoubleBufferScheme(run_dir, **options))
    writer.call(publish, 1)
    scheme = LateScheme(run_dir, **options)
    weights = constants(-1)
    with scheme.create_receiver(weights) as receiver:
        receiver.connect(WAIT)
        reports = []
        thread = threading.Thread(target=lambda: reports.append(receiver.poll_and_apply(WAIT)))
        thread.start()
        assert scheme.seen.wait(WAIT)
        assert not any(r.skipped for r in writer.call(publish_range, 2, 4))
        scheme.gate.set()
        thread.join(WAIT)
        assert [report.version.number for report in reports] == [4]
        assert value_of(weights) == 4


def test_late_opening_while_the_model_changes(peer, run_dir):
    """The generation that was seen is gone when it is opened."""
    writer = peer()
    writer.call(send_from, ws.DoubleBufferScheme(run_dir))
    writer.call(publish, 1)
    scheme = LateScheme(run_dir)
    weights = constants(-1, nbytes=2 << 20)
    with scheme.create_receiver(weights) as receiver:
        receiver.connect(WAIT)
        reports = []
        thread = threading.Thread(target=lambda: reports.append(receiver.poll_and_apply(WAIT)))
        thread.start()
        assert scheme.seen.wait(WAIT)
        writer.call(publish_other_model, 2, 2 << 20)
        scheme.gate.set()
        thread.join(WAIT)
        assert [report.version.number for report in reports] == [2]
        assert value_of(weights) == 2


def publish_other_model(state, number, nbytes):
    state.weights = constants(0, nbytes=nbytes)
    state.sender.register_model(state.weights)
    return publish(state, number)


def test_skipping_never_waits(peer, run_dir):
    """A reader that never ends its lease, two slots: every second version at most."""
    scheme = ws.DoubleBufferScheme(run_dir, on_busy="skip")
    writer = peer()
    writer.call(send_from, scheme)
    writer.call(publish, 1)
    subscriber = scheme.create_subscriber()
    subscriber.open(Deadline(WAIT))
    with subscriber.snapshot(subscriber.wait(None, Deadline(WAIT)), Deadline(WAIT)) as snapshot:
        reports = writer.call(publish_range, 2, 5)
        assert [report.skipped for report in reports] == [False, True, True, True]
        assert value_of(dict(snapshot)) == 1
    assert not writer.call(publish, 6).skipped
    assert subscriber.wait(None, Deadline(0)).number == 6
    subscriber.close()


def test_readers_of_ending_runs(peer, run_dir):
    """A sender that comes and goes under a reader: a version is gone or whole, nothing else."""
    reader, writer = peer(), peer()
    scheme = ws.DoubleBufferScheme(run_dir)
    writer.start(send_and_end, scheme, 2.0)
    versions = reader.call(read_ending_runs, scheme, 1.5)
    writer.result()
    assert len(versions) >= 2  # how many depends on the machine
    assert versions == sorted(set(versions))
    assert not os.path.exists(run_dir)


def send_and_end(state, scheme, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        send_from(state, scheme, nbytes=4096)
        publish(state, 1)
        time.sleep(random.uniform(0, 0.003))
        state.sender.shutdown()


def read_ending_runs(state, scheme, seconds):
    subscriber = scheme.create_subscriber("reader")
    found = []
    subscriber.open(Deadline(WAIT))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        version = subscriber.wait(found[-1] if found else None, Deadline(0.1))
        if version is None:
            continue
        try:
            with subscriber.snapshot(version, Deadline(WAIT)) as snapshot:
                snapshot.verify()
                assert value_of(dict(snapshot)) == version.number
        except ws.VersionGoneError:
            continue
        found.append(version)
    subscriber.close()
    return found


def test_a_receiver_follows_through_short_runs(peer, run_dir):
    """Epochs grow also when one sender follows the other within a second, with the same step."""
    scheme = ws.DoubleBufferScheme(run_dir)
    reader, writer = peer(), peer()
    writer.call(send_from, scheme)
    reader.call(receive_in, scheme, "reader")
    reader.call(follow)
    epochs = []
    for value in range(4):
        report = writer.call(publish, 7, value, wait="applied")
        epochs.append(report.epoch)
        assert report.receivers == {"reader": ("applied", 7)}
        assert reader.call(held) == (7, value)
        writer.call(restart, scheme)
    assert epochs == sorted(set(epochs))


def restart(state, scheme):
    """The next trainer: nothing of the former one is left."""
    state.sender.shutdown()
    send_from(state, scheme, receivers=["reader"])


def test_a_replaced_file_is_always_noticed(tmp_path):
    """Also on file systems that give the next file the last one's inode number and time."""
    directory = Directory.open(str(tmp_path))
    watched = WatchedFile(directory, "head", 100)
    assert watched.read() is None
    directory.replace("head", b"0")
    status = directory.status("head")
    first = watched.read()
    assert first == b"0"
    assert watched.read() is first
    for number in range(1, 9):
        for _ in range(2):  # by then the number of the file read last would be free again
            directory.replace("head", b"%d" % number)
        os.utime(tmp_path / "head", ns=(status.st_atime_ns, status.st_mtime_ns))
        assert watched.read() == b"%d" % number
    directory.remove("head")
    assert watched.read() is None


def test_two_threads_of_one_receiver(peer, run_dir):
    """One follows while the other applies by hand."""
    scheme = ws.DoubleBufferScheme(run_dir)
    writer, reader = peer(), peer()
    writer.call(send_from, scheme)
    writer.call(publish, 1)
    reader.call(receive_in, scheme, "reader")
    reader.call(follow)
    reader.start(apply_by_hand, 40)
    last, _ = writer.call(publish_until, 1.0, first=2)
    assert all(number == value for number, value in reader.result())
    assert reader.call(held_while_following, last) == (last, last)
    reader.call(end_receiver)


def apply_by_hand(state, times):
    seen = []
    for _ in range(times):
        with state.receiver.hold():
            state.receiver.apply_weights()
            seen.append(held(state))
    return seen
