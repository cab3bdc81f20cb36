"""A run that was there and is gone: who asks for its versions is told so, and does not wait."""

import pytest
import torch

import weightsync as ws
from tests.conftest import WAIT
from weightsync.deadline import Deadline
from weightsync.run import membership

pytestmark = pytest.mark.timeout(60)  # none of the waits of 600 s

SCHEMES = {
    "double buffer": lambda path: ws.DoubleBufferScheme(path),
    "disk": lambda path: ws.DiskScheme(path, keep_files=False),
    "fallback": lambda path: ws.FallbackScheme(
        [ws.DoubleBufferScheme(f"{path}-1"), ws.DiskScheme(f"{path}-2", keep_files=False)]
    ),
}


@pytest.fixture(params=SCHEMES)
def scheme(request, run_dir):
    return SCHEMES[request.param](run_dir)


@pytest.fixture
def ended(scheme):
    """A worker's reader that has read a version, and the version, whose sender has ended."""
    reader = scheme.create_reader(0, 1)
    with scheme.create_sender({"w": torch.ones(3)}) as sender:
        sender.connect()
        version = sender.update_weights(version=1).version
        reader.snapshot(version, Deadline(WAIT)).close()
    yield reader, version
    reader.close()


@pytest.fixture(autouse=True)
def no_lag(monkeypatch):
    monkeypatch.setattr(membership, "_LAG", 0.2)


def test_a_worker_is_told_that_a_version_is_gone_with_its_run(ended):
    reader, version = ended
    with pytest.raises(ws.VersionGoneError, match="is gone"):
        reader.snapshot(version, Deadline(600))


def test_a_worker_that_never_read_from_the_run_is_told_too(scheme, ended):
    late = scheme.create_reader(0, 1)
    with pytest.raises(ws.VersionGoneError, match="is gone"):
        late.snapshot(ended[1], Deadline(600))
    late.close()


def test_the_next_senders_versions_are_found_by_who_read_the_former_ones(scheme, ended):
    with scheme.create_sender({"w": torch.full((3,), 2.0)}) as sender:
        sender.connect()
        version = sender.update_weights(version=1).version
        with ended[0].snapshot(version, Deadline(WAIT)) as snapshot:
            assert snapshot.tensor("w").tolist() == [2, 2, 2]


def test_a_version_that_is_asked_for_by_name_is_gone_with_its_run(ends):
    sender, receiver = ends.pair({"w": torch.ones(3)}, {"w": torch.zeros(3)})
    version = sender.update_weights(version=1).version
    receiver.poll_and_apply(timeout=WAIT)
    sender.shutdown()
    with pytest.raises(ws.VersionGoneError, match="is gone"):
        receiver.apply_weights(version, timeout=600)
    assert receiver.version == version
    assert receiver.verify_weights().ok  # a module is compared with what the receiver leases
