"""Where versions are kept: on the GPU if there is room, and it is wanted."""

import pytest
import torch

import weightsync as ws
from tests.schemes.nccl.test_staging import MANIFEST, NOW, fill, value, version
from weightsync.chunks import Copier
from weightsync.device.host import HostDevice
from weightsync.errors import NoRoomError, SchemeError
from weightsync.schemes.nccl.places import SPARE, Places
from weightsync.schemes.nccl.staging import Staging
from weightsync.transport import Targets


class GPU(HostDevice):
    """With so many bytes, of which so many are free."""

    def __init__(self, free=1600, total=1600):
        super().__init__()
        self.free, self.total = free, total
        self.full = False

    def free_bytes(self):
        return self.free, self.total

    def empty(self, nbytes):
        if self.full:
            raise NoRoomError("full after all")
        return super().empty(nbytes)


def test_the_gpu_is_taken_if_a_part_of_it_stays_free():
    gpu = GPU()
    assert Places(gpu, "auto").choose(1500, 0).gpu is gpu
    assert Places(gpu, "auto").choose(1501, 0).gpu is None
    assert 1600 // SPARE == 100
    gpu.free = 1000
    assert Places(gpu, "auto").choose(1500, 600).gpu is gpu  # 600 of them are there already
    assert Places(gpu, "host").choose(1, 0).gpu is None
    assert Places(gpu, "gpu").choose(1 << 50, 0).gpu is gpu
    assert Places(None, "auto").choose(1, 0).gpu is None


def test_a_choice_stays_until_versions_get_larger():
    gpu = GPU()
    places = Places(gpu, "auto")
    assert places.choose(1000, 0).gpu is gpu
    gpu.free = 0
    assert places.choose(1000, 1000).gpu is gpu
    assert places.choose(1200, 1000).gpu is None
    gpu.free = 1600
    assert places.choose(1200, 0).gpu is None


def test_a_gpu_that_is_full_after_all():
    gpu = GPU()
    gpu.full = True
    staging = Staging(2, Copier(1), Places(gpu, "auto"))
    slot, _ = fill(staging, 1)
    assert slot.place.gpu is None
    assert value(staging, 1) == 1
    with pytest.raises(NoRoomError, match="full after all"):
        fill(Staging(2, Copier(1), Places(gpu, "gpu")), 1)


def test_what_lies_on_a_gpu_goes_to_targets_from_there():
    gpu = GPU()
    staging = Staging(2, Copier(1), Places(gpu, "gpu"))
    targets = Targets(MANIFEST, {"w": torch.zeros(4, dtype=torch.int64)})
    cast = Targets(MANIFEST, {"w": torch.zeros(4, dtype=torch.float32)})
    for number in range(1, 5):
        slot, _ = fill(staging, number)
        with staging.lease(version(number)) as snapshot:
            assert snapshot.memory() is None
            (address,) = snapshot.addresses(gpu.place)
            assert address == slot.bytes.data_ptr()
            assert snapshot.addresses(gpu.place) is snapshot.addresses(gpu.place)
            assert snapshot.addresses(torch.device("meta")) is None
            for each in (targets, cast):
                snapshot.copy_into(each)
                assert each.tensors["w"].tolist() == [number] * 4


def test_host_memory_has_no_addresses_on_a_device():
    staging = Staging(1, Copier(1), Places(GPU(), "host"))
    fill(staging, 1)
    with staging.lease(version(1)) as snapshot:
        assert snapshot.addresses(torch.device("cpu")) is None
        assert snapshot.memory() is not None


def test_a_slot_that_moves_on_has_the_same_bytes_elsewhere():
    staging = Staging(1, Copier(1), Places(GPU(), "gpu"))
    layout = staging.layout(MANIFEST.fingerprint, MANIFEST.to_json().decode())
    slot, _ = staging.begin(layout, None, NOW, lambda: None)
    slot.bytes[:32].view(torch.int64).fill_(7)
    before, held = slot.addresses(MANIFEST).tolist(), slot.bytes
    slot.move_on()
    assert slot.addresses(MANIFEST).tolist() != before
    held.zero_()  # what is late writes here
    staging.end(slot, version(1))
    assert value(staging, 1) == 7


def test_the_option():
    assert ws.scheme_from_url("nccl://127.0.0.1:29501?memory=host").memory == "host"
    with pytest.raises(SchemeError, match="memory='disk': 'auto', 'gpu' or 'host'"):
        ws.NCCLScheme(memory="disk")
