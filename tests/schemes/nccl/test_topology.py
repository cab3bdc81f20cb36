"""Ranks by prefix sum; devices by UUID."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import weightsync as ws
from weightsync.schemes.nccl.topology import ranks_of, require_distinct, size_of


def test_data_parallel_replicas_get_ranks_of_their_own():
    """P1."""
    ranks = ranks_of([(2, 1, 2), (2, 1, 2)])
    assert [list(each) for each in ranks] == [[1, 2, 3, 4], [5, 6, 7, 8]]


@given(st.lists(st.one_of(st.integers(1, 9), st.tuples(*[st.integers(1, 4)] * 3)), max_size=6))
def test_each_rank_is_given_once_and_none_is_the_trainers(replicas):
    given_out = [rank for each in ranks_of(replicas) for rank in each]
    assert given_out == list(range(1, 1 + sum(map(size_of, replicas))))


@pytest.mark.parametrize("replica", [0, -1, (2, 0), (), 1.5, "2", True])
def test_what_is_no_number_of_gpus(replica):
    with pytest.raises(ws.SchemeError):
        size_of(replica)


def test_two_on_one_device_are_named():
    """P7."""
    require_distinct({"trainer": "GPU-1", "r1": "GPU-2", "on a CPU": "", "too": ""})
    with pytest.raises(ValueError, match=r"trainer and r2 .*GPU-1.*DoubleBufferScheme"):
        require_distinct({"trainer": "GPU-1", "r1": "GPU-2", "r2": "GPU-1"})
