"""vLLM's release, and whether its workers see the plug-in."""

from importlib import metadata

import pytest

from tools.compat.wheels import RELEASES
from weightsync.doctor import Subject, vllm
from weightsync.vllm_worker.releases import FIRST, LAST


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ("0.24.9", "problem"),
        ("0.25.0", "ok"),
        ("0.32.0+cpu", "ok"),
        ("0.33.1", "ok"),
        ("0.34.0rc1", "warning"),
        ("1.0", "warning"),
        ("unknown", "warning"),
        (None, "not applicable"),
    ],
)
def test_releases(monkeypatch, version, state):
    monkeypatch.setattr(vllm, "installed_version", lambda: version)
    assert vllm.release(Subject()).state == state


def test_the_releases_are_those_that_are_checked():
    """What `make compat` looks at."""
    looked = sorted(tuple(map(int, release.split(".")[:2])) for release in RELEASES)
    assert (looked[0], looked[-1]) == (FIRST, LAST)


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(vllm, "installed_version", lambda: "0.32.0")
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)


def test_a_fresh_process_sees_the_plug_in_where_it_is_installed(installed):
    found = metadata.entry_points(group="vllm.general_plugins", name="weightsync")
    finding = vllm.plugin(Subject())
    assert (finding.state == "ok") == bool(found), finding


@pytest.mark.parametrize(
    ("seen", "state", "words"),
    [
        ({"found": 0}, "problem", "no entry point"),
        ({"allowed": False}, "problem", "VLLM_PLUGINS"),
        ({"where": "/elsewhere/plugin.py"}, "problem", "/elsewhere/plugin.py"),
        ({"where": None}, "problem", "None"),
        ({}, "ok", "seen by a fresh process"),
    ],
)
def test_what_a_fresh_process_may_see(installed, monkeypatch, seen, state, words):
    whole = {"found": 1, "allowed": True, "where": _own_path(), **seen}
    monkeypatch.setattr(vllm, "ask", lambda *args, **how: whole)
    finding = vllm.plugin(Subject())
    assert finding.state == state
    assert words in finding.words


def test_a_way_to_start_workers_that_vllm_does_not_know(installed, monkeypatch):
    whole = {"found": 1, "allowed": True, "where": _own_path()}
    monkeypatch.setattr(vllm, "ask", lambda *args, **how: whole)
    for method, state in (("spawn", "ok"), ("fork", "ok"), ("forkserver", "problem")):
        monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", method)
        finding = vllm.plugin(Subject())
        assert (finding.state, method in finding.words) == (state, True)


def _own_path():
    from weightsync.vllm_worker import plugin

    return plugin.__file__


@pytest.mark.parametrize(
    ("plugins", "allowed"), [("weightsync", True), ("a,b", False), ("", False)]
)
def test_the_filter_of_plug_ins_is_that_of_vllm(installed, monkeypatch, plugins, allowed):
    monkeypatch.setenv("VLLM_PLUGINS", plugins)
    seen = vllm.ask(vllm._LOOK, seconds=10)
    assert seen["allowed"] is allowed
