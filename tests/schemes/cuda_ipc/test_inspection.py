"""Looking at a run of shown memory from outside. With files in the place of a GPU's memory."""

import shutil

import pytest
import torch

from tests.conftest import WAIT
from tests.schemes.cuda_ipc.host import HostIPCScheme
from weightsync.deadline import Deadline
from weightsync.source import as_source
from weightsync.version import Version


@pytest.fixture
def scheme(run_dir):
    yield HostIPCScheme(run_dir)
    shutil.rmtree(f"{run_dir}.memory", ignore_errors=True)


def test_what_is_shown_is_seen_while_it_is_shown(scheme):
    publisher = scheme.create_publisher()
    epoch = publisher.open(Deadline(WAIT))
    version = Version(epoch, 1)
    publisher.publish(version, as_source({"w": torch.ones(100)}), Deadline(WAIT))
    status = scheme.inspect()
    assert (status.version, status.tensors, status.nbytes) == (version, 1, 400)
    assert [(slot.version, slot.state) for slot in status.slots] == [(version, "free")]
    subscriber = scheme.create_subscriber()
    with subscriber.snapshot(version, Deadline(WAIT)):
        assert [slot.state for slot in scheme.inspect().slots] == ["leased"]
    subscriber.close()
    publisher.conclude(version, Deadline(WAIT))
    assert scheme.inspect().version is None
    assert scheme.inspect().sender_alive
    assert scheme.run_kind.recognises(publisher._ownership.directory())
    publisher.close()
    with pytest.raises(FileNotFoundError):
        scheme.inspect()
