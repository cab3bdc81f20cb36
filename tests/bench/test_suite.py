"""The suite: what it finds, what becomes of ways that fail, and that nothing stays behind."""

import json
import os

import pytest

from tests.bench import broken
from weightsync.bench import turn
from weightsync.bench.measures import Report
from weightsync.bench.suite import Plan, run_suite
from weightsync.bench.turn import Length, Places
from weightsync.bench.ways import WAYS
from weightsync.bench.weights import uniform

SLOW = [name for name in WAYS if name.startswith(("Ray", "TorchRL", "fallback")) or "(d" in name]
"""Seconds to import, or differing in one parameter from another."""


@pytest.fixture
def places(run_dir, tmp_path):
    os.mkdir(run_dir, 0o700)
    return Places(shared=run_dir, disk=str(tmp_path))


def suite(places, *ways, receivers=1, timeout=30.0, rounds=1):
    cells = [(uniform(20, 1 << 20), receivers)]
    return run_suite(Plan(cells, ways, rounds, Length(1, True, timeout), places))


def nothing_is_left(places):
    return not os.listdir(places.shared) and not os.listdir(places.disk)


@pytest.mark.live
@pytest.mark.parametrize(
    "names",
    [
        ["plain copy", "double buffer", "torch.save (shm)", "TensorDict.memmap"],
        pytest.param([name for name in WAYS if name not in SLOW], marks=pytest.mark.slow),
    ],
    ids=["some", "all"],
)
def test_ways_move_whole_versions_and_leave_nothing(places, names):
    names = [name for name in names if WAYS[name].missing() is None]
    results = suite(places, *map(WAYS.get, names)).cells[0].results
    assert [(one.way, one.error) for one in results] == [(name, None) for name in names]
    for one in results:
        assert one.reads == (4 if one.bound else 10), one.way
        assert one.median("total") >= one.median("blocked") > 0, one.way
        assert one.median("processor") > 0, one.way
        if one.ours or one.bound:
            assert (one.torn, one.stale) == (0, 0), one.way
    extra = {one.way: one.extra for one in results}
    assert extra["plain copy"] >= 1 << 20, "the buffer in shared memory is not counted"
    assert extra["double buffer"] >= 2 << 20, "the two slots are not counted"
    assert nothing_is_left(places)


@pytest.mark.slow
@pytest.mark.live
@pytest.mark.parametrize("name", SLOW)
def test_the_other_ways_do_too(places, name):
    if WAYS[name].missing():
        pytest.skip(WAYS[name].missing())
    (one,) = suite(places, WAYS[name], receivers=2).cells[0].results
    assert one.error is None
    assert one.reads == 20
    assert nothing_is_left(places)


@pytest.mark.live
def test_a_byte_of_the_old_version_in_the_new_one_is_torn_and_a_whole_old_one_stale(places):
    torn, stale = suite(places, broken.Torn(), broken.Stale()).cells[0].results
    assert (torn.torn, torn.stale, torn.reads) == (10, 0, 10)
    assert (stale.torn, stale.stale, stale.reads) == (0, 10, 10)


@pytest.mark.live
def test_ways_that_hang_fail_or_die_are_named_and_the_others_go_on(places, monkeypatch):
    monkeypatch.setattr(turn, "_GRACE", 0.2)
    ways = broken.Hanging(), broken.Failing(), broken.Dying(), broken.Large(), WAYS["plain copy"]
    results = suite(places, *ways, timeout=1.5, rounds=2).cells[0].results
    hanging, failing, dying, large, copy = results
    assert hanging.error == "trainer, publish: hangs; ended after 2 s"
    assert failing.error == "trainer, open: ConnectionError: the other end said no"
    assert dying.error == "trainer, open: ended with 3: a library's last words"
    assert large.skipped
    assert "1e+06 GB of memory are needed" in large.error
    assert len(copy.turns) == 2
    assert nothing_is_left(places)


@pytest.mark.live
def test_a_report_is_the_same_after_its_way_through_json(places):
    report = suite(places, WAYS["plain copy"])
    document = json.loads(json.dumps(report.to_dict()))
    again = Report.from_dict(document)
    assert again.to_dict() == report.to_dict()
    assert set(document["units"]) >= set(
        document["cells"][0]["results"][0]["turns"][0]["moves"][0]
    ) - {"cold"}
    with pytest.raises(ValueError, match="its format is 'other'"):
        Report.from_dict({**document, "format": "other"})
    with pytest.raises(ValueError, match="no report of weightsync bench"):
        Report.from_dict({**document, "cells": [{}]})
