"""Cores, limits, GPUs, and what else is installed."""

import importlib.util
import os
import resource
from importlib import metadata

import pytest
import torch

import weightsync as ws
from weightsync.doctor import Subject, gpus, machine, packages, store
from weightsync.errors import WeightSyncError

GPUS = {"torch": "2.13", "cuda": "13.0", "count": 2, "names": ["H200"] * 2, "peers": [[0, 1]]}
PROBE = {**GPUS, "nccl": "2.30", "page_lock": 0}


@pytest.mark.parametrize(
    ("seen", "quota", "state"), [(4, None, "ok"), (1, None, "warning"), (4, 1.0, "warning")]
)
def test_cores(monkeypatch, seen, quota, state):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(seen)))
    monkeypatch.setattr(machine, "_quota", lambda: quota)
    assert machine.cores(Subject()).state == state


def test_an_extension_that_was_not_built(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert machine.extension(Subject()).state == "warning"


@pytest.mark.parametrize(
    ("there", "limit", "state"),
    [
        (False, 8192, "not applicable"),
        (True, 8192, "warning"),
        (True, resource.RLIM_INFINITY, "ok"),
    ],
)
def test_page_locking(monkeypatch, there, limit, state):
    monkeypatch.setattr(machine, "has_gpus", lambda: there)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    assert machine.page_locking(Subject()).state == state


@pytest.mark.parametrize(
    ("found", "states"),
    [
        ({}, ["ok"] * 4),
        ({"nccl": None}, ["ok", "ok", "ok", "warning"]),
        ({"peers": []}, ["ok", "ok", "warning", "ok"]),
        ({"page_lock": 2}, ["ok", "warning", "ok", "ok"]),
        ({"count": 1, "names": ["H200"], "peers": []}, ["ok", "ok", "not applicable", "ok"]),
        ({"count": 0, "cuda": None}, ["warning"]),
    ],
)
def test_what_torch_says_of_gpus(monkeypatch, found, states):
    monkeypatch.setattr(gpus, "has_gpus", lambda: True)
    monkeypatch.setattr(gpus, "_probe", lambda: {**PROBE, **found})
    monkeypatch.setattr(gpus, "_nvlinks", lambda: 1)
    assert [finding.state for finding in gpus.gpus(Subject())] == states


def test_the_question_to_torch_is_one_that_it_answers():
    """Here it may see no GPU; tests/gpu asks where it does."""
    assert gpus._probe()["count"] == torch.cuda.device_count()


def test_gpus_that_torch_cannot_use(monkeypatch):
    def fail():
        raise WeightSyncError("it ended with status -11: it said nothing")

    monkeypatch.setattr(gpus, "has_gpus", lambda: True)
    monkeypatch.setattr(gpus, "_probe", fail)
    (finding,) = gpus.gpus(Subject())
    assert finding.state == "problem"
    assert "status -11" in finding.words


@pytest.mark.parametrize("url", ["nccl://127.0.0.1:29599", "cuda-ipc:///dev/shm/run42"])
def test_schemes_for_gpus_where_there_are_none(monkeypatch, url):
    monkeypatch.setattr(gpus, "has_gpus", lambda: False)
    found = gpus.gpus(Subject(scheme=ws.scheme_from_url(url)))
    assert [finding.state for finding in found] == ["not applicable", "problem"]


REQUIRED = ["torch>=2.4", 'ray>=2.40; extra == "ray"', 'verl (>=0.9); extra == "verl"']


@pytest.mark.parametrize(
    ("versions", "states"),
    [
        (
            {"torch": "2.13.0+cpu", "ray": "2.60.0"},
            {"torch": "ok", "ray": "ok", "verl": "not applicable"},
        ),
        ({"torch": "2.3.1", "verl": "0.8"}, {"torch": "problem", "verl": "problem"}),
        ({}, {"torch": "problem", "ray": "not applicable"}),
    ],
)
def test_releases_that_this_package_asks_for(monkeypatch, versions, states):
    def version(name):
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "requires", lambda name: REQUIRED)
    monkeypatch.setattr(metadata, "version", version)
    found = {finding.check: finding.state for finding in packages.packages(Subject())}
    assert {name: found[name] for name in states} == states


def test_a_package_that_is_not_installed_asks_for_nothing(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    (finding,) = packages.packages(Subject())
    assert finding.state == "not applicable"


def test_stores(tmp_path):
    scheme = ws.DiskScheme("memory://doctor/run", cache=str(tmp_path))
    listed, room = store.store(Subject(scheme=scheme, nbytes=1 << 60))
    assert (listed.state, room.state, room.check) == ("ok", "problem", "room for its cache")
    (finding,) = store.store(Subject(scheme=ws.DiskScheme("nothing-known://x/y")))
    assert finding.state == "problem"


@pytest.mark.parametrize(
    ("options", "nbytes", "state"),
    [
        ({"backend": "gloo"}, 1000, "ok"),
        ({"backend": "gloo"}, 1 << 60, "problem"),
        ({"memory": "host"}, 1 << 60, "problem"),
        ({}, 1 << 60, "warning"),  # the GPU may have room
        ({"memory": "gpu"}, 1 << 60, "not applicable"),
        ({}, None, "not applicable"),
    ],
)
def test_memory_for_what_a_broadcast_brings(options, nbytes, state):
    assert store.host_memory(Subject(scheme=ws.NCCLScheme(**options), nbytes=nbytes)).state == state
