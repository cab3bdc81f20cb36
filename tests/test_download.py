"""Tensors of a device on their way into a slot: every byte and every digest, whatever lies where.

The device is the processor here; its tensors are taken for a GPU's.
"""

import copy
import gc
import math
import random
import weakref

import pytest
import torch

from weightsync.chunks import CHUNK, Copier, Geometry, SlotWriter
from weightsync.device import device_of
from weightsync.device.host import HostDevice, HostLane
from weightsync.download import Blocks, Download, Downloads, Packer, convert
from weightsync.errors import NoRoomError, SourceError
from weightsync.intake import copy_tensor
from weightsync.manifest import Manifest, ParamSpec
from weightsync.source import SourceOptions, as_source

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
    torch.complex64,
]


def some_weights(seed, count=40):
    random.seed(seed)
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for number in range(count):
        rows = random.choice([0, 1, 3, 17, 500, 2000])
        tensor = torch.randn(rows, random.randint(1, 600), generator=generator)
        tensor = tensor.to(random.choice(DTYPES))
        made[f"t{number}"] = tensor.t() if random.random() < 0.2 and rows else tensor
    made["scalar"] = torch.tensor(1.5)
    made["conjugate"] = torch.randn(50, 3, dtype=torch.complex64, generator=generator).conj()
    made["every other"] = torch.randn(3000, 1000, generator=generator)[::2, ::3]
    made["spread"] = torch.randn(7, 1, generator=generator).expand(7, 90000)
    made["four bits"] = torch.zeros(300, dtype=torch.uint8).view(torch.int4)
    return made


class Slot:
    """Memory for the weights of an inventory, and what it is to hold in the end."""

    def __init__(self, inventory):
        self.manifest, self.geometry = inventory.manifest, Geometry(inventory.manifest)
        self.memory = torch.full((inventory.manifest.nbytes,), 77, dtype=torch.uint8)
        self.wanted = torch.zeros(inventory.manifest.nbytes, dtype=torch.uint8)
        for spec, value in zip(self.manifest.tensors, inventory.values, strict=True):
            place = self.wanted[spec.offset : spec.offset + spec.nbytes]
            copy_tensor(place.view(spec.dtype).view(spec.shape), value, spec.name)
        self.digests = self.writer_of(self.wanted).digests()
        self.writer = self.writer_of(self.memory)
        self.landed = []

    def writer_of(self, memory):
        return SlotWriter(self.geometry, memoryview(memory.numpy()), Copier(2))

    def flow(self, download):
        return download.flow(
            self.memory.data_ptr(), self.writer, lambda *run: self.landed.append(run)
        )

    def blocks(self, numbers):
        specs = [self.manifest.tensors[number] for number in numbers]
        return Blocks.of(specs, [spec.offset for spec in specs], [spec.nbytes for spec in specs])

    def assert_right(self):
        assert self.memory.equal(self.wanted)
        assert (self.writer.digests() == self.digests).all()


@pytest.fixture(params=[CHUNK, 64 * CHUNK])
def download(request):
    return Download(device_of(torch.device("cpu")), request.param)


def nonempty(inventory):
    return [n for n, spec in enumerate(inventory.manifest.tensors) if spec.nbytes]


def send(slot, download, plan, tensors):
    with slot.flow(download) as flow:
        for window in plan.windows:
            download.run(plan, window, tensors, flow)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("seed", range(2))
def test_tensors_arrive_with_their_digests(seed, dtype, download):
    weights = some_weights(seed)
    source = as_source(weights, SourceOptions(dtype))
    inventory = source.inventory()
    numbers = nonempty(inventory)
    plan = download.plan(Slot(inventory).blocks(numbers), [inventory.values[n] for n in numbers])
    for _ in range(2):  # the second time by what was found out the first, with other values
        slot = Slot(inventory)
        send(slot, download, plan, [inventory.values[n] for n in numbers])
        slot.assert_right()
        assert slot.landed == sorted(slot.landed)
        for tensor in weights.values():
            if tensor.dtype in (torch.float32, torch.bfloat16) and tensor.stride()[-1:] != (0,):
                tensor.add_(1)


@pytest.mark.parametrize("seed", range(2))
def test_tensors_of_others_in_between_are_left_alone(seed, download):
    inventory = as_source(some_weights(seed)).inventory()
    slot = Slot(inventory)
    numbers = nonempty(inventory)
    random.seed(seed)
    mine = sorted(random.sample(numbers, len(numbers) // 2))
    others = [number for number in numbers if number not in mine]
    keep = [inventory.values[number].contiguous().resolve_conj() for number in others]
    slot.memory.zero_()
    slot.writer.write(others, [tensor.data_ptr() for tensor in keep])
    tensors = [inventory.values[number] for number in mine]
    send(slot, download, download.plan(slot.blocks(mine), tensors), tensors)
    slot.assert_right()


@pytest.mark.parametrize("seed", range(2))
def test_rows_of_others_that_look_like_padding_are_left_alone(seed, download):
    """Rows of two ranks that meet within what would be padding behind a tensor."""
    entries = [(f"t{n}", torch.uint8, (size,)) for n, size in enumerate([128, 70, 3 * CHUNK, 40])]
    manifest = Manifest.build(entries)
    specs = list(manifest.tensors)
    memory = torch.full((manifest.nbytes,), 7, dtype=torch.uint8)
    writer = SlotWriter(Geometry(manifest), memoryview(memory.numpy()), Copier(2))
    # Of each tensor but its last bytes, as if another rank had those.
    sizes = [100, 60, 2 * CHUNK - 5, 40]
    tensors = [torch.full((size,), n + 1, dtype=torch.uint8) for n, size in enumerate(sizes)]
    plan = download.plan(Blocks.of(specs, [s.offset for s in specs], sizes), tensors)
    with download.flow(memory.data_ptr(), writer, lambda *run: None) as flow:
        for window in plan.windows:
            download.run(plan, window, tensors, flow)
    for spec, size, tensor in zip(specs, sizes, tensors, strict=True):
        assert memory[spec.offset : spec.offset + size].equal(tensor)
        assert memory[spec.offset + size : spec.offset + spec.nbytes].eq(7).all()


@pytest.mark.parametrize("order", ["as sent", "any"])
@pytest.mark.parametrize("seed", range(2))
def test_a_stream_arrives_although_its_memory_is_used_again(seed, order, download):
    inventory = as_source(some_weights(seed)).inventory()
    slot = Slot(inventory)
    numbers = nonempty(inventory)
    if order == "any":
        random.Random(seed).shuffle(numbers)
        slot.memory.zero_()  # what lies between tensors that come at different times
    with slot.flow(download) as flow:
        packer = Packer(flow)
        for number in numbers:
            tensor = copy.deepcopy(inventory.values[number])
            packer.put(slot.manifest.tensors[number], tensor)
            tensor.untyped_storage().fill_(0)
        packer.flush()
    slot.assert_right()
    if order == "as sent":
        assert slot.landed == sorted(slot.landed)


@pytest.mark.parametrize("seed", range(20))
def test_any_elements_of_any_tensor(seed):
    generator = random.Random(seed)
    shape = [generator.randint(1, 5) for _ in range(generator.randint(0, 4))]
    tensor = torch.arange(float(math.prod(shape))).view(shape)
    tensor = tensor.permute(generator.sample(range(len(shape)), len(shape)))
    first = generator.randint(0, tensor.numel())
    last = generator.randint(first, tensor.numel())
    spec = ParamSpec("w", torch.float16, tuple(tensor.shape), 0, tensor.numel() * 2)
    buffer = torch.zeros(4096, dtype=torch.uint8)
    convert(buffer, 64, spec, tensor, first, last)
    found = buffer[64 : 64 + 2 * (last - first)].view(torch.float16)
    assert found.equal(tensor.reshape(-1)[first:last].half())
    assert not buffer[:64].any()
    assert not buffer[64 + 2 * (last - first) :].any()


class LateLane(HostLane):
    """Does what is queued when somebody waits for it, as late as a lane may."""

    __hash__ = None

    def __init__(self):
        self.queue = []

    def __eq__(self, other):
        return self is other

    def copy(self, *what):
        self.queue.append(what)

    def mark(self):
        return LateMark(self, len(self.queue))

    def do(self, upto):
        for number in range(upto):
            if self.queue[number]:
                HostLane.copy(self, *self.queue[number])
                self.queue[number] = None


class LateMark:
    def __init__(self, lane, upto):
        self.lane, self.upto = lane, upto

    def done(self):
        return all(work is None for work in self.lane.queue[: self.upto])

    def wait(self):
        self.lane.do(self.upto)


class LateDevice(HostDevice):
    def lane(self):
        return LateLane()


def late():
    return Download(LateDevice(), CHUNK)


def test_a_buffer_is_used_again_only_after_its_copy():
    inventory = as_source(some_weights(1)).inventory()
    slot, numbers = Slot(inventory), nonempty(inventory)
    download, tensors = late(), [inventory.values[number] for number in numbers]
    send(slot, download, download.plan(slot.blocks(numbers), tensors), tensors)
    slot.assert_right()


def test_what_has_landed_is_there():
    inventory = as_source(some_weights(2)).inventory()
    slot, numbers = Slot(inventory), nonempty(inventory)
    download, tensors = late(), [inventory.values[number] for number in numbers]
    plan = download.plan(slot.blocks(numbers), tensors)

    def landed(begin, end):
        assert slot.memory[begin:end].equal(slot.wanted[begin:end])
        slot.landed.append((begin, end))

    with download.flow(slot.memory.data_ptr(), slot.writer, landed) as flow:
        for window in plan.windows:
            download.run(plan, window, tensors, flow)
    ends = sum(end - begin for begin, end in slot.landed)
    assert ends >= inventory.manifest.payload


@pytest.mark.parametrize("error", [SourceError, KeyboardInterrupt])
def test_after_an_error_nothing_is_under_way(error):
    inventory = as_source({"a": torch.randn(3000, 300), "b": torch.randn(40)}).inventory()
    slot, download = Slot(inventory), late()
    tensors = list(inventory.values)
    plan = download.plan(slot.blocks([0, 1]), tensors)

    def fail():
        with slot.flow(download) as flow:
            download.run(plan, plan.windows[0], tensors, flow)
            raise error

    with pytest.raises(error):
        fail()
    assert all(work is None for work in download.lane.queue)
    begin, end = plan.windows[0].runs[0]
    assert slot.memory[begin:end].equal(slot.wanted[begin:end])


def test_a_plan_keeps_no_tensor_alive(download):
    tensors = [torch.randn(100, 100), torch.randn(50, 50).t()]
    manifest = Manifest.build((f"t{n}", t.dtype, t.shape) for n, t in enumerate(tensors))
    specs = list(manifest.tensors)
    blocks = Blocks.of(specs, [s.offset for s in specs], [s.nbytes for s in specs])
    plan = download.plan(blocks, tensors)
    refs = [weakref.ref(tensor) for tensor in tensors]
    tensors.clear()
    gc.collect()
    assert plan.windows
    assert [ref() for ref in refs] == [None, None]


@pytest.mark.parametrize("gentle", [False, True])
def test_only_copies_beside_something_else_are_gentle(gentle):
    """And the first window, which all else waits for, never is."""

    class Asked(HostDevice):
        def moves(self, into, out_of, length, gentle=False):
            asked.append(gentle)
            return super().moves(into, out_of, length, gentle)

    asked = []
    tensors = [torch.zeros(4 * CHUNK, dtype=torch.uint8)]
    specs = list(Manifest.build([("w", torch.uint8, tensors[0].shape)]).tensors)
    download = Download(Asked(), CHUNK, gentle=gentle)
    download.plan(Blocks.of(specs, [0], [4 * CHUNK]), tensors)
    assert asked == [False, gentle, gentle, gentle]


class SmallDevice(HostDevice):
    """Has no room for more than some bytes at a time."""

    def __init__(self, room):
        super().__init__()
        self.room = room

    def empty(self, nbytes):
        if nbytes > self.room:
            raise NoRoomError(f"no room for {nbytes:,} bytes")
        return super().empty(nbytes)


@pytest.mark.parametrize(("room", "window"), [(64, 64), (63, 8), (7, None)])
def test_windows_are_as_large_as_there_is_room(room, window, monkeypatch):
    device = SmallDevice(room * CHUNK)
    monkeypatch.setattr("weightsync.download.device_of", lambda place: device)
    downloads = Downloads()
    found = downloads.of(torch.device("cuda", 0), 1 << 40)
    assert (found and found.window) == (window and window * CHUNK)
    assert downloads.of(torch.device("cuda", 0), 1 << 30) is found
    notes = downloads.notes()
    assert len(notes) == (window is None)
    assert downloads.notes() == ()


def test_little_weights_need_little_memory(monkeypatch):
    monkeypatch.setattr("weightsync.download.device_of", lambda place: HostDevice())
    downloads = Downloads()
    assert downloads.of(torch.device("cuda", 0), 1000).window == CHUNK
    assert downloads.of(torch.device("cuda", 0), 10 * CHUNK).window == 10 * CHUNK
    assert downloads.of(torch.device("cpu"), 1000) is None
