"""A GPU as a device: copies, digests, page-locked memory, memory of other processes."""

import itertools
import mmap
import multiprocessing
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from xxhash import xxh3_64_intdigest

from weightsync.chunks import CHUNK
from weightsync.device import device_of, driver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(60, func_only=True),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def device():
    return device_of(torch.device("cuda", 0))


def test_kernels_can_be_compiled_here(device):
    assert device.kernels is not None


def test_copies_may_go_over_the_ends_of_allocations(device, monkeypatch):
    """Without kernels too: neighbours of a plan may lie in two allocations that touch."""
    nbytes = 2 << 20
    begins = sorted(driver.allocate(0, nbytes) for _ in range(16))
    pairs = [a for a, b in itertools.pairwise(begins) if b == a + nbytes]
    try:
        if not pairs:
            pytest.skip("no two allocations touch here")
        wanted = torch.randint(0, 256, (2 * nbytes,), dtype=torch.uint8, device="cuda")
        for kernels in (device.kernels, None):
            monkeypatch.setattr(device, "kernels", kernels)
            columns = np.array([[pairs[0]], [wanted.data_ptr()], [2 * nbytes]])
            lane = device.lane()
            torch.cuda.synchronize()
            device.tensor_at(pairs[0], nbytes).zero_()
            torch.cuda.synchronize()
            device.moves(*columns).run(lane)
            lane.wait()
            found = [device.tensor_at(pairs[0] + at, nbytes) for at in (0, nbytes)]
            assert torch.cat(found).equal(wanted)
    finally:
        torch.cuda.synchronize()
        for begin in begins:
            driver.free(0, begin)


def test_kernels_that_were_made_are_trusted_every_time():
    """What they are compared with has to be there while it is digested."""
    for _ in range(30):
        assert type(device_of(torch.device("cuda", 0)))(0).kernels is not None


def digested(device, lane, count, do=lambda call, *arguments: call(*arguments)):
    """Digests made on a lane of the device, and by the processor."""
    data = torch.randint(0, 256, (count * CHUNK,), dtype=torch.uint8, device="cuda")
    found = torch.zeros(count, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    do(device.digests, lane, data.data_ptr(), count, found)
    lane.wait()
    host = data.cpu().numpy()
    wanted = [xxh3_64_intdigest(host[n * CHUNK : (n + 1) * CHUNK]) for n in range(count)]
    return found.cpu().numpy().view(np.uint64).tolist(), wanted


@pytest.mark.parametrize("count", [0, 1, 70, 256, 300])
@pytest.mark.parametrize("kernels", [True, False])
def test_digests_are_those_of_the_processor(device, kernels, count, monkeypatch):
    if not kernels:
        monkeypatch.setattr(device, "kernels", None)
    found, wanted = digested(device, device.lane(), count)
    assert found == wanted


def test_a_gpu_that_is_full_digests_in_less_memory(device, monkeypatch):
    def little(chunks, place):
        if chunks > device.kernels._SHORT:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return sums(chunks, place)

    sums = device.kernels._sums
    monkeypatch.setattr(device.kernels, "_sums", little)
    monkeypatch.setattr(device.kernels, "_full", set())
    found, wanted = digested(device, device.lane(), 70)
    assert found == wanted


@pytest.mark.parametrize("lane", ["current", "lane"])
def test_a_thread_that_has_used_no_gpu_digests(device, lane):
    with ThreadPoolExecutor(1) as thread:

        def elsewhere(call, *arguments):
            thread.submit(call, *arguments).result()

        found, wanted = digested(device, getattr(device, lane)(), 3, elsewhere)
    assert found == wanted


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("unit", [1, 2, 16])
@pytest.mark.parametrize("gentle", [True, False])
def test_many_copies_are_done_as_one(device, kernels, unit, gentle, monkeypatch):
    if not kernels:
        monkeypatch.setattr(device, "kernels", None)
    generator = np.random.default_rng(unit)
    length = generator.integers(0, 5000, 400) * unit
    length[7], length[8] = 3 << 20, 0
    order = generator.permutation(len(length))
    out_of = np.cumsum(length) - length
    into = np.empty_like(out_of)
    into[order] = np.cumsum(length[order]) - length[order]
    source = torch.randint(0, 256, (int(length.sum()),), dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(source)
    moves = device.moves(into + target.data_ptr(), out_of, length, gentle)
    moves.run(device.current(), source.data_ptr())
    wanted = torch.zeros_like(source)
    for to, at, size in zip(into, out_of, length, strict=True):
        wanted[to : to + size] = source[at : at + size]
    assert target.equal(wanted)


@pytest.mark.parametrize("writable", [True, False])
def test_shared_memory_is_page_locked(device, writable):
    size = 64 << 20
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(size)
        whole = mmap.mmap(file.fileno(), size)
        whole[:] = os.urandom(1 << 20) * 64
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        mapping = mmap.mmap(file.fileno(), size, flags=mmap.MAP_SHARED, prot=access)
        address = np.frombuffer(mapping, np.uint8).__array_interface__["data"][0]
        lock = device.page_lock(address, size, writable)
        assert lock is not None
        into = device.empty(size)
        lane = device.lane()
        lane.copy(into.data_ptr(), address, size)
        lane.wait()
        assert into.cpu().numpy().tobytes() == whole[:]
        lock.release()
        lock.release()


def test_rows_are_copied_at_their_pitches(device):
    source = torch.randint(0, 256, (600, 1000), dtype=torch.uint8).pin_memory()
    target = torch.zeros(600, 400, dtype=torch.uint8, device="cuda")
    lane = device.lane()
    torch.cuda.synchronize()
    lane.copy_rows(target.data_ptr(), 400, source.data_ptr() + 300, 1000, 400, 600)
    lane.wait()
    assert target.cpu().equal(source[:, 300:700])


def test_a_lane_waits_for_a_mark_of_another(device):
    one, other = device.lane(), device.lane()
    a, b, c = (torch.zeros(256 << 20, dtype=torch.uint8, device="cuda") for _ in range(3))
    for number in range(1, 6):
        a.fill_(number)
        one.after(device.current().mark())
        one.copy(b.data_ptr(), a.data_ptr(), len(a))
        other.after(one.mark())
        other.copy(c.data_ptr(), b.data_ptr(), len(a))
        other.wait()
        assert int(c.min()) == int(c.max()) == number


def _read_elsewhere(handle, offset, nbytes, pipe):
    device = device_of(torch.device("cuda", 0))
    base = driver.ipc_open(0, handle)
    seen = device.tensor_at(base + offset, nbytes)
    pipe.send(int(seen.sum(dtype=torch.int64)))
    seen.fill_(3)
    torch.cuda.synchronize()
    driver.ipc_close(0, base)
    pipe.send("done")


def test_another_process_maps_memory_by_its_handle():
    tensor = torch.ones(5 << 20, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    base, size = driver.allocation(0, tensor.data_ptr())
    assert base <= tensor.data_ptr()
    assert tensor.data_ptr() + len(tensor) <= base + size
    handle = driver.ipc_handle(0, tensor.data_ptr())
    assert len(handle) == 64
    context = multiprocessing.get_context("spawn")
    mine, other = context.Pipe()
    arguments = handle, tensor.data_ptr() - base, len(tensor), other
    process = context.Process(target=_read_elsewhere, args=arguments)
    process.start()
    assert mine.poll(50)
    assert mine.recv() == len(tensor)
    assert mine.poll(20)
    mine.recv()
    process.join(20)
    assert int(tensor.min()) == 3


def test_what_the_driver_refuses_has_its_words():
    with pytest.raises(driver.DriverError, match="invalid"):
        driver.ipc_handle(0, 12345)
