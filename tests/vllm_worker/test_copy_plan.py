"""Copies between strided tensors become rows of bytes; which of them a rank reads."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from weightsync.tensors import Facts
from weightsync.vllm_worker.copy_plan import Conversion, CopyPlan, _merged
from weightsync.vllm_worker.runs import Geometry, Runs

pytestmark = pytest.mark.vllm

VIEWS = {
    "whole": lambda t: t,
    "rows": lambda t: t[1:3],
    "columns": lambda t: t[:, 2:5],
    "every other": lambda t: t[:, ::2],
    "transposed": lambda t: t.transpose(0, 1),
    "one": lambda t: t[1, 2, 3],
    "broadcast": lambda t: t[:1].expand(5, -1, -1),
    "permuted": lambda t: t.permute(2, 0, 1)[1:],
}


@pytest.mark.parametrize(
    ("into", "out_of"),
    [
        (a, b)
        for a, b in itertools.product(VIEWS, VIEWS)
        if a != "broadcast" and VIEWS[a](torch.empty(4, 6, 8)).dim() == 3
    ],
)
def test_a_copy_by_runs_is_the_copy(into, out_of):
    whole = torch.arange(4 * 6 * 8)
    view = VIEWS[into](torch.zeros(4, 6, 8, dtype=torch.int64))
    source = VIEWS[out_of](whole.view(4, 6, 8))
    sizes = [min(a, b) for a, b in zip(view.shape, source.shape, strict=False)] or []
    if source.dim() == 3:
        view = view[: sizes[0], : sizes[1], : sizes[2]]
        source = source[: sizes[0], : sizes[1], : sizes[2]]
    source = source.expand(view.shape)
    runs = Runs.of(Geometry.of(view), Geometry.of(source))
    made = torch.zeros(4 * 6 * 8, dtype=torch.int64)
    begins = [each.tolist() for each in runs.rows()]
    assert len(begins[0]) == runs.count
    for begin, other in zip(*begins, strict=True):
        made[begin : begin + runs.length] = whole[other : other + runs.length]
    view.copy_(source)
    assert torch.equal(made, view._base.view(-1) if view._base is not None else view.view(-1))


def test_runs_are_as_long_as_they_can_be():
    matrix = torch.zeros(64, 128)
    assert Runs.of(Geometry.of(matrix), Geometry.of(matrix)).length == 64 * 128
    both = Geometry.of(matrix.t())
    assert Runs.of(both, both).length == 64 * 128
    columns = Runs.of(Geometry.of(torch.zeros(64, 32)), Geometry.of(matrix[:, 32:64]))
    assert (columns.count, columns.length) == (64, 32)


def test_rows_merge_where_both_sides_touch():
    rows = [
        tuple(np.array(each) for each in row)
        for row in (
            ([0], [0], [1000], [10]),
            ([0], [20], [1020], [10]),
            ([0], [10], [1010], [10]),
            ([1], [30], [1030], [10]),  # another tensor
            ([1], [50], [1040], [10]),  # a gap in the source
            ([1], [60], [1060], [10]),  # a gap in the destination
        )
    ]
    assert [each.tolist() for each in _merged(rows)] == [
        [0, 1, 1, 1],
        [0, 30, 50, 60],
        [1000, 1030, 1040, 1060],
        [30, 10, 10, 10],
    ]


def plan(rows, conversions=(), sizes=(100, 100, 100)):
    columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    return CopyPlan(
        "",
        *columns,
        tuple(conversions),
        {},
        (),
        0,
        1.0,
        np.array(sizes),
        nn.Module(),
        (),
        (),
        Facts.of([]),
    )


def test_what_is_needed_is_sorted_and_merged():
    converted = Conversion("third", 2, Geometry(0, (1,), (1,)), torch.zeros(1))
    rows = [(1, 60, 0, 40), (0, 10, 100, 20), (0, 30, 500, 5), (0, 12, 300, 3), (2, 7, 700, 9)]
    assert [each.tolist() for each in plan(rows, [converted]).needed()] == [
        [0, 1, 2],
        [10, 60, 0],
        [25, 40, 100],
    ]
    # Neighbours in the manifest are not neighbours in memory.
    assert [each.tolist() for each in plan([(0, 90, 0, 10), (1, 0, 10, 5)]).needed()] == [
        [0, 1],
        [90, 0],
        [10, 5],
    ]
    assert [each.tolist() for each in plan([]).needed()] == [[], [], []]


def test_a_conversion_casts_what_it_copies():
    into = torch.zeros(4, 3, dtype=torch.bfloat16)
    matrix = torch.arange(12.0).view(3, 4)
    conversion = Conversion("a", 0, Geometry.of(matrix.t()), into[:, :])
    conversion.apply(matrix + 1)
    assert torch.equal(into, (matrix + 1).t().bfloat16())
