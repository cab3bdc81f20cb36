"""dtype and precision: cases D. Every dtype that can be sent, bit for bit."""

import pytest
import torch

import weightsync as ws
from tests.conftest import as_bytes, assert_all_same, assert_same, copy_of, read, send
from weightsync.manifest import DTYPES

BITS_16 = [
    0x7FC1,
    0xFFC1,
    0x7F81,
    0xFF81,
    0x7E01,
    0xFE01,
    0x7C01,
    0x8000,
    0x7F80,
    0x7C00,
    1,
    0x03FF,
]


def patterns(dtype):
    """24 values: NaN payloads, -0.0, infinities, subnormals; random bytes otherwise."""
    if dtype is torch.bool:
        return torch.arange(24) % 3 == 0
    if dtype.itemsize == 1:
        return torch.arange(0, 256, 11, dtype=torch.int16).to(torch.uint8).view(dtype)
    if dtype.itemsize == 2:
        return torch.tensor(BITS_16 * 2, dtype=torch.int32).to(torch.int16).view(dtype)
    generator = torch.Generator().manual_seed(dtype.itemsize)
    raw = torch.randint(0, 256, (24, dtype.itemsize), dtype=torch.uint8, generator=generator)
    special = {
        4: [0x7F800001, 0xFFC12345, 0x80000000, 0x7F800000, 0xFF800000, 0x00000001],
        8: [0x7FF0000000000001, 0xFFF8DEADBEEF0001, 1 << 63, 0x7FF0000000000000, 1],
    }.get(8 if dtype in (torch.float64, torch.complex128) else 4)
    width = 8 if dtype in (torch.float64, torch.complex128) else 4
    words = [word - (1 << 8 * width) if word >> (8 * width - 1) else word for word in special]
    words = torch.tensor(words, dtype=torch.int64 if width == 8 else torch.int32)
    raw.view(-1)[: len(words) * width] = words.view(torch.uint8)
    return raw.view(dtype).view(24)


def strided(tensor):
    """The same values, every second element of a longer tensor."""
    store = torch.zeros(2 * tensor.nbytes, dtype=torch.uint8).view(tensor.dtype)
    view = store[::2]
    if tensor.dtype.itemsize == 1:
        view.view(torch.uint8).copy_(tensor.view(torch.uint8))
    else:
        view.copy_(tensor)
    assert not view.is_contiguous()
    return view


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_d3_every_dtype(ends, name):
    """D3: contiguous and strided on either side, 0-dim and empty, equal as bytes."""
    values = patterns(DTYPES[name])
    sent = {
        "flat": values,
        "matrix": copy_of(values).view(4, 6),
        "transposed": copy_of(values).view(4, 6).t(),
        "strided": strided(values),
        "scalar": values[5],
        "empty": values[:0].view(0, 3),
    }
    expected = {key: copy_of(tensor) for key, tensor in sent.items()}
    manifest, received = send(ends, sent)
    assert {spec.dtype for spec in manifest.tensors} == {DTYPES[name]}
    assert_all_same(received, expected)
    target = {key: copy_of(tensor) for key, tensor in expected.items()}
    target["flat"] = strided(values)
    target["transposed"] = copy_of(expected["transposed"].t()).t()
    for tensor in target.values():
        plain = {1: torch.uint8, 2: torch.int16}.get(tensor.dtype.itemsize, tensor.dtype)
        tensor.view(plain).zero_()
    receiver = ends.receiver(target)
    receiver.poll_and_apply()
    assert_all_same(target, expected)
    assert receiver.verify_weights().ok
    assert_all_same(sent, expected)


def test_d3_all_in_one(ends):
    """Neighbours of every size do not move each other."""
    sent = {name: copy_of(patterns(dtype)) for name, dtype in DTYPES.items()}
    _, received = send(ends, sent)
    assert_all_same(received, sent)


@pytest.mark.parametrize("flag", ["conj", "neg"])
def test_lazy_bits(ends, flag):
    """A conjugate or negated view: its memory is not what it means."""
    values = torch.tensor([1 + 2j, -0.0 + 3j])
    view = values.conj() if flag == "conj" else values.conj().imag
    assert view.is_conj() if flag == "conj" else view.is_neg()
    expected = view.resolve_conj().resolve_neg().clone()
    _, received = send(ends, {"w": view, "v": torch.ones(3)})
    assert_same(received["w"], expected)
    target = {"w": torch.zeros(2, dtype=torch.complex64).conj(), "v": torch.zeros(3)}
    if flag == "neg":
        target["w"] = torch.zeros(2, dtype=torch.complex64).conj().imag
    ends.receiver(target).poll_and_apply()
    assert_same(target["w"].resolve_conj().resolve_neg(), expected)


def test_d1_cast_once(ends):
    """D1: manifest, payload and values are those of the target dtype; the trainer's stay."""
    values = torch.tensor([1.0 + 2**-9, -0.0, float("inf"), float("nan"), 1e-40, 3.4e38])
    trained = {
        "weight": values,
        "transposed": torch.rand(3, 5).t(),
        "double": values.double(),
        "half": torch.rand(4).half(),
        "ready": torch.rand(4).bfloat16(),
        "counter": torch.tensor(2**40 + 1),
        "mask": torch.tensor([True, False]),
        "complex": torch.rand(2, dtype=torch.complex64),
    }
    before = {name: copy_of(tensor) for name, tensor in trained.items()}
    manifest, received = send(ends, trained, dtype=torch.bfloat16)
    for name, tensor in trained.items():
        spec = manifest.spec(name)
        wire = torch.bfloat16 if tensor.is_floating_point() else tensor.dtype
        assert (spec.dtype, received[name].dtype) == (wire, wire)
        assert spec.nbytes == received[name].nbytes == wire.itemsize * tensor.numel()
        assert_same(received[name], tensor.to(wire))
    assert_all_same(trained, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.float8_e4m3fn])
def test_d1_other_targets(ends, dtype):
    trained = {"a": torch.randn(100), "b": torch.randn(10, 3).t()}
    _, received = send(ends, trained, dtype=dtype)
    assert_all_same(received, {name: tensor.to(dtype) for name, tensor in trained.items()})


def test_d1_streamed(ends):
    trained = {"a": torch.randn(100), "b": torch.randn(10, 3).t(), "c": torch.arange(3)}
    manifest, received = send(ends, list(trained.items()), dtype=torch.bfloat16)
    assert manifest.spec("a").dtype == torch.bfloat16
    expected = {n: t.bfloat16() if t.is_floating_point() else t for n, t in trained.items()}
    assert_all_same(received, expected)


def test_a_cast_that_torch_does_not_have(ends):
    """Refused by name; what was published stays."""
    sender = ends.sender({"w": torch.ones(3)}, dtype=torch.bfloat16)
    version = sender.update_weights(version=1).version
    packed = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    with pytest.raises(ws.SourceError, match="'packed'"):
        sender.update_weights({"w": torch.zeros(3), "packed": packed}, version=2)
    assert (
        as_bytes(read(ends, version)[1]["w"]).tolist()
        == as_bytes(torch.ones(3).bfloat16()).tolist()
    )


def test_d1_a_receiver_of_another_dtype(ends):
    """Never cast behind the user's back: both dtypes are named, nothing is written."""
    target = {"w": torch.zeros(3, dtype=torch.bfloat16)}
    sender, receiver = ends.pair({"w": torch.ones(3)}, target)
    sender.update_weights(version=1)
    with pytest.raises(ws.MismatchError, match=r"float32\[3\].*bfloat16\[3\]"):
        receiver.poll_and_apply()
    assert target["w"].count_nonzero() == 0


def test_d1_the_dtype_changes_while_it_runs(ends):
    """A new manifest, a new generation: nothing is read with the old one."""
    sender, receiver = ends.pair({}, {"w": torch.zeros(64)}, receiver={"cast": True})
    for number, dtype in enumerate([torch.float32, torch.bfloat16, torch.float64], start=1):
        sender.update_weights({"w": torch.full((64,), number, dtype=dtype)}, version=number)
        receiver.poll_and_apply()
        assert receiver.engine.target["w"].eq(number).all()
