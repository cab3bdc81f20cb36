"""The double buffer's readers on a GPU: page-locked slots, versions read ahead, wrong bytes."""

import gc
import os

import pytest
import torch

import weightsync as ws
from tests.conftest import WAIT
from tests.live.processes import constants, eventually, publish, publish_until, send_from
from tests.live.test_readahead import Engine
from weightsync.chunks import CHUNK, Geometry
from weightsync.deadline import Deadline
from weightsync.device import device_of
from weightsync.errors import CorruptError, VersionGoneError
from weightsync.selection import Selection
from weightsync.testing.roles import publish_haltingly
from weightsync.upload import Staging

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(60, func_only=True),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NBYTES = 300 * CHUNK + 64_000
"""Some windows, and a part of one."""


@pytest.fixture
def device():
    return device_of(torch.device("cuda", 0))


@pytest.fixture
def reader(ends):
    sender = ends.sender()
    version = sender.update_weights(constants(1, NBYTES), version=1).version
    reader = ends.scheme().create_reader(0, 1)
    yield reader, version
    reader.close()


def staging_for(device, manifest):
    geometry = Geometry(manifest)
    return Staging(device, geometry, Selection.everything(geometry.nbytes))


def test_a_readers_mapping_is_page_locked_once(reader, device, monkeypatch):
    subscriber, version = reader
    locks = []
    plain = type(device).page_lock

    def page_lock(self, *args):
        locks.append(args)
        return plain(self, *args)

    monkeypatch.setattr(type(device), "page_lock", page_lock)
    for _ in range(3):
        with subscriber.snapshot(version, Deadline(WAIT)) as snapshot:
            assert snapshot.memory().page_lock(device), "the driver refuses to lock the slot"
    assert [writable for *_, writable in locks] == [False]


def test_a_lock_goes_with_its_mapping(ends, reader, device, caplog):
    """Else the next mapping at the same address would be refused."""
    _, version = reader
    addresses = set()
    for _ in range(20):
        other = ends.scheme().create_reader(0, 1)
        with other.snapshot(version, Deadline(WAIT)) as snapshot:
            memory = snapshot.memory()
            addresses.add(memory.address)
            assert memory.page_lock(device), caplog.text
        del memory, snapshot
        other.close()
        gc.collect()
    assert len(addresses) < 20, "no address came twice: this test says nothing"
    assert "page-locked" not in caplog.text
    assert "not unlocked" not in caplog.text


def test_a_lock_may_outlive_its_reader_and_its_file(reader, device, run_dir):
    subscriber, version = reader
    snapshot = subscriber.snapshot(version, Deadline(WAIT))
    memory, staging = snapshot.memory(), staging_for(device, snapshot.manifest)
    assert memory.page_lock(device)
    snapshot.close()
    subscriber.close()
    os.unlink(f"{run_dir}/generation-0001/slot0.bin")
    staging.take(memory, version, Deadline(WAIT))
    assert int(staging.buffer.view(torch.int32).min()) == 1


def test_one_wrong_bit_is_found_on_the_gpu_and_named(ends, reader, device):
    subscriber, version = reader
    with subscriber.snapshot(version, Deadline(WAIT)) as snapshot:
        staging = staging_for(device, snapshot.manifest)
        staging.take(snapshot.memory(), version, Deadline(WAIT))
        slot = next(s.slot for s in ends.scheme().inspect().slots if s.version == version)
        for at in (5, NBYTES // 2, NBYTES - 1):
            with open(f"{ends.path}/generation-0001/slot{slot}.bin", "r+b") as file:
                file.seek(at)
                (right,) = file.read(1)
                file.seek(at)
                file.write(bytes([right ^ 8]))
                file.flush()
                staging = staging_for(device, snapshot.manifest)
                name = next(s.name for s in snapshot.manifest.tensors if at < s.offset + s.nbytes)
                with pytest.raises(CorruptError, match=f"1 chunks .*'{name}'"):
                    staging.take(snapshot.memory(), version, Deadline(WAIT))
                assert staging.version is None
                file.seek(at)
                file.write(bytes([right]))
        staging.take(snapshot.memory(), version, Deadline(WAIT))
        assert staging.version == version


@pytest.fixture
def scheme(run_dir):
    return ws.DoubleBufferScheme(run_dir, slots=3)


@pytest.fixture
def engine(scheme):
    made = []

    def make():
        made.append(Engine(scheme, "cuda:0"))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_version_is_read_ahead_into_the_gpu(scheme, peer, engine):
    trainer = peer()
    trainer.call(send_from, scheme, nbytes=NBYTES)
    trainer.call(publish, 1)
    reader = engine()
    held = reader.newest()
    assert reader.take(held) == 1
    trainer.start(publish_haltingly, 2, 2.0)
    staging = reader.ahead.staging
    eventually(lambda: staging.attempt and staging.version is None and any(staging._there))
    assert reader.newest(held, 0) is None
    trainer.result()
    assert reader.take(reader.newest(held)) == 2


def test_a_sender_killed_in_the_middle_leaves_nothing_that_counts_on_the_gpu(scheme, peer, engine):
    trainer = peer()
    trainer.call(send_from, scheme, nbytes=NBYTES)
    trainer.call(publish, 1)
    reader = engine()
    held = reader.newest()
    assert reader.take(held) == 1
    trainer.start(publish_haltingly, 2, 60)
    eventually(lambda: any(reader.ahead.staging._there))
    trainer.kill()
    assert reader.take(held) == 1
    again = peer()
    again.call(send_from, scheme, nbytes=NBYTES)
    again.call(publish, 2, 5)
    assert reader.take(reader.newest(held)) == 5


def test_versions_come_as_fast_as_they_can_and_none_is_torn(scheme, peer, engine):
    trainer = peer()
    trainer.call(send_from, scheme, nbytes=NBYTES)
    trainer.call(publish, 1)
    reader = engine()
    held, taken = reader.newest(), 0
    trainer.start(publish_until, 10, 2)
    memory = None
    while not trainer.answered():
        version = reader.newest(held, 0.1)
        if version is None:
            continue
        try:
            assert reader.take(version) == version.number
        except VersionGoneError:
            continue
        held, taken = version, taken + 1
        if taken == 3:
            memory = torch.cuda.mem_get_info()[0]
    last, _ = trainer.result()
    assert taken > 3, f"{taken} of {last} versions were taken in 10 s"
    assert torch.cuda.mem_get_info()[0] > memory - (64 << 20), "memory grew"
