"""A reader that hears what no sender of ours says: it goes on, and its buffers stay usable."""

from contextlib import closing

import pytest
import torch

import weightsync as ws
from tests.conftest import WAIT
from weightsync.deadline import Deadline
from weightsync.manifest import Manifest
from weightsync.schemes.nccl.control import Server
from weightsync.schemes.nccl.endpoint import Endpoint
from weightsync.schemes.nccl.reader import Reader

MANIFEST = Manifest.build([("w", torch.float32, (10,))], {})


@pytest.fixture
def scheme():
    return ws.NCCLScheme(backend="gloo", buffers=1)


def answers(scheme, *orders):
    """What a reader says to a sender of some orders."""
    heard = []

    def serve(hello, connection):
        connection.welcome()
        for order in orders:
            connection.send(order)
            heard.append(connection.receive())
        connection.receive()  # or the reader would come back, and be told the same again

    where = Endpoint(scheme.master_address, scheme.port)
    with closing(Server(where, None, serve)), closing(Reader(scheme, "r", 0, 1)):
        Deadline(WAIT).wait(lambda: len(heard) == len(orders) or None)
    return heard


def begin(update, version):
    return {
        "op": "begin",
        "update": update,
        "round": 1,
        "version": version,
        "fingerprint": MANIFEST.fingerprint,
        "manifest": MANIFEST.to_json().decode(),
        "seconds": 0.1,
    }


@pytest.mark.parametrize("version", ["garbage", None, [1], [1, -1], {"epoch": 1}])
def test_a_version_that_is_none_takes_no_buffer_for_ever(scheme, version):
    failed, ready = answers(scheme, begin(1, version), begin(2, [1, 1]))
    assert (failed["op"], failed["update"]) == ("failed", 1)
    assert (ready["op"], ready["update"]) == ("ready", 2)
