"""Every test here starts processes, and leaves none."""

import pathlib

import pytest

from tests.live.processes import Peer


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
