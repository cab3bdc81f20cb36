"""The disk under processes that die: what is on it is whole, and nobody has to clean up."""

import os
import random
import time

import pytest

import weightsync as ws
from tests.live.processes import (
    WAIT,
    PeerError,
    eventually,
    files_of,
    publish,
    publish_until,
    read_until,
    send_from,
    value_of,
)
from weightsync.deadline import Deadline
from weightsync.testing import roles


@pytest.fixture
def scheme(tmp_path):
    return ws.DiskScheme(tmp_path / "run", keep=2)


def newest(scheme):
    """``(number, what it holds)`` of the newest version; verified, without a live sender."""
    version = scheme.newest()
    if version is None:
        return None
    reader = scheme.create_reader(0, 1)
    try:
        with reader.snapshot(version, Deadline(WAIT)) as snapshot:
            snapshot.verify()
            return version.number, value_of(dict(snapshot))
    finally:
        reader.close()


@pytest.mark.parametrize(
    "kills", [8, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_a_writer_that_is_killed_at_any_moment(peer, scheme, kills):
    """Never a mix, for those that read all the time and for those that come afterwards."""
    chance = random.Random(kills)
    reader, last = peer(), None
    for kill in range(kills):
        writer = peer()
        writer.call(send_from, scheme, nbytes=3 << 20)
        if kill == 0:
            began = time.monotonic()
            writer.call(publish, 0)
            one = time.monotonic() - began
            reader.start(read_until, scheme, 600.0, stop_at=1_000_000)
        writer.start(publish_until, 60.0, first=1000 * kill + 1)
        time.sleep(chance.uniform(0.0, 4 * one))  # none, one, or a few
        writer.kill()
        last = newest(scheme)
        assert last[0] == last[1], "a mix"
    assert last[0] > 0, "no writer came to publish anything"
    writer = peer()
    writer.call(send_from, scheme, nbytes=3 << 20)
    assert newest(scheme) == last  # taken over, and nothing published yet
    writer.call(publish, 1_000_000)
    seen = reader.result()
    assert [entry for entry in seen if entry[0] != entry[1]] == []
    assert len({number for number, _ in seen}) > 2
    assert not any(".unfinished" in name or ".tmp" in name for name in files_of(scheme.path))
    assert len({name.split("/")[0] for name in files_of(scheme.path) if "step-" in name}) <= 3


def test_a_writer_that_is_killed_in_the_middle_of_a_large_version(peer, scheme):
    """Its half is gone when the next one comes; the former version was always there."""
    writer = peer()
    writer.call(send_from, scheme, nbytes=64 << 20)
    writer.call(publish, 1)
    writer.start(roles.publish_haltingly, 2, 60.0)
    eventually(lambda: any(".unfinished/model" in name for name in files_of(scheme.path)))
    writer.kill()
    assert any(".unfinished" in name for name in files_of(scheme.path))
    assert newest(scheme) == (1, 1)
    again = peer()
    again.call(send_from, scheme, nbytes=64 << 20)
    assert not any(".unfinished" in name for name in files_of(scheme.path))
    assert newest(scheme) == (1, 1)


def test_the_lease_of_a_reader_that_dies_ends(peer, scheme):
    writer, reader = peer(), peer()
    writer.call(send_from, scheme)
    writer.call(publish, 1)
    reader.call(roles.subscribe, scheme, "reader")
    version = reader.call(roles.see)
    assert reader.call(roles.lease, version) == 1
    for number in (2, 3, 4):
        writer.call(publish, number)
    folder = scheme.directory(version)
    assert os.path.exists(folder)
    reader.kill()
    writer.call(publish, 5)
    assert not os.path.exists(folder)


def test_a_receiver_that_joins_after_the_sender_was_replaced(peer, scheme):
    """It reads what the former one left, until there is something newer."""
    first = peer()
    first.call(send_from, scheme)
    first.call(publish, 7)
    first.kill()
    second, receiver = peer(), peer()
    with pytest.raises(PeerError, match="no live sender"):
        receiver.call(roles.receive_in, scheme, "engine", timeout=0.2)
    second.call(send_from, scheme)
    receiver.call(roles.receive_in, scheme, "engine")
    assert receiver.call(roles.poll) == (7, 7)
    second.call(publish, 3)
    assert receiver.call(roles.poll) == (3, 3)
