"""Versions on their way from host memory, page-locked or not, into tensors of a GPU."""

import mmap

import numpy as np
import pytest
import torch
from xxhash import xxh3_64_intdigest

import weightsync as ws
from tests.conftest import WAIT, assert_same
from weightsync.chunks import CHUNK, Geometry
from weightsync.deadline import Deadline
from weightsync.device import device_of
from weightsync.errors import CorruptError, NoRoomError
from weightsync.selection import Selection
from weightsync.transport import Arriving, Memory, Targets
from weightsync.upload import WINDOW, Staging, Through, merged

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(60, func_only=True),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VERSION = ws.Version(1, 1)
ROWS, WIDTH, TENSORS = 1500, 4098, 40  # 12.3 MB each; rows that are no multiple of 16 bytes
MANIFEST = ws.Manifest.build(
    [(f"t{n}", torch.bfloat16, (ROWS, WIDTH)) for n in range(TENSORS)]
    + [(f"small{n}", torch.uint8, (n,)) for n in range(1, 200)]
)


class Slot(Memory):
    """Memory as a slot's: a mapping of its own, with the digests of what is in it."""

    def __init__(self, locked):
        self.nbytes = MANIFEST.nbytes
        self._mapping = mmap.mmap(-1, -(-self.nbytes // 4096) * 4096)
        self.data = np.frombuffer(self._mapping, np.uint8)[: self.nbytes]
        self.address = self.data.__array_interface__["data"][0]
        self._locked, self._lock = locked, None

    def fill(self, seed):
        self.attempt = seed
        self.data[:] = np.random.default_rng(seed).integers(0, 256, self.nbytes, dtype=np.uint8)
        digests = [
            xxh3_64_intdigest(self.data[at : at + CHUNK].tobytes())
            for at in range(0, self.nbytes, CHUNK)
        ]
        self.digests = np.array(digests, dtype=np.uint64)

    def page_lock(self, device):
        if self._locked and self._lock is None:
            self._lock = device.page_lock(self.address, len(self._mapping), True)
            assert self._lock is not None, "the memory could not be page-locked"
        return self._lock is not None

    def wrong(self, chunks):
        return CorruptError(f"chunks {chunks} are wrong")

    def release(self):
        torch.cuda.synchronize()
        if self._lock is not None:
            self._lock.release()


@pytest.fixture(scope="module", params=[True, False], ids=["locked", "pageable"])
def slot(request):
    made = Slot(request.param)
    yield made
    made.release()


@pytest.fixture
def device():
    return device_of(torch.device("cuda", 0))


def rows_of(kind):
    """Offsets and lengths: all tensors; the left halves of their rows; some of their rows."""
    pairs = []
    for spec in MANIFEST.tensors:
        if kind == "whole":
            pairs.append((spec.offset, spec.nbytes))
        elif kind == "rows":
            pairs.append((spec.offset + spec.nbytes // 4 // 2 * 2, spec.nbytes // 3))
        elif spec.nbytes > CHUNK:
            pitch = WIDTH * 2
            pairs += [(spec.offset + row * pitch, pitch // 2) for row in range(ROWS)]
    return np.array(pairs, dtype=np.int64).T


class Places:
    def __init__(self, kind):
        self.offset, self.length = rows_of(kind)
        self.begin = np.cumsum(self.length) - self.length
        self.data = torch.zeros(int(self.length.sum()), dtype=torch.uint8, device="cuda")

    def through(self, device):
        selection = Selection.of(self.offset, self.length, MANIFEST.nbytes)
        rows = merged(self.begin + self.data.data_ptr(), self.offset, self.length)
        return Through(device, Geometry(MANIFEST), selection, *rows)

    def assert_filled(self, slot):
        parts = [
            slot.data[offset : offset + length]
            for offset, length in zip(self.offset, self.length, strict=True)
        ]
        wanted = torch.from_numpy(np.concatenate(parts)).cuda()
        different = int((self.data != wanted).sum())
        assert not different, f"{different:,} of {len(wanted):,} bytes are not what was sent"


@pytest.mark.parametrize("kind", ["whole", "rows", "columns"])
def test_bytes_come_to_their_places(kind, slot, device):
    assert MANIFEST.nbytes > 6 * WINDOW
    places = Places(kind)
    through = places.through(device)
    for number in range(1, 3):
        slot.fill(number)
        through.run(slot, Deadline(WAIT))
        places.assert_filled(slot)


@pytest.mark.parametrize("kernels", [True, False])
def test_a_bit_that_is_wrong_is_found(kernels, slot, device, monkeypatch):
    if not kernels:
        monkeypatch.setattr(device, "kernels", None)
    places = Places("whole")
    through = places.through(device)
    slot.fill(3)
    chunks = len(slot.digests)
    for chunk in (0, 100, chunks - 1):
        slot.data[chunk * CHUNK + 7] ^= 1
        with pytest.raises(CorruptError, match=rf"\[{chunk}\]"):
            through.run(slot, Deadline(WAIT))
        slot.data[chunk * CHUNK + 7] ^= 1
    through.run(slot, Deadline(WAIT))
    places.assert_filled(slot)


def test_tensors_that_are_still_being_read_are_written_afterwards(slot, device):
    """What torch has queued on its stream sees the former values, whatever comes meanwhile."""
    places = Places("whole")
    through = places.through(device)
    slot.fill(4)
    places.data.fill_(9)
    busy = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    for _ in range(20):
        busy = busy @ busy / 8192
    former = places.data.clone()
    through.run(slot, Deadline(WAIT))
    places.assert_filled(slot)
    assert former.eq(9).all()


@pytest.mark.parametrize("kind", ["whole", "rows", "columns"])
def test_a_version_is_followed_and_taken(kind, slot, device):
    offset, length = rows_of(kind)
    staging = Staging(device, Geometry(MANIFEST), Selection.of(offset, length, MANIFEST.nbytes))
    slot.fill(5)
    places = Places(kind)

    class Writing(Arriving):
        version, manifest, attempt, memory, upto = VERSION, MANIFEST, slot.attempt, slot, 0

        def written(self):
            self.upto = min(self.upto + WINDOW // 3, MANIFEST.nbytes)
            return self.upto

    assert staging.follow(Writing(), lambda: False)
    staging.take(slot, VERSION, Deadline(WAIT))
    assert staging.version == VERSION
    some = length > 0  # bytes that were not selected lie nowhere
    into, out_of = places.begin[some] + places.data.data_ptr(), staging.addresses(offset[some])
    device.moves(into, out_of, length[some]).run(device.current())
    places.assert_filled(slot)


def test_what_changed_after_it_was_read_ahead_is_read_again(slot, device):
    everything = Selection.everything(MANIFEST.nbytes)
    staging = Staging(device, Geometry(MANIFEST), everything)
    slot.fill(6)
    slot.data[200 * CHUNK] ^= 1

    class Writing(Arriving):
        version, manifest, attempt, memory = VERSION, MANIFEST, slot.attempt, slot

        def written(self):
            return MANIFEST.nbytes

    assert staging.follow(Writing(), lambda: False)
    slot.data[200 * CHUNK] ^= 1
    staging.take(slot, VERSION, Deadline(WAIT))
    assert staging.buffer.cpu().equal(torch.from_numpy(slot.data))


def test_memory_that_is_too_little_is_said_with_numbers(device):
    huge = ws.Manifest.build([("huge", torch.uint8, (1 << 40,))])
    with pytest.raises(NoRoomError, match=f"{1 << 40:,}"):
        Staging(device, Geometry(huge), Selection.everything(huge.nbytes))


def test_a_model_on_the_gpu_takes_its_weights_in_windows(ends):
    """All but what is cast, strided or on the processor, and that too in the end."""
    generator = torch.Generator().manual_seed(0)
    sent = {f"t{n}": torch.randn(1000, 4000, generator=generator) for n in range(6)}
    sent |= {"cast": torch.randn(77, generator=generator), "scalar": torch.tensor(2.0)}
    sent |= {"turned": torch.randn(30, 70, generator=generator), "beside": torch.ones(5)}
    target = {name: torch.zeros_like(tensor, device="cuda") for name, tensor in sent.items()}
    target["cast"] = target["cast"].half()
    target["turned"] = torch.zeros(70, 30, device="cuda").t()
    target["beside"] = torch.zeros(5)
    version = ends.sender(sent).update_weights(version=1).version
    with ends.scheme().create_subscriber().snapshot(version, Deadline(WAIT)) as snapshot:
        targets = Targets(snapshot.manifest, target)
        assert targets.on_gpus.names == sent.keys() - {"cast", "turned", "beside"}
        for _ in range(2):
            snapshot.copy_into(targets)
            torch.cuda.synchronize()
    for name, tensor in sent.items():
        assert_same(target[name].cpu(), tensor.to(target[name].dtype))
