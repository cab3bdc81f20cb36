"""A reader that hears what no sender of ours says: it goes on, and its buffers stay usable."""

from contextlib import closing
from types import SimpleNamespace

import pytest
import torch

import weightsync as ws
from tests.conftest import WAIT
from weightsync.deadline import Deadline
from weightsync.errors import NoRoomError
from weightsync.manifest import Manifest
from weightsync.schemes.nccl.control import Server
from weightsync.schemes.nccl.endpoint import Endpoint
from weightsync.schemes.nccl.reader import Reader
from weightsync.testing.processes import eventually

MANIFEST = Manifest.build([("w", torch.float32, (10,))], {})


@pytest.fixture
def scheme():
    return ws.NCCLScheme(backend="gloo", buffers=1)


def answers(scheme, *orders, then=lambda reader: None):
    """What a reader says to a sender of some orders.

    Args:
        then: called with the reader when it has said it.
    """
    heard = []

    def serve(hello, connection):
        connection.welcome()
        for order in orders:
            connection.send(order)
            heard.append(connection.receive())
        connection.receive()  # or the reader would come back, and be told the same again

    where = Endpoint(scheme.master_address, scheme.port)
    with closing(Server(where, None, serve)), closing(Reader(scheme, "r", 0, 1)) as reader:
        Deadline(WAIT).wait(lambda: len(heard) == len(orders) or None)
        then(reader)
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


def test_a_version_of_which_a_bucket_is_missing_is_not_whole(scheme):
    end = {"op": "end", "update": 1, "buckets": 1}
    _, failed = answers(scheme, begin(1, [1, 1]), end)
    assert (failed["op"], failed["update"]) == ("failed", 1)
    assert "0 of 1 buckets" in failed["error"]


def test_one_that_has_nothing_to_do_has_memory_ready_for_the_next_version():
    def see(reader):
        eventually(lambda: all(len(slot.bytes) for slot in reader.staging._slots))

    end = {"op": "end", "update": 1, "buckets": 0}
    scheme = ws.NCCLScheme(backend="gloo", buffers=3)
    _, whole = answers(scheme, begin(1, [1, 1]), end, then=see)
    assert whole == {"op": "whole", "update": 1}


def test_a_gpu_without_room_for_buckets_says_what_helps(monkeypatch):
    def full(*sizes, **options):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    reader = SimpleNamespace(_device=torch.device("cuda:3"))
    group = SimpleNamespace(buffers=[torch.zeros(2)])
    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(NoRoomError, match=r"cuda:3 has no room for 3 buckets.*bucket_mb="):
        Reader._buffer(reader, group, 0, 1)
    assert group.buffers == []
