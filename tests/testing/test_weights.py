"""Sets of weights that are the same every time, and the comparison of their bits."""

import pytest
import torch

from weightsync.testing import flip_bit, weights


@pytest.mark.parametrize("make", [weights.every_dtype, weights.shapes, weights.strided])
def test_every_bit_counts(make):
    one, other = make(), make()
    assert weights.differences(one, other) == {}
    for name, tensor in one.items():
        if tensor.numel() and tensor.is_contiguous() and not tensor.is_conj():
            changed = tensor.clone()
            flip_bit(changed)
            assert weights.differences(one, {**other, name: changed}) == {name: "other bytes"}


def test_nan_and_signs_of_zero_count():
    special = {"w": torch.tensor([float("nan"), 0.0])}
    assert weights.differences(special, {"w": special["w"].clone()}) == {}
    assert weights.differences(special, {"w": torch.tensor([float("nan"), -0.0])})


def test_names_dtypes_and_shapes_count():
    one = {"a": torch.zeros(4), "b": torch.zeros(4), "c": torch.zeros(4)}
    other = {"a": torch.zeros(2, 2), "b": torch.zeros(4, dtype=torch.int32), "d": torch.zeros(4)}
    assert set(weights.differences(one, other)) == {"a", "b", "c", "d"}


@pytest.mark.parametrize("make", [weights.every_dtype, weights.shapes, weights.strided])
def test_room_holds_nothing_of_it_yet(make):
    made = make()
    room = weights.room_for(made)
    full = {name for name, tensor in made.items() if tensor.numel()}
    assert set(weights.differences(made, room)) == full


def test_every_pattern_of_sixteen_bits_comes_up():
    patterns = weights.every_dtype()["bfloat16"]
    assert len(patterns.view(torch.int16).unique()) == 1 << 16


def test_tearing_shows():
    constants = weights.constants(7, nbytes=4096)
    assert weights.value_of(constants) == 7
    constants["layer2"][5] = 8
    assert weights.value_of(constants) == "torn: [7, 8]"


def test_a_stream_counts_what_is_alive():
    stream = weights.Counted(5, 1000)
    for _ in stream():
        pass
    assert stream.most <= 2000
    hoard = weights.Counted(5, 1000)
    held = list(hoard())
    assert hoard.most == 5000
    del held


def test_a_stream_comes_in_another_order():
    stream = weights.Reordered()
    first, second = list(stream()), list(stream())
    assert [name for name, _ in first] != [name for name, _ in second]
    assert weights.differences(dict(first), dict(second)) == {}
