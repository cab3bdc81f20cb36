"""Versions in the memory of a receiving process."""

import ctypes

import pytest
import torch

import weightsync as ws
from weightsync.chunks import Copier
from weightsync.deadline import Deadline
from weightsync.device import device_of
from weightsync.device.host import HostDevice, HostLane
from weightsync.schemes.nccl.places import Places
from weightsync.schemes.nccl.staging import Slot, Staging
from weightsync.transport import Targets

MANIFEST = ws.Manifest.build([("w", torch.int64, (4,))])
NOW = Deadline(0)


def version(number):
    return ws.Version(1, number)


def fill(staging, number, keep=None):
    """As an arriving version does. None if there is no slot for it."""
    layout = staging.layout(MANIFEST.fingerprint, MANIFEST.to_json().decode())
    found = staging.begin(layout, keep and version(keep), NOW, lambda: None)
    if found is not None:
        slot, _ = found
        slot.bytes[:32].view(torch.int64).fill_(number)
        staging.end(slot, version(number))
    return found


def value(staging, number):
    with staging.lease(version(number)) as snapshot:
        return snapshot.tensor("w").unique().item()


def test_a_version_is_there_when_it_is_whole():
    staging = Staging(2, Copier(1))
    layout = staging.layout(MANIFEST.fingerprint, MANIFEST.to_json().decode())
    slot, dropped = staging.begin(layout, None, NOW, lambda: None)
    assert dropped is None
    with pytest.raises(ws.VersionGoneError):
        staging.lease(version(1))
    staging.end(slot, version(1))
    assert staging.lease(version(1)).version == version(1)


def test_what_is_leased_is_never_written():
    staging = Staging(2, Copier(1))
    fill(staging, 1)
    held = staging.lease(version(1))
    for number in range(2, 6):
        assert fill(staging, number) is not None
        assert held.tensor("w").unique().item() == 1
    other = staging.lease(version(5))
    assert fill(staging, 6) is None
    other.close()
    assert fill(staging, 6) is not None
    held.close()
    held.close()
    with pytest.raises(ws.WeightSyncError, match="closed"):
        held.tensor("w")


def test_what_the_engine_holds_is_written_last():
    """So that it can go back to it."""
    staging = Staging(2, Copier(1))
    fill(staging, 1)
    fill(staging, 2)
    for number in range(3, 7):
        fill(staging, number, keep=1)
        assert value(staging, 1) == 1
        assert value(staging, number) == number
    staging = Staging(1, Copier(1))
    fill(staging, 1)
    fill(staging, 2, keep=1)
    assert value(staging, 2) == 2


def test_a_version_that_is_gone_is_said_at_once():
    staging = Staging(1, Copier(1))
    fill(staging, 2)
    with pytest.raises(ws.VersionGoneError, match="1:2"):
        staging.lease(version(1))


def test_the_same_number_again_replaces_the_first():
    staging = Staging(2, Copier(1))
    fill(staging, 1)
    held = staging.lease(version(1))
    fill(staging, 1)
    other = staging.lease(version(1))
    assert other.tensor("w").data_ptr() != held.tensor("w").data_ptr()
    held.close()
    other.close()
    assert fill(staging, 2) is not None
    assert fill(staging, 3) is not None


def test_a_manifest_that_is_another_than_was_announced():
    staging = Staging(1, Copier(1))
    with pytest.raises(ws.WeightSyncError, match="announced"):
        staging.layout("0" * 32, MANIFEST.to_json().decode())
    with pytest.raises(ws.ManifestError):
        staging.layout(MANIFEST.fingerprint, None)


def test_one_buffer_is_given_up_once_the_engine_has_what_is_in_it():
    staging = Staging(1, Copier(1))
    fill(staging, 1)
    held = staging.lease(version(1))
    view = held.tensor("w")
    assert fill(staging, 2) is None
    staging.soften()
    assert fill(staging, 2) is not None
    assert view.unique().item() == 1  # whoever has it still has it
    with pytest.raises(ws.VersionGoneError, match="buffers=1"):
        held.tensor("w")
    held.close()
    assert value(staging, 2) == 2
    other = staging.lease(version(2))
    assert fill(staging, 3) is None
    other.close()


def test_two_buffers_are_not_given_up():
    staging = Staging(2, Copier(1))
    for number in (1, 2):
        fill(staging, number)
        staging.lease(version(number))
    staging.soften()
    assert fill(staging, 3) is None


def test_all_bytes_of_a_version_are_shown_at_once():
    staging = Staging(1, Copier(1))
    fill(staging, 7)
    with staging.lease(version(7)) as snapshot:
        memory = snapshot.memory()
        assert (memory.nbytes, memory.digests, memory.attempt) == (MANIFEST.nbytes, None, 0)
        assert not memory.page_lock(device_of(torch.device("cpu")))
        assert ctypes.string_at(memory.address, 32) == (7).to_bytes(8, "little") * 4
        staging.soften()
        fill(staging, 8)  # takes the only slot: what was shown stays as it was
        assert ctypes.string_at(memory.address, 32) == (7).to_bytes(8, "little") * 4
    with pytest.raises(ws.WeightSyncError, match="closed"):
        snapshot.memory()


def test_memory_for_the_next_version_is_there_before_it_comes():
    staging = Staging(2, Copier(1))
    staging.make_room(lambda: False)  # of what size is not known yet
    assert not staging.lacks_room
    fill(staging, 1)
    assert staging.lacks_room
    staging.make_room(lambda: False)
    assert not staging.lacks_room
    addresses = {slot.bytes.data_ptr() for slot in staging._slots}
    assert len(addresses) == 2
    for number in range(2, 5):
        slot, _ = fill(staging, number)
        assert slot.bytes.data_ptr() in addresses
    assert value(staging, 4) == 4


@pytest.mark.parametrize("error", [ws.NoRoomError("too little"), RuntimeError("CUDA error")])
def test_no_memory_is_asked_for_again_before_another_version_came(monkeypatch, error):
    """Whatever the reason is: the thread that asked has other things to do."""
    staging = Staging(2, Copier(1))
    fill(staging, 1)
    asked = []

    def refused(slot, nbytes, place):
        asked.append(nbytes)
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(Slot, "fit", refused)
        staging.make_room(lambda: False)
        assert not staging.lacks_room
        assert len(asked) == 1
    fill(staging, 2)  # there is some by now
    assert value(staging, 2) == 2


def test_what_was_given_back_is_not_taken_again():
    staging = Staging(2, Copier(1))
    fill(staging, 1)
    staging.clear()
    assert not staging.lacks_room


class QueueingGPU(HostDevice):
    """Says what its queue has been waited for."""

    def __init__(self):
        super().__init__()
        self.waited = 0

    def current(self):
        gpu = self

        class Lane(HostLane):
            def wait(self):
                gpu.waited += 1

        return Lane()


def test_what_was_queued_on_a_gpu_is_waited_for_where_it_is_used():
    """By threads that know nothing of the one that has queued it."""
    gpu = QueueingGPU()
    staging = Staging(1, Copier(1), Places(gpu, "gpu"))
    fill(staging, 1)
    snapshot = staging.lease(version(1))
    plain, cast = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.float32)
    snapshot.copy_into(Targets(MANIFEST, {"w": plain}))
    before = gpu.waited
    snapshot.copy_into(Targets(MANIFEST, {"w": cast}))
    assert gpu.waited == before + 2  # for the plain ones, of which there are none, and the others
    assert plain.tolist() == cast.tolist() == [1, 1, 1, 1]
    snapshot.settle()
    snapshot.close()
    assert gpu.waited == before + 4
