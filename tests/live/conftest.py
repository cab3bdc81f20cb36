"""Every test here starts processes, and leaves none."""

import pathlib

import pytest

from tests.live import trainers
from tests.live.processes import Peer, PeerError
from tests.live.world import World


def pytest_collection_modifyitems(items):
    here = pathlib.Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.live)


@pytest.fixture
def peer():
    """Makes processes, and ends them all after the test."""
    made = []

    def make():
        made.append(Peer())
        return made[-1]

    yield make
    for one in reversed(made):
        one.dispose()


@pytest.fixture(scope="session")
def worlds(tmp_path_factory):
    """Makes worlds of a size, one of each for all tests that leave it well."""
    made = {}

    def make(size):
        if size not in made:
            made[size] = World(size, tmp_path_factory.mktemp("world") / "store")
        return made[size]

    make.made = made
    yield make
    for world in made.values():
        world.dispose()


@pytest.fixture
def world(worlds):
    """Ranks that other tests use too; after a test that failed they are other ones."""
    used = []

    def make(size):
        used.append(size)
        return worlds(size)

    yield make
    for size in used:
        ended = worlds(size).outcomes(trainers.end_senders)
        if any(isinstance(outcome, PeerError) for outcome in ended):
            worlds.made.pop(size).dispose()


@pytest.fixture
def mortal(worlds, tmp_path):
    """Ranks of one test's own, that may be killed."""
    made = []

    def make(size, **options):
        made.append(World(size, tmp_path / "store", **options))
        return made[-1]

    yield make
    for one in made:
        one.dispose()
