"""Wire format: cases W."""

import pytest
import torch
from torch import nn

import weightsync as ws
from tests.conftest import assert_all_same, assert_same, read, send

CHUNK_MULTIPLE = 4 << 20


def numbers(*shape, dtype=torch.float32):
    return torch.arange(torch.Size(shape).numel(), dtype=dtype).reshape(shape)


STRIDED = {
    "transposed": numbers(5, 7).t(),
    "columns": numbers(6, 8)[:, ::2],
    "rows": numbers(8, 6)[1::3],
    "convolution": numbers(2, 3, 4, 5).permute(2, 0, 3, 1),
    "channels last": numbers(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "expanded": numbers(4, 1).expand(4, 6),
    "expanded scalar": torch.tensor(3.5).expand(3, 3),
    "flipped view": numbers(9).flip(0)[::2],
    "diagonal": numbers(6, 6).diagonal(),
    "overlapping": numbers(10).unfold(0, 4, 2),
    "offset": numbers(100)[3:23].view(4, 5),
    "misaligned": torch.arange(41, dtype=torch.uint8)[1:],
    "one column": numbers(5, 1).t(),
    "empty": numbers(0, 5).t(),
    "integers": numbers(4, 6, dtype=torch.int16).t(),
    "bools": (numbers(4, 6) % 2 == 0).t(),
}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_w1_strided(ends, streamed, dtype):
    """W1: any strides; what arrives is ``.contiguous()`` of the source."""
    weights = list(STRIDED.items()) if streamed else STRIDED
    _, received = send(ends, weights, dtype=dtype)
    for name, tensor in STRIDED.items():
        wire = dtype if dtype and tensor.is_floating_point() else tensor.dtype
        assert_same(received[name], tensor.to(wire).contiguous())


def test_w3_scalars(ends):
    """W3: 0-dim among others; shape () and value kept, neighbours right."""
    sent = {
        "before": torch.rand(3),
        "f32": torch.tensor(1.5),
        "bf16": torch.tensor(2.5, dtype=torch.bfloat16),
        "i64": torch.tensor(-(2**40)),
        "flag": torch.tensor(True),
        "complex": torch.tensor(1 + 2j),
        "one": torch.tensor([7.0]),
        "parameter": nn.Parameter(torch.tensor(0.25)),
        "after": torch.rand(3),
    }
    manifest, received = send(ends, sent)
    assert_all_same(received, sent)
    assert manifest.spec("f32").shape == ()
    target = {name: torch.zeros_like(tensor) for name, tensor in sent.items()}
    ends.receiver(target).poll_and_apply()
    assert_all_same(target, sent)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 4)])
def test_w3_empty(ends, shape):
    """Without elements, first, last, alone, and between others."""
    empty = torch.empty(shape)
    for number, sent in enumerate(
        [
            {"only": empty},
            {"first": empty, "w": torch.rand(3), "last": empty.clone()},
            {"w": torch.rand(64), "x": empty, "y": empty.clone(), "v": torch.rand(64)},
            # ends exactly at a chunk, so that the empty one lies behind the last byte
            {"w": torch.ones(CHUNK_MULTIPLE, dtype=torch.uint8), "last": empty},
        ]
    ):
        sender = ends.sender(sent)
        sender.update_weights(version=number)
        assert_all_same(read(ends)[1], sent)
        target = {name: torch.zeros_like(tensor) for name, tensor in sent.items()}
        receiver = ends.receiver(target)
        receiver.poll_and_apply()
        assert receiver.verify_weights().ok
        assert_all_same(target, sent)
        ends.shutdown()


def test_w3_an_empty_tensor_verifies(ends):
    """By its name: there is not a byte of it that could be wrong."""
    from weightsync.deadline import Deadline

    sender = ends.sender({"w": torch.ones(CHUNK_MULTIPLE, dtype=torch.uint8), "e": torch.empty(0)})
    version = sender.update_weights(version=1).version
    subscriber = ends.scheme().create_subscriber()
    with subscriber.snapshot(version, Deadline(1)) as snapshot:
        snapshot.verify(["e"])
        snapshot.verify(["w", "e"])
        snapshot.verify([])
    subscriber.close()


def test_no_tensors_at_all(ends):
    manifest, received = send(ends, {})
    assert (manifest.names(), received) == ([], {})


def test_many_dimensions(ends):
    sent = {"deep": torch.rand([1] * 30 + [2, 3])}
    _, received = send(ends, sent)
    assert_all_same(received, sent)


@pytest.mark.parametrize("large", [(1 << 22) + 3, 3 << 20, 1 << 20])
def test_w6_a_tensor_larger_than_the_bucket(ends, large):
    """W6: in pieces, between small ones; nothing to be set."""
    sent = {
        "small": torch.rand(5),
        "large": torch.arange(large, dtype=torch.int32).to(torch.uint8),
        "also small": torch.rand(7),
    }
    scheme = ends.scheme()
    sender = ends.sender(list(sent.items()), scheme=scheme)
    sender.update_weights(version=1)
    assert_all_same(read(ends)[1], sent)


def test_w6_a_stream_of_small_tensors(ends):
    sent = {f"t{number}": torch.rand(number) for number in range(30)}
    sender = ends.sender(list(sent.items()), scheme=ends.scheme())
    sender.update_weights(version=1)
    assert_all_same(read(ends)[1], sent)


def test_w7_another_order_on_the_second_pass(ends):
    """W7: tensors of equal size never swap their values."""
    sent = {f"layer.{n}": torch.full((8,), n, dtype=torch.float32) for n in range(6)}
    sent["layer.2"] = sent["layer.2"].view(torch.int32)
    passes = []

    def stream():
        passes.append(1)
        entries = list(sent.items())
        if len(passes) % 2 == 0:
            entries.sort(key=lambda entry: (str(entry[1].dtype), entry[0]), reverse=True)
        return iter(entries)

    _, received = send(ends, stream)
    assert len(passes) >= 2
    assert_all_same(received, sent)


@pytest.mark.parametrize(
    "second",
    [
        lambda name: (f"{name}.other", torch.ones(3)),
        lambda name: (name, torch.ones(4)),
        lambda name: (name, torch.ones(1, 3)),
        lambda name: ("a", torch.ones(3)),
    ],
    ids=["name", "shape", "dimensions", "twice"],
)
def test_w7_something_else_on_the_second_pass(ends, second):
    """W7's kind: an error by name, and nothing becomes visible."""
    passes = []

    def stream():
        passes.append(1)
        for name in ("a", "b"):
            yield second(name) if len(passes) > 1 else (name, torch.ones(3))

    sender = ends.sender({"w": torch.ones(2)})
    sender.update_weights(version=1)
    with pytest.raises(ws.SourceError, match=r"'(a|b|a\.other)'"):
        sender.update_weights(stream, version=2)
    assert_all_same(read(ends)[1], {"w": torch.ones(2)})


def unsendable():
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    return {
        "meta": torch.empty(4, device="meta"),
        "sparse": torch.eye(2).to_sparse(),
        "lazy": nn.UninitializedParameter(),
        "quantised": torch._empty_affine_quantized([4], scale=1.0, dtype=torch.quint8),
        "freed": freed,
    }


@pytest.mark.parametrize("kind", ["meta", "sparse", "lazy", "quantised", "freed"])
@pytest.mark.parametrize("form", ["mapping", "module", "stream"])
@pytest.mark.filterwarnings("ignore:.*quantiz.*")
def test_w10_refused_before_a_byte_is_written(ends, form, kind):
    """W10: an error with its name, and the version before is still there, bit for bit."""
    good = {"a": torch.rand(4), "odd": torch.rand(4)}
    bad = {"a": torch.zeros(4), "odd": unsendable()[kind]}
    if form == "module":
        module = nn.Module()
        module.register_buffer("a", bad["a"])
        if isinstance(bad["odd"], nn.Parameter):
            module.register_parameter("odd", bad["odd"])
        else:
            module.register_buffer("odd", bad["odd"])
        weights = module
    else:
        weights = bad if form == "mapping" else list(bad.items())
    target = {name: torch.zeros_like(tensor) for name, tensor in good.items()}
    sender, receiver = ends.pair(good, target)
    version = sender.update_weights(version=1).version
    before = {slot: slot.version for slot in ends.scheme().inspect().slots}
    with pytest.raises(ws.SourceError, match="'odd'"):
        sender.update_weights(weights, version=2)
    assert {slot: slot.version for slot in ends.scheme().inspect().slots} == before
    assert sender.version == version
    assert receiver.poll_and_apply().version == version
    assert_all_same(target, good)
    sender.update_weights({name: tensor + 1 for name, tensor in good.items()}, version=2)
    receiver.poll_and_apply()
    assert_same(target["odd"], good["odd"] + 1)


def test_w10_at_connect(ends):
    """Refused even before the run's buffers are made."""
    sender = ends.sender(nn.Linear(2, 3, device="meta"), connect=False)
    with pytest.raises(ws.SourceError, match="'weight'"):
        sender.connect()
    sender.register_model(nn.Linear(2, 3))
    sender.connect()
    sender.update_weights(version=1)


def test_w10_half_way_through_a_stream(ends):
    """Some buckets were written already: still nothing becomes visible."""

    def stream():
        yield from ((f"t{number}", torch.zeros(1 << 18)) for number in range(4))
        yield "odd", torch.ones(2, device="meta" if passes else "cpu")
        passes.append(1)

    passes = []
    sender = ends.sender({"w": torch.ones(2)}, scheme=ends.scheme())
    sender.update_weights(version=1)
    with pytest.raises(ws.SourceError, match="'odd'"):
        sender.update_weights(stream, version=2)
    assert_all_same(read(ends)[1], {"w": torch.ones(2)})


def test_a_stream_may_use_one_buffer_again_and_again(ends):
    buffer = torch.empty(1000)

    def stream():
        for number in range(5):
            yield f"t{number}", buffer.fill_(number)

    entries = [(f"t{number}", torch.float32, (1000,)) for number in range(5)]
    sender = ends.sender(stream(), manifest=ws.Manifest.build(entries))
    sender.update_weights(version=1)
    for number, tensor in enumerate(read(ends)[1].values()):
        assert tensor.eq(number).all()


@pytest.mark.parametrize("size", [10, 300_000])
def test_a_stream_may_take_memory_back(ends, size):
    """As FSDP does when its gathered parameters go out of scope."""

    def stream():
        for number in range(5):
            tensor = torch.full((size,), float(number))
            yield f"t{number}", tensor
            tensor.untyped_storage().resize_(0)

    entries = [(f"t{number}", torch.float32, (size,)) for number in range(5)]
    sender = ends.sender(stream(), manifest=ws.Manifest.build(entries))
    sender.update_weights(version=1)
    for number, tensor in enumerate(read(ends)[1].values()):
        assert tensor.eq(number).all()
