"""Nothing is left behind: files, locks, descriptors, memory; and nobody else's are touched."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

import weightsync as ws
from tests.live.processes import (
    WAIT,
    PeerError,
    bytes_of,
    constants,
    end_receiver,
    end_sender,
    files_of,
    open_files,
    poll,
    publish,
    publish_range,
    receive_in,
    resident_bytes,
    return_memory_at_once,
    send_from,
    value_of,
)
from weightsync.deadline import Deadline

MIB = 1 << 20


def contents(path):
    """Name, inode and size of every file: the same again if nobody touched them."""
    found = []
    for name in files_of(path):
        status = os.lstat(os.path.join(path, name))
        found.append((name, status.st_ino, status.st_size))
    return found


def test_a_killed_senders_files_are_reclaimed(peer, run_dir):
    """G1: the dead run's files are reused or freed, a live run and foreign files not touched."""
    os.mkdir(run_dir, 0o700)
    dead = ws.DoubleBufferScheme(f"{run_dir}/dead")
    live = ws.DoubleBufferScheme(f"{run_dir}/live")
    first, second, third, reader = peer(), peer(), peer(), peer()
    third.call(send_from, live)
    reader.call(receive_in, live, "reader")
    third.call(publish, 1)
    first.call(send_from, dead)
    first.call(publish_range, 1, 2)
    for name in ("foreign", "foreign.json", "generation-0001/foreign", "receivers/foreign.txt"):
        with open(f"{dead.path}/{name}", "w") as file:
            file.write(name)
    first.kill()
    before, size = contents(live.path), bytes_of(dead.path)
    for number in range(3, 6):  # every one of them dies in its turn
        again = peer()
        again.call(send_from, dead)
        again.call(publish, number)
        assert bytes_of(dead.path) <= size + 65536
        again.kill()
    second.call(send_from, dead)
    second.call(publish, 9)
    second.call(end_sender)
    assert files_of(dead.path) == [
        "foreign",
        "foreign.json",
        "generation-0001/foreign",
        "receivers/foreign.txt",
    ]
    assert contents(live.path) == before
    assert reader.call(poll) == (1, 1)
    reader.call(end_receiver)
    third.call(end_sender)
    assert not os.path.exists(live.path)
    subprocess.run(["rm", "-rf", run_dir], check=True)


def test_another_model_after_a_crash(peer, run_dir):
    """The dead run's generation goes before the new one is made, so both need not fit."""
    scheme = ws.DoubleBufferScheme(run_dir)
    first, second = peer(), peer()
    first.call(send_from, scheme, nbytes=4 * MIB)
    first.call(publish_range, 1, 3)
    first.kill()
    second.call(send_from, scheme, nbytes=6 * MIB)
    assert 12 * MIB <= bytes_of(run_dir) <= 12 * MIB + 65536
    second.call(publish, 1)
    assert {name.split("/")[0] for name in files_of(run_dir) if "/" in name} == {"generation-0002"}


def test_another_model_after_a_crash_under_a_reader(peer, run_dir):
    """A receiver that outlived the sender keeps what it holds until it has the new one."""
    scheme = ws.DoubleBufferScheme(run_dir)
    first, second = peer(), peer()
    first.call(send_from, scheme)
    first.call(publish, 1)
    subscriber = scheme.create_subscriber()
    subscriber.open(Deadline(WAIT))
    snapshot = subscriber.snapshot(subscriber.wait(None, Deadline(WAIT)), Deadline(WAIT))
    first.kill()
    second.call(send_from, scheme, nbytes=2 * MIB)
    second.call(publish, 1, 5)
    snapshot.verify()
    assert value_of(dict(snapshot)) == 1
    snapshot.close()
    second.call(publish, 2)
    assert {name.split("/")[0] for name in files_of(run_dir) if "/" in name} == {"generation-0002"}
    subscriber.close()


def test_half_written_files_of_dead_processes(peer, run_dir):
    """Every file that a kill between two steps can leave is gone after the next start."""
    scheme = ws.DoubleBufferScheme(run_dir)
    first, second, reader = peer(), peer(), peer()
    first.call(send_from, scheme)
    reader.call(receive_in, scheme, "reader")
    first.call(publish, 1)
    first.kill()
    left = [
        ".head.json.123.456.tmp",
        "generation-0001/.slot0.json.123.456.tmp",
        "receivers/.gone.json.123.456.tmp",
        "receivers/gone.json",
        "receivers/gone.lock",
        "receivers/lone.lock",
        "generation-0007/slot0.bin",  # killed before its manifest was there
        "generation-0007/slot0.lock",
        "generation-0003/slot1.bin",  # killed while it was removed
    ]
    for name in left:
        os.makedirs(os.path.dirname(f"{run_dir}/{name}"), mode=0o700, exist_ok=True)
        with open(f"{run_dir}/{name}", "wb") as file:
            file.write(b"{")
    mine = f"{run_dir}/receivers/.reader.json.123.456.tmp"
    with open(mine, "wb"):
        pass
    second.call(send_from, scheme)
    second.call(publish, 1)
    swept = set(left) - {"generation-0001/.slot0.json.123.456.tmp"}  # goes with its generation
    assert not swept & set(files_of(run_dir))
    assert os.path.exists(mine)  # a living receiver may be just about to rename it
    assert reader.call(poll) == (1, 1)
    reader.call(end_receiver)
    second.call(end_sender)
    assert not os.path.exists(run_dir)


def attach_and_detach(state, scheme, updates, every):
    """Publish, with a receiver in this process that comes and goes. Returns a series of counts."""
    return_memory_at_once()
    counts = []
    receiver = None
    for number in range(1, updates + 1):
        if number % every == 1:
            target = constants(-1, nbytes=sum(t.nbytes for t in state.weights.values()))
            receiver = scheme.create_receiver(target, id=f"r{number}")
            state.sender.attach(receiver)
        publish(state, number)
        assert value_of(target) == number
        if number % every == 0:
            state.sender.detach(receiver)
            receiver.shutdown()
            del receiver, target
            counts.append((open_files(os.getpid()), bytes_of(scheme.path), resident_bytes("self")))
    return counts


@pytest.mark.parametrize(
    ("updates", "every", "nbytes"),
    [(40, 5, 8 * MIB), pytest.param(300, 10, 32 * MIB, marks=pytest.mark.slow)],
)
def test_nothing_grows(peer, run_dir, updates, every, nbytes):
    """G3."""
    scheme = ws.DoubleBufferScheme(run_dir)
    writer, reader = peer(), peer()
    writer.call(send_from, scheme, nbytes=nbytes)
    reader.call(receive_in, scheme, "other", nbytes=nbytes)
    reader.start(poll_counting, updates, every)
    counts = writer.call(attach_and_detach, scheme, updates, every, within=120)
    settled = counts[20 // every :]
    assert {count[0] for count in settled} == {settled[0][0]}
    assert all(2 * nbytes <= count[1] <= 2 * nbytes + 65536 for count in counts)
    # Less than one set of weights in all: a leak would be as much at every attach.
    assert max(count[2] for count in settled) - settled[0][2] < nbytes
    writer.call(end_sender)
    assert not os.path.exists(run_dir)
    files, resident = zip(*reader.result(), strict=True)
    assert len(set(files[1:])) == 1
    assert max(resident[1:]) - resident[1] < nbytes


def poll_counting(state, last, every):
    return_memory_at_once()
    counts = []
    number = 0
    while number < last:
        found = poll(state)
        if found is None:
            break
        number, value = found
        assert number == value
        if not counts or number >= every * len(counts):
            counts.append((open_files("self"), resident_bytes("self")))
    state.receiver.shutdown()
    return counts


def grow_and_shrink(state, times):
    """Another model for every update: what is in the directory after each."""
    found = []
    for number in range(1, times + 1):
        state.weights = constants(number, nbytes=(1 + number % 3) * MIB)
        state.sender.register_model(state.weights)
        publish(state, number)
        found.append((open_files("self"), bytes_of(state.sender.scheme.path)))
    return found


def test_a_model_that_keeps_changing(peer, run_dir):
    writer = peer()
    writer.call(send_from, ws.DoubleBufferScheme(run_dir))
    found = writer.call(grow_and_shrink, 30)
    assert len({files for files, _ in found}) == 1
    for number, (_, size) in enumerate(found, 1):
        assert size <= 2 * (1 + number % 3) * MIB + 65536
    assert len([name for name in os.listdir(run_dir) if "generation" in name]) == 1


def test_a_publish_that_fails_half_way(peer, run_dir):
    """The version before stays, nothing grows, and the next one comes through."""
    scheme = ws.DoubleBufferScheme(run_dir)
    writer, reader = peer(), peer()
    writer.call(send_from, scheme)
    reader.call(receive_in, scheme, "reader")
    writer.call(publish, 1)
    assert reader.call(poll) == (1, 1)
    names = files_of(run_dir)
    for number in 2, 3:
        with pytest.raises(PeerError, match="half-way"):
            writer.call(publish_half, number)
        assert reader.call(poll, 0.0) is None
        assert set(files_of(run_dir)) <= set(names) | {"generation-0001/slot1.lock"}
    writer.call(publish, 3)
    assert reader.call(poll) == (3, 3)


def publish_half(state, number):
    weights = constants(number)

    def stream():
        nonlocal passes
        passes += 1
        for name, tensor in weights.items():
            if passes == 2 and name == "layer2":
                raise RuntimeError("half-way")
            yield name, tensor

    passes = 0
    state.sender.update_weights(stream, version=number)


# -------------------------------------------------------------------- ways to end

TRAINER = """
import os, sys, threading
import torch, weightsync as ws
sender = ws.DoubleBufferScheme(sys.argv[1]).create_sender({"w": torch.ones(8)})
sender.connect()
sender.update_weights(version=1)
assert os.path.exists(sys.argv[1] + "/head.json")
"""

ENDS = {
    "the end of the program": ("", 0),
    "an exception": ("raise ValueError('loss is nan')", 1),
    "sys.exit": ("sys.exit(3)", 3),
    "sys.exit in a function that holds it all": (
        "def main(sender, ring):\n    ring.append(ring)\n    sys.exit(4)\nmain(sender, [sender])",
        4,
    ),
    "Ctrl-C": ("import signal; os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
}


@pytest.mark.slow
def test_trainers_that_just_end(run_dir):
    """Without ``shutdown()``."""
    os.mkdir(run_dir, 0o700)
    programs = {}
    try:
        for number, (name, (end, _)) in enumerate(ENDS.items()):
            programs[name] = subprocess.Popen(
                [sys.executable, "-c", TRAINER + end, f"{run_dir}/{number}"],
                stderr=subprocess.PIPE,
                text=True,
            )
        for name, program in programs.items():
            _, words = program.communicate(timeout=WAIT)
            assert program.returncode == ENDS[name][1], (name, words)
            assert "Assertion" not in words
    finally:
        for program in programs.values():
            program.kill()
            program.wait()
            program.stderr.close()
    assert os.listdir(run_dir) == []


def send_globally(state, scheme):
    """A sender that no local variable holds, as in a script's main module."""
    globals()["kept"] = scheme.create_sender(constants(1))
    globals()["kept"].connect()
    globals()["kept"].update_weights(version=1)


def test_a_trainer_in_a_multiprocessing_child_that_just_ends(peer, run_dir):
    """``multiprocessing`` and ``torch.multiprocessing.spawn`` end without atexit."""
    scheme = ws.DoubleBufferScheme(run_dir)
    writer = peer()
    writer.call(send_globally, scheme)
    assert os.path.exists(run_dir)
    writer.end()
    assert not os.path.exists(run_dir)


def test_a_sender_that_is_let_go(peer, run_dir):
    writer = peer()
    writer.call(send_from, ws.DoubleBufferScheme(run_dir))
    writer.call(publish, 1)
    writer.call(forget)
    assert not os.path.exists(run_dir)


def forget(state):
    del state.sender


# -------------------------------------------------------------------- forks


def fork_a_sleeper():
    pid = os.fork()
    if pid == 0:
        signal.alarm(int(2 * WAIT))  # whatever becomes of the test
        signal.pause()
        os._exit(0)
    return pid


def fork_and_sleep(state, count):
    """What a DataLoader does: children that know nothing of any of this, and stay."""
    state.children = []
    for _ in range(count):
        state.children.append(fork_a_sleeper())
    return state.children


@pytest.fixture
def orphans():
    """Process ids to end after the test."""
    pids = []
    yield pids
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def test_forked_children_keep_no_lock_of_a_dead_sender(peer, run_dir, orphans):
    scheme = ws.DoubleBufferScheme(run_dir)
    first, second = peer(), peer()
    first.call(send_from, scheme)
    first.call(publish, 1)
    orphans += first.call(fork_and_sleep, 2)
    first.call(publish, 2)
    first.kill()
    assert all(os.path.exists(f"/proc/{pid}") for pid in orphans)
    second.call(send_from, scheme)
    second.call(publish_range, 3, 6)
    second.call(end_sender)
    assert not os.path.exists(run_dir)


def test_forked_children_keep_no_lease_of_a_dead_or_ended_receiver(peer, run_dir, orphans):
    scheme = ws.DoubleBufferScheme(run_dir)
    writer, killed, ended = peer(), peer(), peer()
    writer.call(send_from, scheme)
    for one, id in ((killed, "killed"), (ended, "ended")):
        one.call(receive_in, scheme, id)
    writer.call(publish, 1)
    for one in killed, ended:
        one.call(poll)
        orphans += one.call(fork_and_sleep, 1)
    killed.kill()
    ended.call(end_receiver)
    writer.call(publish_range, 2, 5, timeout=10)
    again = peer()
    again.call(receive_in, scheme, "killed")
    again.start(poll)
    assert again.result() == (5, 5)


FORKS = """
import os, subprocess, sys, time
import torch, weightsync as ws
path = sys.argv[1]
weights = {"w": torch.zeros(8)}
target = {"w": torch.ones(8)}
scheme = ws.DoubleBufferScheme(path)
sender = scheme.create_sender(weights)
receiver = scheme.create_receiver(target, id="reader")
sender.connect()
sender.attach(receiver)
sender.update_weights(version=1)

def child(main):
    pid = os.fork()
    if pid == 0:
        main()
        sys.exit(7)          # runs everything that a program runs at its end
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == 7, code

def use():
    for call in (lambda: sender.update_weights(version=9), lambda: sender.connect(timeout=0.1),
                 lambda: receiver.poll_and_apply()):
        try:
            call()
        except ws.WeightSyncError as error:
            print(error)
        else:
            raise SystemExit("a child could use its parent's end")

def shut():
    receiver.shutdown()
    sender.shutdown()

for number, main in enumerate([lambda: None, use, shut], 2):
    child(main)
    weights["w"].fill_(number)
    sender.update_weights(version=number, wait="applied", timeout=20)
    assert target["w"].eq(number).all()

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return index

loader = torch.utils.data.DataLoader(Numbers(), num_workers=2, multiprocessing_context="fork")
for _ in range(2):
    for number, _ in enumerate(loader, number + 1):
        sender.update_weights(version=number)
sleeper = subprocess.Popen(["sleep", "60"], close_fds=False)
receiver.shutdown()
sender.shutdown()
assert not os.path.exists(path)
sender = scheme.create_sender(weights)
sender.connect()
print("done")
sys.stdout.flush()
sleeper.kill()
"""


def test_forked_children_that_end_or_use_what_they_inherited(run_dir):
    done = subprocess.run(
        [sys.executable, "-c", FORKS, run_dir], capture_output=True, text=True, timeout=WAIT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "done"
    assert not os.path.exists(run_dir)


def fork_all_the_time(state, forks, updates):
    """Children forked by one thread while another leases one version after the other."""
    children = []

    def fork():
        while len(children) < forks:
            children.append(fork_a_sleeper())
            time.sleep(0.02)

    thread = threading.Thread(target=fork)
    thread.start()
    seen = []
    while thread.is_alive() or len(seen) < updates:
        found = poll(state, 0.01)
        if found:
            seen.append(found)
    return children, seen


def test_forks_at_any_moment_keep_no_lease(peer, run_dir, orphans):
    """A child that is forked between the opening and the locking of a file has a copy of it."""
    scheme = ws.DoubleBufferScheme(run_dir, on_busy="skip")
    writer, reader = peer(), peer()
    writer.call(send_from, scheme, nbytes=4096)
    reader.call(receive_in, scheme, "reader", nbytes=4096)
    reader.start(fork_all_the_time, 30, 30)
    number = 0
    while not reader.answered():
        number += 1
        writer.call(publish, number)
    children, seen = reader.result()
    orphans += children
    assert all(number == value for number, value in seen)
    reader.call(end_receiver)
    reports = writer.call(publish_range, number + 1, number + 4)
    assert not any(report.skipped for report in reports)  # every slot is free again
    again = peer()
    again.call(receive_in, scheme, "reader", nbytes=4096)
    assert again.call(poll) == (number + 4, number + 4)
