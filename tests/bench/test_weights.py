"""Versions differ in every byte, and digests see every mixture."""

import pytest
import torch

from weightsync.bench.weights import Spec, WeightSet, bytes_of, change, digests, uniform


def test_every_byte_of_the_next_version_is_another_one():
    weights = WeightSet(
        "", (Spec("a", (3, 5)), Spec("b", (), "bfloat16"), Spec("c", (0,)))
    ).weights()
    before = {name: tensor.clone() for name, tensor in weights.items()}
    change(weights)
    for name, tensor in weights.items():
        assert (bytes_of(tensor) != bytes_of(before[name])).all()


def test_digests_see_a_byte_a_swap_and_a_shift():
    whole = digests(uniform(3, 3 << 12).weights())
    for damage in (
        lambda first, second: bytes_of(first)[17].add_(1),
        lambda first, second: first.copy_(second),
        lambda first, second: first.copy_(torch.roll(first, 1)),
    ):
        weights = uniform(3, 3 << 12).weights()
        assert digests(weights) == whole
        first, second, _ = weights.values()
        damage(first, second)
        assert digests(weights) != whole


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(ValueError, match="10 tensors of float32 do not fit into 39 bytes"):
        uniform(10, 39)
