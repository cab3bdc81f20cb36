"""What every test of the package uses: a run of its own, pairs of ends, comparison of bytes."""

import os
import secrets
import shutil
import signal
import threading

import pytest
import torch

import weightsync as ws
from weightsync.testing.processes import Peer

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # So a shell starts what it does not wait for; some tests interrupt themselves.
    signal.signal(signal.SIGINT, signal.default_int_handler)

WAIT = 10.0
"""Seconds for whatever should take none: only a broken test waits that long."""


@pytest.fixture
def run_dir():
    """An absolute path under /dev/shm that does not exist yet, and is gone after the test."""
    path = f"/dev/shm/weightsync-test-{os.getpid()}-{secrets.token_hex(4)}"
    yield path
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)  # processes of the test may still write there
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.lexists(path):
        os.unlink(path)


@pytest.fixture
def peers():
    """Makes processes, and ends them after the test."""
    made = []

    def make(count):
        made.extend(Peer() for _ in range(count))
        return made[-count:]

    yield make
    for peer in made:
        peer.dispose()


def looking(receiver):
    """An event that is set when a receiver of streams next looks for a version."""
    subscriber, begun = receiver._subscriber, threading.Event()
    wait = subscriber.wait

    def waiting(*arguments):
        begun.set()
        return wait(*arguments)

    subscriber.wait = waiting
    return begun


def newest_slot(scheme):
    """The file that the newest version's bytes lie in."""
    status = scheme.inspect()
    found = next(slot for slot in status.slots if slot.version == status.version)
    return f"{scheme.path}/{found.generation}/slot{found.slot}.bin"


@pytest.fixture
def ends(run_dir):
    """Makes senders and receivers on ``run_dir``; after the test all end, and leave nothing."""
    made = Ends(run_dir)
    yield made
    made.shutdown()
    left = [os.path.join(root, name) for root, _, names in os.walk(run_dir) for name in names]
    assert not os.path.lexists(run_dir), f"left behind: {left}"


class Ends:
    """Senders and receivers of one run."""

    def __init__(self, path):
        self.path = path
        self._made = []

    def scheme(self, **options):
        return ws.DoubleBufferScheme(self.path, **options)

    def sender(self, model=None, *, scheme=None, connect=True, **options):
        options.setdefault("timeout", WAIT)
        sender = (scheme or self.scheme()).create_sender(model, **options)
        self._made.append(sender)
        if connect:
            sender.connect(timeout=WAIT)
        return sender

    def receiver(self, engine, *, scheme=None, connect=True, **options):
        receiver = (scheme or self.scheme()).create_receiver(engine, **options)
        self._made.insert(0, receiver)  # receivers end before their sender
        if connect:
            receiver.connect(timeout=WAIT)
        return receiver

    def pair(self, model, engine, *, scheme=None, sender=None, receiver=None):
        """A connected sender of ``model``, and a connected receiver that drives ``engine``."""
        scheme = scheme or self.scheme()
        return (
            self.sender(model, scheme=scheme, **(sender or {})),
            self.receiver(engine, scheme=scheme, **(receiver or {})),
        )

    def shutdown(self):
        while self._made:
            self._made.pop(0).shutdown()


def send(ends, weights, **options):
    """Publish a mapping; return the manifest that readers see, and the tensors, cloned."""
    sender = ends.sender(weights, **options)
    report = sender.update_weights(version=1)
    return read(ends, report.version)


def read(ends, version=None, **scheme_options):
    """The manifest and tensors (clones, verified) of a version, as a reader without id sees it."""
    from weightsync.deadline import Deadline

    subscriber = ends.scheme(**scheme_options).create_subscriber()
    try:
        subscriber.open(Deadline(WAIT))
        version = version or subscriber.wait(None, Deadline(0))
        with subscriber.snapshot(version, Deadline(WAIT)) as snapshot:
            snapshot.verify()
            return snapshot.manifest, {name: copy_of(tensor) for name, tensor in snapshot}
    finally:
        subscriber.close()


def as_bytes(tensor):
    """All bytes of a tensor in row-major order, whatever its dtype and strides."""
    tensor = tensor.detach()
    if tensor.dtype.itemsize == 1:  # int1 to int7 have no copy kernel of their own
        tensor = tensor.view(torch.uint8)
    if not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
        tensor = tensor.contiguous().resolve_neg().resolve_conj()
    return tensor.reshape(-1).view(torch.uint8)


def copy_of(tensor):
    """A clone that also works for dtypes without a copy kernel."""
    return as_bytes(tensor).clone().view(tensor.dtype).view(tensor.shape)


def assert_same(one, other):
    """Same shape, dtype and bytes: NaN payloads and the sign of zero count."""
    assert (one.shape, one.dtype) == (other.shape, other.dtype)
    assert torch.equal(as_bytes(one).cpu(), as_bytes(other).cpu())


def assert_all_same(one, other):
    """Two mappings of tensors with the same names and bytes."""
    assert set(one) == set(other)
    for name in one:
        try:
            assert_same(one[name], other[name])
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
