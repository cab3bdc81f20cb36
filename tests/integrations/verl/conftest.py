"""A local Ray with room for all workers; each scheme's run is started once."""

import os
import secrets
import shutil

import pytest

import weightsync as ws

DEADLINE = 15.0
"""Seconds for each wait of the checkpoint engine."""


@pytest.fixture(scope="session")
def cluster():
    ray = pytest.importorskip("ray")
    pytest.importorskip("verl")
    ray.init(address="local", num_cpus=32, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module", params=["shm", "disk", "nccl"])
def any_run(cluster, request, tmp_path_factory):
    """A run over each scheme."""
    yield from _run(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def lasting_run(cluster, tmp_path_factory):
    yield from _run("shm", tmp_path_factory)


@pytest.fixture
def run(lasting_run):
    """A run in which nothing is out of order, whatever the test before has left."""
    lasting_run.put_in_order()
    return lasting_run


def _run(kind, tmp_path_factory):
    from tests.integrations.verl.actors import Run

    path = f"/dev/shm/weightsync-test-{os.getpid()}-{secrets.token_hex(4)}"
    urls = {
        "shm": f"shm://{path}?slots=3",
        "disk": f"disk://{tmp_path_factory.mktemp('verl')}/run",
        "nccl": ws.NCCLScheme(backend="gloo").to_url(),
    }
    made = Run(urls[kind], timeout=DEADLINE)
    try:
        yield made
        made.shutdown()
        assert not os.path.exists(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)
