"""From a trainer's GPU into the double buffer: every bit, in any mixture, while it computes on."""

import os

import numpy as np
import pytest
import torch

import weightsync as ws
from tests.conftest import WAIT, assert_all_same, read
from weightsync.chunks import CHUNK, Copier, Geometry, SlotWriter
from weightsync.deadline import Deadline
from weightsync.device import device_of
from weightsync.download import Blocks, Download, Downloads
from weightsync.manifest import Manifest
from weightsync.schemes.double_buffer.slot import Slot
from weightsync.source import as_source
from weightsync.version import Version

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(60, func_only=True),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.bool,
    torch.complex64,
]


def weights(seed, place="cuda"):
    """About 200 MB: several windows, tensors of every kind, one in four where they are made."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for number in range(60):
        dtype = DTYPES[number % len(DTYPES)]
        rows = [1, 3, 250, 1000, 2000, 0][number % 6]
        tensor = torch.randn(rows, 513 + number, generator=generator).to(dtype)
        made[f"t{number}"] = tensor if number % 4 == 3 and place == "mixed" else tensor.cuda()
    made["large"] = torch.randn(20_000_001, generator=generator).cuda()
    made["turned"] = torch.randn(3000, 3001, generator=generator).cuda().t()
    made["every other"] = torch.randn(4000, 1000, generator=generator).cuda()[::2, 1::3]
    made["spread"] = torch.randn(9, 1, generator=generator).cuda().expand(9, 400_000)
    made["conjugate"] = torch.randn(50, 3, dtype=torch.complex64, generator=generator).cuda().conj()
    made["scalar"] = torch.tensor(seed, device="cuda")
    made["four bits"] = torch.arange(100, dtype=torch.uint8, device="cuda").view(torch.int4)
    return made


def on_host(tensors):
    return {
        name: tensor.view(torch.uint8).cpu().view(tensor.dtype)
        if tensor.dtype == torch.int4
        else tensor.cpu()
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("place", ["cuda", "mixed"])
def test_every_bit_arrives_from_tensors_that_exist(ends, place):
    held = weights(0, place)
    sender = ends.sender(held)
    for number in range(1, 5):
        report = sender.update_weights(version=number)
        assert report.notes == ()
        assert_all_same(read(ends)[1], on_host(held))  # its digests too
        for name in held:
            if held[name].dtype == torch.float32 and name != "spread":
                held[name].add_(1)
        if number == 2:
            held["t2"] = held["t2"].clone()  # somewhere else from now on


@pytest.mark.parametrize("place", ["cuda", "mixed"])
def test_every_bit_arrives_from_a_stream(ends, place):
    held = weights(1, place)
    sender = ends.sender(lambda: iter(held.items()))
    for number in range(1, 4):
        sender.update_weights(version=number)
        assert_all_same(read(ends)[1], on_host(held))


def test_a_cast_is_done_on_the_gpu(ends):
    model = torch.nn.Sequential(*(torch.nn.Linear(1500, 1501) for _ in range(20))).cuda()
    sender = ends.sender(model, dtype=torch.bfloat16)
    sender.update_weights(version=1)
    wanted = {name: t.to(torch.bfloat16).cpu() for name, t in model.state_dict().items()}
    assert_all_same(read(ends)[1], wanted)


def test_a_stream_may_hand_out_one_buffer_again_and_again(ends):
    """Each tensor is valid until the next is asked for; its values change on torch's stream."""
    buffer = torch.zeros(3_000_000, device="cuda")

    def stream():
        for number in range(60):
            buffer.fill_(number)
            yield f"t{number}", buffer

    sender = ends.sender(stream)
    for version in range(1, 4):
        sender.update_weights(version=version)
        for number, tensor in enumerate(read(ends)[1].values()):
            assert tensor.eq(number).all()


def test_r7_a_stream_that_yields_on_a_stream_of_its_own(ends):
    """R7: torch's current stream is another one for every tensor."""
    sides = [torch.cuda.Stream() for _ in range(3)]
    buffers = [torch.zeros(2_000_000, device="cuda") for _ in sides]
    torch.cuda.synchronize()

    def stream():
        for number in range(60):
            with torch.cuda.stream(sides[number % 3]):
                torch.cuda._sleep(200_000)
                buffers[number % 3].fill_(number)
                yield f"t{number}", buffers[number % 3]

    sender = ends.sender(stream)
    for version in range(1, 4):
        sender.update_weights(version=version)
        for number, tensor in enumerate(read(ends)[1].values()):
            assert tensor.eq(number).all()


def test_the_trainer_may_go_on_when_it_is_published(ends):
    """What is written into a parameter right after the update is not in it."""
    held = {f"t{n}": torch.zeros(8_000_000, device="cuda") for n in range(8)}
    sender = ends.sender(held)
    for number in range(1, 8):
        sender.update_weights(version=number)
        for tensor in held.values():
            tensor.fill_(number)
        assert all(tensor.eq(number - 1).all() for tensor in read(ends)[1].values())


def test_memory_is_bounded_and_given_back(ends):
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    held = {f"t{n}": torch.zeros(30_000_000, device="cuda") for n in range(8)}
    held["turned"] = torch.zeros(20_000, 3000, device="cuda").t()
    before = torch.cuda.memory_allocated()
    sender = ends.sender(held, dtype=torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    for number in range(1, 4):
        sender.update_weights(version=number)
    assert torch.cuda.max_memory_allocated() - before < 260 << 20
    sender.shutdown()
    assert torch.cuda.memory_allocated() - before < 8 << 20


def test_without_page_locks_it_is_right_too_and_the_report_says_so_once(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Slot, "page_lock", lambda slot, device: False)
        held = weights(3)
        publisher = ws.DoubleBufferScheme(os.path.join(tmp_path, "run")).create_publisher()
        epoch = publisher.open(Deadline(WAIT))
        notes = [
            publisher.publish(Version(epoch, n), as_source(held), Deadline(WAIT)).notes
            for n in (1, 2, 3)
        ]
        subscriber = ws.DoubleBufferScheme(os.path.join(tmp_path, "run")).create_subscriber()
        subscriber.open(Deadline(WAIT))
        with subscriber.snapshot(Version(epoch, 3), Deadline(WAIT)) as snapshot:
            snapshot.verify()
            found = on_host(dict(snapshot))
            assert_all_same(found, on_host(held))
            del found
        subscriber.close()
        publisher.close()
    assert "page-locked" in notes[0][0]
    assert notes[1:] == [(), ()]


def test_several_gpus_of_one_process(ends):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    held = {f"t{n}": torch.randn(3_000_000 + n, device=f"cuda:{n % 2}") for n in range(40)}
    sender = ends.sender(held)
    for number in range(1, 4):
        report = sender.update_weights(version=number)
        assert report.notes == ()
        assert_all_same(read(ends)[1], on_host(held))
        for tensor in held.values():
            tensor.add_(1)


def test_no_room_on_the_gpu_for_windows_is_survived():
    downloads = Downloads(1 << 50)
    assert downloads.of(torch.device("cuda", 0), 1 << 50) is None
    assert "no room" in downloads.notes()[0]


def test_what_has_landed_is_there():
    """Readers may look at it as soon as it is said."""
    device = device_of(torch.device("cuda", 0))
    held = [
        torch.randint(0, 256, (30_000_001,), dtype=torch.uint8, device="cuda") for _ in range(9)
    ]
    manifest = Manifest.build((f"t{n}", torch.uint8, t.shape) for n, t in enumerate(held))
    specs = list(manifest.tensors)
    slot = torch.zeros(manifest.nbytes, dtype=torch.uint8).pin_memory()
    wanted = torch.zeros_like(slot)
    for spec, tensor in zip(specs, held, strict=True):
        wanted[spec.offset : spec.offset + spec.nbytes] = tensor.cpu()
    writer = SlotWriter(Geometry(manifest), memoryview(slot.numpy()), Copier())
    download = Download(device, 16 * CHUNK)
    blocks = Blocks.of(specs, [s.offset for s in specs], [s.nbytes for s in specs])
    plan = download.plan(blocks, held)
    seen = []

    def landed(begin, end):
        seen.append(end)
        assert np.array_equal(slot[begin:end].numpy(), wanted[begin:end].numpy())

    for _ in range(3):
        slot.zero_()
        with download.flow(slot.data_ptr(), writer, landed) as flow:
            for window in plan.windows:
                download.run(plan, window, held, flow)
        assert seen[-1] == manifest.nbytes
    assert slot.equal(wanted)
