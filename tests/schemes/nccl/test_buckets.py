"""Packing a version into buckets and putting it together again."""

import pytest
import torch

import weightsync as ws
from tests.conftest import as_bytes
from tests.schemes.nccl.some_weights import MIB, mixed
from weightsync.chunks import CHUNK, Copier
from weightsync.deadline import Deadline
from weightsync.schemes.nccl.buckets import Packer, check, unpack, verify
from weightsync.source import SourceOptions, as_source


def send(weights, size=MIB, digest=True, options=None):
    """The version as it arrives, the number of buckets, and the summary."""
    inventory = as_source(weights, options).inventory()
    manifest = inventory.manifest
    copier = Copier()
    slot = torch.full((max(manifest.nbytes, 1),), 255, dtype=torch.uint8)
    packer = Packer(
        inventory,
        copier,
        torch.device("cpu"),
        lambda: torch.empty(size, dtype=torch.uint8),
        size,
        digest,
        Deadline(30),
    )
    count = 0
    for bucket in packer.buckets():
        assert bucket.number == count
        assert sum(part.nbytes for part in bucket.parts) <= size
        count += 1
        for said, part in zip(bucket.message()["parts"], bucket.parts, strict=True):
            pieces = check(said, manifest)
            verify(said["digests"], pieces, part.payload, manifest, copier)
            unpack(pieces, part.payload, slot, copier)
    arrived = {
        spec.name: slot[spec.offset : spec.offset + spec.nbytes] for spec in manifest.tensors
    }
    return arrived, count, packer.summary()


@pytest.mark.parametrize("size", [MIB, 2 * MIB, 64 * MIB])
@pytest.mark.parametrize("digest", [True, False])
def test_what_arrives_is_what_was_sent(size, digest):
    """W1, W3, W6: tensors larger than a bucket, and many smaller."""
    weights = mixed()
    arrived, _, _ = send(weights, size, digest)
    for name, tensor in weights.items():
        assert torch.equal(arrived[name], as_bytes(tensor)), name


def test_a_stream_in_any_order():
    """W7: it says with the data what the data are."""
    weights = mixed()
    backwards = list(weights.items())[::-1]
    entries = [(name, tensor.dtype, tensor.shape) for name, tensor in weights.items()]
    options = SourceOptions(manifest=ws.Manifest.build(entries))
    arrived, _, _ = send(iter(backwards), options=options)
    for name, tensor in weights.items():
        assert torch.equal(arrived[name], as_bytes(tensor)), name


def test_many_small_tensors_share_buckets():
    """E4."""
    weights = {f"t{number}": torch.full((256,), number) for number in range(2000)}
    arrived, count, _ = send(weights)
    assert count == -(-2000 * 256 * 8 // MIB)
    assert torch.equal(arrived["t1999"].view(torch.int64), weights["t1999"])


def test_nothing_to_send():
    assert send({})[1] == 0
    assert send({"empty": torch.empty(0)})[1] == 0


def test_what_changed_is_counted():
    weights = mixed()
    before = send(weights)[2]
    assert send(weights)[2].changed_since(before) == 0
    assert send(weights)[2].same_as(before)
    weights["large"][-1] += 1
    after = send(weights)[2]
    assert after.changed_since(before) == 1
    assert not after.same_as(before)
    assert send({"large": weights["large"]})[2].changed_since(before) is None
    assert send(weights, digest=False)[2].changed_since(after) is None
    assert not send(weights, digest=False)[2].same_as(send(weights, digest=False)[2])


def part_of(weights):
    inventory = as_source(weights).inventory()
    packer = Packer(
        inventory,
        Copier(),
        torch.device("cpu"),
        lambda: torch.empty(4 * MIB, dtype=torch.uint8),
        4 * MIB,
        True,
        Deadline(30),
    )
    (bucket,) = packer.buckets()
    (part,) = bucket.parts
    return inventory.manifest, part, bucket.message()["parts"][0]


def test_a_flipped_bit_is_found_and_the_tensors_named():
    manifest, part, said = part_of({f"t{n}": torch.ones(100_000) for n in range(8)})
    payload = part.payload.clone()
    payload[2 * CHUNK + 5] ^= 1
    with pytest.raises(ws.CorruptError, match="'t5', 't6', 't7'"):
        verify(said["digests"], check(said, manifest), payload, manifest, Copier())


@pytest.mark.parametrize(
    "lie",
    [
        {"pieces": [[-64, 12]]},
        {"pieces": [[0, 12], [1 << 40, 4]]},
        {"pieces": [[0, 4]]},
        {"pieces": [[0, 0], [0, 12]]},
        {"pieces": []},
        {"nbytes": 0, "pieces": []},
        {"digests": [1, 2]},
        {"pieces": [[(1 << 63) - 8, 12]]},  # their sum overflows, and lies before the end
        {"pieces": [[0, 1 << 62], [0, 1 << 62], [0, 1 << 62], [0, 1 << 62], [0, 12]]},
        {"pieces": [[1 << 80, 12]]},
        {"pieces": [[0]]},
        {"pieces": [["x", 12]]},
        {"pieces": None},
        {"digests": 7},
        {"nbytes": "many"},
    ],
)
def test_pieces_that_lie_nowhere_are_refused(lie):
    manifest, _, said = part_of({"w": torch.ones(3)})
    assert check(said, manifest) == [(0, 12)]
    with pytest.raises(ws.ProtocolError):
        check({**said, **lie}, manifest)
