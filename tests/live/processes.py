"""Other processes for a test: they hold nothing of the test's own, and never outlive it.

They come from a fork server, a fresh process that has imported torch and nothing else, so that
starting one costs milliseconds.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import time
from types import SimpleNamespace

import torch

import weightsync as ws
from weightsync.deadline import Deadline
from weightsync.transport import Targets

WAIT = 30.0
"""Seconds for whatever should take none: only a broken test waits that long."""

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "torch",
        "pytest",
        "weightsync.schemes.double_buffer",
        "weightsync.engines",
        "weightsync.receiver",
    ]
)


class PeerError(Exception):
    """What a function raised in the other process: ``kind`` is the class's name."""

    def __init__(self, kind, text):
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.text = text


class Peer:
    """A process that runs the functions it is told to, each with a state that stays."""

    def __init__(self):
        self._link, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    @property
    def pid(self):
        return self.process.pid

    def start(self, function, *args, **options):
        """Have ``function(state, ...)`` run there; ``result`` tells what came of it."""
        self._link.send((function, args, options))

    def result(self, within=WAIT):
        assert self._link.poll(within), f"pid {self.pid} did not answer within {within} s"
        good, value = self._link.recv()
        if not good:
            raise PeerError(*value)
        return value

    def answered(self, within=0.0):
        return self._link.poll(within)

    def call(self, function, *args, within=WAIT, **options):
        self.start(function, *args, **options)
        return self.result(within)

    def kill(self):
        """End it at once, wherever it is, and wait until it is gone."""
        self.process.kill()
        self.process.join(WAIT)
        assert self.process.exitcode == -signal.SIGKILL

    def pause(self):
        os.kill(self.pid, signal.SIGSTOP)
        eventually(lambda: _kernel_state(self.pid) == "T")

    def go_on(self):
        os.kill(self.pid, signal.SIGCONT)

    def end(self):
        """Let it return from its main function, as a program does that is done."""
        self._link.send(None)
        self.process.join(WAIT)
        assert self.process.exitcode == 0

    def dispose(self):
        if self.process.is_alive():
            self.process.kill()
        self.process.join(WAIT)
        self._link.close()


def _serve(link):
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test; its peers it ends itself
    state = SimpleNamespace()
    while True:
        try:
            order = link.recv()
        except EOFError:
            return
        if order is None:
            return
        function, args, options = order
        try:
            answer = True, function(state, *args, **options)
        except Exception as error:
            answer = False, (type(error).__name__, str(error))
        link.send(answer)


def _kernel_state(pid):
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0]


def eventually(ready, timeout=WAIT):
    """Wait for a condition, and return what it gave."""
    found = Deadline(timeout).wait(lambda: ready() or None)
    assert found is not None, "the condition did not come true"
    return found


# -------------------------------------------------------------------- weights that show tearing


def constants(value, nbytes=1 << 20, tensors=4):
    """Tensors that all hold one number, in every element."""
    count = max(1, nbytes // tensors // 4)
    return {f"layer{n}": torch.full((count,), value, dtype=torch.int32) for n in range(tensors)}


def fill(weights, value):
    for tensor in weights.values():
        tensor.fill_(value)


def value_of(weights):
    """The one number that they hold; a text that shows the mix if they are torn."""
    found = sorted({int(n) for t in weights.values() for n in (t.min(), t.max())})
    return found[0] if len(found) == 1 else f"torn: {found}"


# -------------------------------------------------------------------- what senders do


def send_from(state, scheme, value=0, timeout=WAIT, receivers=0, **shape):
    """Be a connected sender of constants. Returns the epoch."""
    state.weights = constants(value, **shape)
    state.sender = scheme.create_sender(state.weights)
    state.sender.connect(timeout=timeout, receivers=receivers)
    return state.sender._epoch


def publish(state, number, value=None, timeout=WAIT, **options):
    """Publish a constant, by default the version's number."""
    fill(state.weights, number if value is None else value)
    report = state.sender.update_weights(version=number, timeout=timeout, **options)
    return summary(report)


def publish_range(state, first, last, **options):
    return [publish(state, number, **options) for number in range(first, last + 1)]


def publish_until(state, seconds, first=1, **options):
    """Publish as fast as it goes; returns the last number and how many were skipped."""
    end = time.monotonic() + seconds
    number, skipped = first, 0
    while time.monotonic() < end:
        skipped += publish(state, number, **options).skipped
        number += 1
    return number - 1, skipped


def summary(report):
    receivers = {r.receiver: (r.state, r.version and r.version.number) for r in report.receivers}
    return SimpleNamespace(
        number=report.version.number,
        epoch=report.version.epoch,
        skipped=report.skipped,
        receivers=receivers,
    )


def end_sender(state):
    state.sender.shutdown()


# -------------------------------------------------------------------- what receivers do


def receive_in(state, scheme, id, timeout=WAIT, engine=None, **shape):
    """Be a connected receiver."""
    state.weights = constants(-1, **shape)
    state.engine = state.weights if engine is None else engine(state.weights)
    state.receiver = scheme.create_receiver(state.engine, id=id)
    state.receiver.connect(timeout)


def poll(state, timeout=WAIT):
    """Apply what is new. Returns ``(number, what the weights hold)``, or None."""
    report = state.receiver.poll_and_apply(timeout)
    return report and (report.version.number, value_of(state.weights))


def held(state):
    version = state.receiver.version
    return (version and version.number), value_of(state.weights)


def follow(state):
    """Apply everything in the background; errors are kept."""
    state.errors = []
    state.receiver.follow(on_error=lambda error: state.errors.append(repr(error)))


def held_while_following(state, number, timeout=WAIT):
    """Wait until the version's number is reached, and return it with what the weights hold."""

    def reached():
        with state.receiver.hold() as version:
            if version is not None and version.number >= number:
                return version.number, value_of(state.weights)
        return None

    found = eventually(reached, timeout)
    assert not state.errors, state.errors
    return found


def end_receiver(state):
    state.receiver.shutdown()


def read_until(state, scheme, seconds, stop_at=None, count=None):
    """Read versions with a bare subscriber: ``[(number, what it held), ...]`` of all reads."""
    target = None
    seen = []
    subscriber = scheme.create_subscriber()
    subscriber.open(Deadline(WAIT))
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            version = subscriber.wait(None, Deadline(WAIT))
            try:
                with subscriber.snapshot(version, Deadline(WAIT)) as snapshot:
                    if target is None:
                        specs = snapshot.manifest.tensors
                        target = {s.name: torch.empty(s.shape, dtype=s.dtype) for s in specs}
                    snapshot.copy_into(Targets(snapshot.manifest, target))
            except ws.VersionGoneError:
                continue
            seen.append((version.number, value_of(target)))
            if len(seen) == count or (stop_at is not None and version.number >= stop_at):
                break
    finally:
        subscriber.close()
    return seen


# -------------------------------------------------------------------- what is left


def files_of(path):
    """Every file below a directory, relative to it."""
    return sorted(
        os.path.relpath(os.path.join(root, name), path)
        for root, _, names in os.walk(path)
        for name in names
    )


def bytes_of(path):
    total = 0
    for name in files_of(path):
        with contextlib.suppress(FileNotFoundError):  # it may be replaced while we look
            total += os.lstat(os.path.join(path, name)).st_blocks * 512
    return total


def open_files(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


def return_memory_at_once():
    """Have large tensors come straight from the kernel: what the allocator keeps is no leak."""
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD of mallopt(3), fixed from now on


def resident_bytes(pid):
    """Private memory of a process; pages that it shares with others are not counted."""
    with open(f"/proc/{pid}/status") as status:
        lines = dict(line.split(":", 1) for line in status)
    return int(lines["RssAnon"].split()[0]) << 10
