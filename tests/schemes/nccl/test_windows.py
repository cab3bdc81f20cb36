"""Buckets that stay on the GPU: assembled, digested and received where they lie.

The processor is the GPU here, and gloo is NCCL.
"""

import numpy as np
import pytest
import torch

import weightsync as ws
from tests.conftest import as_bytes
from tests.schemes.nccl.on_gpus import pretend
from tests.schemes.nccl.some_weights import MIB, mixed
from tests.test_upload import LazyDevice
from weightsync.deadline import Deadline
from weightsync.device import device_of
from weightsync.device.host import HostDevice
from weightsync.errors import CorruptError, NoRoomError, ProtocolError, WeightSyncError
from weightsync.schemes.nccl import publisher, reader
from weightsync.schemes.nccl import windows as windows_module
from weightsync.schemes.nccl.buckets import Bucket
from weightsync.schemes.nccl.digests import Digester, from_text, to_text
from weightsync.schemes.nccl.windows import IN_FLIGHT, Windows
from weightsync.source import SourceOptions, as_source

HOST = device_of(torch.device("cpu"))


def assemble(weights, size=MIB, options=None, digest=True, windows=None):
    """The version as it arrives in a slot, the buckets' messages, the digests, and the summary."""
    inventory = as_source(weights, options).inventory()
    slot = torch.zeros(max(inventory.manifest.nbytes, 1), dtype=torch.uint8)
    there = Digester(HOST, HOST.lane())
    messages = []

    def send(bucket: Bucket):
        assert bucket.number == len(messages)
        assert sum(part.nbytes for part in bucket.parts) <= size
        messages.append(bucket.message())
        for number, part in enumerate(bucket.parts):
            ((offset, length),) = part.pieces
            slot[offset : offset + length] = part.payload
            there.add(bucket.number, number, slot[offset : offset + length], part.pieces)

    windows = windows or Windows(HOST, size)
    made = windows.assemble(inventory, send, lambda buffer: None, digest, Deadline(30))
    return inventory.manifest, slot, messages, there, made.summary()


def assert_arrived(weights, manifest, slot):
    for name, tensor in weights.items():
        spec = manifest.spec(name)
        arrived = slot[spec.offset : spec.offset + spec.nbytes]
        assert torch.equal(arrived, as_bytes(tensor)), name


@pytest.mark.parametrize("size", [MIB, 2 * MIB, 64 * MIB])
def test_what_arrives_is_what_was_sent(size):
    weights = mixed()
    manifest, slot, messages, there, summary = assemble(weights, size)
    assert_arrived(weights, manifest, slot)
    there.compare(summary.digests, manifest)
    assert all(message["digests_follow"] for message in messages)
    assert len(messages) == -(-manifest.nbytes // size)


def test_without_digests():
    weights = mixed()
    manifest, slot, messages, _, summary = assemble(weights, digest=False)
    assert_arrived(weights, manifest, slot)
    assert summary.digests is None
    assert not any(message["digests_follow"] for message in messages)


def test_a_stream_in_any_order_beside_tensors_that_exist():
    weights = mixed()
    backwards = list(weights.items())[::-1]
    entries = [(name, tensor.dtype, tensor.shape) for name, tensor in weights.items()]
    options = SourceOptions(manifest=ws.Manifest.build(entries))
    manifest, slot, _, there, summary = assemble(iter(backwards), 2 * MIB, options)
    assert_arrived(weights, manifest, slot)
    there.compare(summary.digests, manifest)


def test_values_are_cast_on_the_way():
    weights = {"w": torch.randn(3000, 700), "n": torch.arange(5)}
    manifest, slot, _, _, _ = assemble(weights, options=SourceOptions(torch.bfloat16))
    assert_arrived({"w": weights["w"].bfloat16(), "n": weights["n"]}, manifest, slot)


def test_the_same_windows_serve_other_versions_and_other_weights():
    windows = Windows(HOST, 2 * MIB)
    for seed in range(3):
        manifest, slot, *_ = assemble(mixed(seed), 2 * MIB, windows=windows)
        assert_arrived(mixed(seed), manifest, slot)
    larger = {"w": torch.randn(7 * MIB), **mixed()}
    manifest, slot, *_ = assemble(larger, 2 * MIB, windows=windows)
    assert_arrived(larger, manifest, slot)


def test_changed_tensors_are_counted():
    weights = {f"w{n}": torch.randn(MIB // 2) for n in range(5)}  # 2 MiB each
    windows = Windows(HOST, 4 * MIB)
    before = assemble(weights, 4 * MIB, windows=windows)[-1]
    assert assemble(weights, 4 * MIB, windows=windows)[-1].changed_since(before) == 0
    weights["w3"][-1] += 1
    after = assemble(weights, 4 * MIB, windows=windows)[-1]
    assert after.changed_since(before) == 1
    assert not after.same_as(before)


def test_a_tensor_over_several_buckets_counts_once():
    weights = {"long": torch.randn(5 * MIB), "other": torch.randn(MIB)}
    before = assemble(weights, 2 * MIB)[-1]
    weights["long"] += 1
    assert assemble(weights, 2 * MIB)[-1].changed_since(before) == 1


def test_a_first_version_in_inference_mode_is_no_bar_to_the_second():
    windows = Windows(HOST, 2 * MIB)
    with torch.inference_mode():
        assemble(mixed(), 2 * MIB, windows=windows)
    manifest, slot, *_ = assemble(mixed(1), 2 * MIB, windows=windows)
    assert_arrived(mixed(1), manifest, slot)


def test_versions_take_no_new_lanes():
    """A GPU has a few only, which are handed out again."""

    class Counting(HostDevice):
        taken = 0

        def lane(self):
            self.taken += 1
            return super().lane()

    gpu = Counting()
    windows = Windows(gpu, 2 * MIB)
    assemble(mixed(), 2 * MIB, windows=windows)
    before = gpu.taken
    for seed in range(3):
        assemble(mixed(seed), 2 * MIB, windows=windows)
    assert gpu.taken == before


class Gentle(HostDevice):
    """Notes of which copies it was asked to be gentle in."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def moves(self, into, out_of, length, gentle=False):
        self.asked.append(gentle)
        return super().moves(into, out_of, length, gentle)


def test_copies_beside_a_broadcast_are_gentle():
    gpu = Gentle()
    windows = Windows(gpu, MIB)
    for seed in range(2):
        _, _, messages, *_ = assemble(mixed(seed), windows=windows)
    assert len(gpu.asked) == 2 * len(messages)  # other tensors, so other copies
    assert gpu.asked == [False, *[True] * (len(messages) - 1)] * 2


# -------------------------------------------------------------------- how large buckets are


def test_a_size_that_was_asked_for_is_kept_to():
    windows = Windows(HOST, 512 * MIB, exact=True)
    sizes = [windows.size_for(n) for n in (0, 1, 3 * MIB + 1, 2000 * MIB, 1 << 40)]
    assert sizes == [MIB, MIB, 4 * MIB, 512 * MIB, 512 * MIB]


def test_buckets_of_small_weights_are_smaller():
    windows = Windows(HOST, 256 * MIB, exact=False)
    for nbytes, mib in [
        (0, 1),
        (3 * MIB + 1, 4),
        (64 * MIB + 1, 64),
        (1024 * MIB, 64),
        (1600 * MIB + 1, 100),
        (1600 * MIB + 16, 101),
        (4096 * MIB, 256),
        (1 << 40, 256),
    ]:
        assert windows.size_for(nbytes) == mib * MIB, nbytes


def test_buckets_are_never_larger_than_was_said(monkeypatch):
    """Receivers have buffers of the size that is said, if they keep versions in host memory."""
    monkeypatch.setattr(windows_module, "LEAST", MIB)
    windows = Windows(HOST, 8 * MIB, exact=False)
    largest = []
    for mib in (1, 2, 64, 2, 40, 128):
        weights = {"w": torch.zeros(mib * MIB, dtype=torch.uint8)}
        said = windows.size_for(mib * MIB)
        _, _, messages, *_ = assemble(weights, said, windows=windows)
        largest.append(max(part["nbytes"] for message in messages for part in message["parts"]))
    assert [nbytes // MIB for nbytes in largest] == [1, 1, 4, 2, 4, 8]


def test_engines_follow_weights_that_shrink(on_gpus, monkeypatch):
    monkeypatch.setattr(windows_module, "LEAST", MIB)
    target = {name: torch.zeros(4 * MIB) for name in "ab"}
    scheme = ws.NCCLScheme(backend="gloo", memory="host")
    receiver = scheme.create_receiver(target, strict=False)
    with scheme.create_sender() as sender, receiver:
        sender.connect()
        receiver.connect()
        for number, names in enumerate(["ab", "a", "b", "ab"], 1):
            weights = {name: torch.full_like(target[name], number) for name in names}
            sender.update_weights(weights, version=number)
            receiver.poll_and_apply(10)
            for name in names:
                assert torch.equal(target[name], weights[name])


@pytest.mark.parametrize(("asked", "size"), [(None, MIB), (3, 3 * MIB)])
def test_a_scheme_asks_for_a_size_or_does_not(on_gpus, monkeypatch, asked, size):
    monkeypatch.setattr(windows_module, "LEAST", MIB)
    publisher = ws.NCCLScheme(backend="gloo", bucket_mb=asked).create_publisher()
    publisher.open(Deadline(10))
    try:
        assert publisher._buckets(16 * MIB) == (size, IN_FLIGHT)
    finally:
        publisher.close()


class SmallGPU(HostDevice):
    """Has room for small buffers only; notes what it was asked for."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def empty(self, nbytes):
        self.asked.append(nbytes)
        if nbytes > MIB:
            raise NoRoomError("it is full")
        return super().empty(nbytes)


def test_a_gpu_with_little_room_has_smaller_buckets():
    weights = mixed()
    gpu = SmallGPU()
    windows = Windows(gpu, 8 * MIB)
    for _ in range(2):  # the second time it is not asked for more
        manifest, slot, messages, *_ = assemble(weights, windows=windows)
        assert_arrived(weights, manifest, slot)
        assert len(messages) == -(-manifest.nbytes // MIB)
        assert gpu.asked == [8 * MIB, *[MIB] * IN_FLIGHT]


# -------------------------------------------------------------------- buffers that are used again


class LateDigests(LazyDevice):
    """Digests when somebody waits for them, and not before; copies at once."""

    def __init__(self):
        super().__init__()
        self.done = []

    def moves(self, *what):
        return HostDevice.moves(self, *what)

    def digests(self, lane, address, count, into):
        self.done.append("digest")
        super().digests(lane, address, count, into)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_buffer_is_filled_again_only_after_its_digests(streamed):
    weights = {f"w{n}": torch.randn(MIB // 4) for n in range(3 * IN_FLIGHT)}
    entries = [(name, tensor.dtype, tensor.shape) for name, tensor in weights.items()]
    options = SourceOptions(manifest=ws.Manifest.build(entries))
    windows = Windows(LateDigests(), MIB)
    given = iter(weights.items()) if streamed else weights
    manifest, _, messages, there, summary = assemble(given, options=options, windows=windows)
    assert len(messages) == len(weights)
    there.compare(summary.digests, manifest)


def test_a_bucket_leaves_before_it_is_digested():
    gpu = LateDigests()
    inventory = as_source({"w": torch.randn(MIB)}).inventory()
    Windows(gpu, MIB).assemble(
        inventory, lambda bucket: gpu.done.append("send"), lambda buffer: None, True, Deadline(30)
    )
    assert gpu.done == ["send", "digest"] * 4


@pytest.mark.parametrize("error", [WeightSyncError, KeyboardInterrupt])
def test_nothing_is_digested_any_more_after_an_error(error):
    gpu = LateDigests()
    windows = Windows(gpu, MIB)
    inventory = as_source({"w": torch.randn(2 * MIB)}).inventory()

    def send(bucket):
        if bucket.number == 3:
            raise error

    with pytest.raises(error):
        windows.assemble(inventory, send, lambda buffer: None, True, Deadline(30))
    assert gpu.done == ["digest"] * 3
    assert all(lane.finished == lane.queued for lane in gpu.lanes)
    manifest, slot, _, there, summary = assemble(mixed(), windows=windows)
    assert_arrived(mixed(), manifest, slot)
    there.compare(summary.digests, manifest)


def test_a_buffer_is_filled_again_only_when_it_was_let_go():
    weights = {f"w{n}": torch.randn(MIB // 4) for n in range(3 * IN_FLIGHT)}
    inventory = as_source(weights).inventory()
    held = {}

    def send(bucket):
        held[bucket.parts[0].buffer.untyped_storage().data_ptr()] = bucket.number

    def let_go(buffer):
        held.pop(buffer.untyped_storage().data_ptr(), None)
        assert len(held) < IN_FLIGHT

    Windows(HOST, MIB).assemble(inventory, send, let_go, True, Deadline(30))
    assert sorted(held.values()) == list(range(2 * IN_FLIGHT, 3 * IN_FLIGHT))


# -------------------------------------------------------------------- digests


def test_a_wrong_bit_is_found_and_its_tensor_named():
    manifest, slot, _, there, summary = assemble(mixed(), 2 * MIB)
    spec = manifest.spec("exact")
    slot[spec.offset + spec.nbytes - 1] ^= 1
    for key, part in list(there._parts.items()):
        ((offset, length),) = part.pieces
        there.add(*key, slot[offset : offset + length], part.pieces)
    with pytest.raises(CorruptError, match=r"1 MiB are not what was sent.*'exact'"):
        there.compare(summary.digests, manifest)


def test_digests_of_something_else_are_refused():
    manifest, _, _, there, summary = assemble(mixed())
    with pytest.raises(ProtocolError, match="digests came for"):
        there.compare(summary.digests[:-1], manifest)
    with pytest.raises(ProtocolError, match="0 digests came for"):
        there.compare(np.zeros(0, dtype=np.uint64), manifest)


@pytest.mark.parametrize("begin", [3, 8])
def test_memory_that_a_gpu_cannot_read_in_words_is_refused(begin):
    """It reads two at a time, of 8 bytes."""
    memory = HOST.empty(2 * MIB)
    with pytest.raises(ProtocolError, match="between two words"):
        Digester(HOST, HOST.lane()).add(0, 0, memory[begin : begin + MIB], [(begin, MIB)])


def test_digests_as_text():
    digests = np.array([0, 1, (1 << 64) - 1, 12345678901234567], dtype=np.uint64)
    assert (from_text(to_text(digests)) == digests).all()
    assert len(from_text("")) == 0
    for garbage in ("AAAA", "???", None, 7, "ä"):
        with pytest.raises(ProtocolError):
            from_text(garbage)


# -------------------------------------------------------------------- from end to end


@pytest.fixture
def on_gpus(monkeypatch):
    for module in (publisher, reader):
        monkeypatch.setattr(module, "gpu_of", module.gpu_of)
    pretend()


@pytest.mark.parametrize("memory", ["gpu", "host", "auto"])
@pytest.mark.parametrize("verify", [True, False])
def test_an_engine_has_what_was_sent(on_gpus, memory, verify):
    weights = mixed()
    target = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    scheme = ws.NCCLScheme(backend="gloo", bucket_mb=1, memory=memory, verify=verify)
    with scheme.create_sender(weights) as sender, scheme.create_receiver(target) as receiver:
        sender.connect()
        receiver.connect()
        for number in range(1, 5):
            weights["large"].fill_(number)
            weights["strided"].add_(1)
            sender.update_weights(version=number)
            assert receiver.poll_and_apply(10).version.number == number
            for name, tensor in weights.items():
                assert torch.equal(as_bytes(target[name]), as_bytes(tensor)), name


@pytest.mark.parametrize("end", [publisher, reader], ids=["sender", "receiver"])
def test_either_end_may_have_no_gpu(monkeypatch, end):
    """One packs with the processor, or takes by it; the other does not."""
    monkeypatch.setattr(end, "gpu_of", lambda place: HOST)
    weights = mixed()
    target = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    scheme = ws.NCCLScheme(backend="gloo", bucket_mb=1)
    with scheme.create_sender(weights) as sender, scheme.create_receiver(target) as receiver:
        sender.connect()
        receiver.connect()
        sender.update_weights(version=1)
        receiver.poll_and_apply(10)
    for name, tensor in weights.items():
        assert torch.equal(as_bytes(target[name]), as_bytes(tensor)), name


def test_a_digest_that_differs_keeps_the_version_out(on_gpus, monkeypatch):
    """What is on the trainer's GPU is not what it digested."""
    weights = {"w": torch.randn(3 * MIB)}
    target = {"w": torch.zeros(3 * MIB)}
    scheme = ws.NCCLScheme(backend="gloo", bucket_mb=1, peer_timeout=2.0)
    with scheme.create_sender(weights) as sender, scheme.create_receiver(target) as receiver:
        sender.connect()
        receiver.connect()
        sender.update_weights(version=1)
        receiver.poll_and_apply(10)
        before = target["w"].clone()
        found = Digester.found
        monkeypatch.setattr(Digester, "found", lambda self: found(self) ^ np.uint64(id(self)))
        with pytest.raises(ws.ReceiverError, match=r"CorruptError.*'w'"):
            sender.update_weights({"w": weights["w"] + 1}, version=2)
        assert receiver.poll_and_apply(0.2) is None
        assert torch.equal(target["w"], before)


@pytest.mark.parametrize("end", ["sender", "receiver"])
def test_no_room_for_digests_in_the_middle_costs_one_version(on_gpus, monkeypatch, end):
    """The bucket that they are of may have left already."""
    add = Digester.add

    def full(self, bucket, part, payload, pieces, after=None):
        if bucket == 3 and (after is not None) == (end == "sender"):
            raise NoRoomError("it is full")
        return add(self, bucket, part, payload, pieces, after)

    target = {"w": torch.zeros(2 * MIB)}
    scheme = ws.NCCLScheme(backend="gloo", bucket_mb=1, peer_timeout=2.0)
    with scheme.create_sender() as sender, scheme.create_receiver(target) as receiver:
        sender.connect()
        receiver.connect()
        for number in (1, 2, 3):
            weights = {"w": torch.full((2 * MIB,), float(number))}
            monkeypatch.setattr(Digester, "add", full if number == 2 else add)
            if number == 2:
                with pytest.raises(ws.WeightSyncError, match="it is full"):
                    sender.update_weights(weights, version=number)
                assert receiver.poll_and_apply(0.2) is None
            else:
                sender.update_weights(weights, version=number)
                assert receiver.poll_and_apply(10).version.number == number
                assert torch.equal(target["w"], weights["w"])
