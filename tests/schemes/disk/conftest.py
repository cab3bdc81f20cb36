"""A run on disk for each test, and what is in it."""

import os

import pytest

import weightsync as ws
from tests.conftest import WAIT
from weightsync.deadline import Deadline


@pytest.fixture
def run(tmp_path):
    made = Run(tmp_path / "run")
    yield made
    made.end()


class Run:
    """Senders and readers of one run."""

    def __init__(self, path):
        self.path = path
        self._made = []

    def scheme(self, **options):
        return ws.DiskScheme(self.path, **options)

    def sender(self, model=None, *, connect=True, **options):
        sender = self.scheme(**options).create_sender(model, timeout=WAIT)
        self._made.append(sender.shutdown)
        if connect:
            sender.connect(timeout=WAIT)
        return sender

    def receiver(self, engine, **options):
        receiver = self.scheme().create_receiver(engine, **options)
        self._made.insert(0, receiver.shutdown)
        receiver.connect(timeout=WAIT)
        return receiver

    def reader(self, **options):
        """A subscriber without an id, open."""
        subscriber = self.scheme(**options).create_subscriber()
        self._made.insert(0, subscriber.close)
        subscriber.open(Deadline(WAIT))
        return subscriber

    def lease(self, version, **options):
        snapshot = self.reader(**options).snapshot(version, Deadline(WAIT))
        self._made.insert(0, snapshot.close)
        return snapshot

    def folder(self, version):
        return self.path / os.path.basename(self.scheme().directory(version))

    def steps(self):
        """The numbers of the versions that are there, oldest first."""
        return [int(path.name.split("-")[1]) for path in sorted(self.path.glob("step-*"))]

    def end(self):
        while self._made:
            self._made.pop(0)()
