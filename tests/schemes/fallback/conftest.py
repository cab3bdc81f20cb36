"""Two double buffers that can be made to fail, and the ends that use both."""

import os

import pytest

import weightsync as ws
from tests.conftest import Ends
from tests.schemes.fallback import toy


@pytest.fixture
def two(run_dir):
    """Ends on a fallback of two runs, ``one`` and ``two`` below ``run_dir``; all is clean after."""
    os.mkdir(run_dir, 0o700)
    toy.FAULTS.clear()
    toy.ASKED.clear()
    made = Two(run_dir)
    yield made
    toy.FAULTS.clear()
    made.shutdown()
    left = sorted(os.listdir(run_dir))
    assert not left, f"left behind: {left}"


class Two(Ends):
    def __init__(self, path):
        super().__init__(path)
        self.one, self.other = (toy.ToyScheme(f"{path}/{name}", slots=3) for name in ("one", "two"))

    def scheme(self, **options):
        return ws.FallbackScheme([self.one, self.other], **options)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Short waits, so that tests of them are quick and their threads end soon after each test."""
    monkeypatch.setattr("weightsync.schemes.fallback.link._LOOK", 0.1)
    monkeypatch.setattr("weightsync.schemes.fallback.answers._ARRIVING", 0.5)
    monkeypatch.setattr("weightsync.run.ownership.BUSY_SECONDS", 0.2)
