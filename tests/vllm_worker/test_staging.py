"""Versions are opened in the background, and nothing waits for one that was given up."""

import json
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

import weightsync as ws
from weightsync.vllm_worker.transfer_engine import WeightSyncTransferEngine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(60)]


class Worker:
    """As much of vLLM's as an engine is asked about that loads nothing."""

    device = torch.device("cpu")
    _weight_update_active = False

    def __init__(self):
        model = nn.Linear(1, 1)
        self.model_runner = SimpleNamespace(get_model=lambda: model)

    def sleep(self, level=1):
        pass

    def wake_up(self, tags=None):
        pass


@pytest.fixture
def ask(run_dir):
    parallel = SimpleNamespace(
        data_parallel_index=0, data_parallel_rank=0, data_parallel_size=1, world_size=1, rank=0
    )
    config = SimpleNamespace(parallel_config=parallel, model_config=None)
    worker = Worker()
    engine = WeightSyncTransferEngine(None, config, worker.device, worker.model_runner.get_model())
    worker.weight_transfer_engine = engine
    scheme = ws.DoubleBufferScheme(str(run_dir))

    def ask(op, number=1, **more):
        version = [ask.epoch, number]
        request = {"op": op, "scheme": scheme.to_url(), "version": version, "timeout": 10, **more}
        return json.loads(engine.call(json.dumps(request), worker))

    with scheme.create_sender() as sender:
        sender.connect()
        report = sender.update_weights({"w": torch.ones(3)}, version=1)
        ask.epoch, ask.engine, ask.sender = report.version.epoch, engine, sender
        ask("init", first=0, total=1)
        yield ask
        engine.shutdown()


def staged(ask):
    """The answer once the staging is over."""
    while True:
        answer = ask("status")
        if not answer["staging"]:
            return answer


def test_a_version_is_staged_and_given_back(ask):
    assert ask("stage")["error"] is None
    answer = staged(ask)
    assert (answer["staged"], answer["error"]) == ([ask.epoch, 1], None)
    assert ask("release")["staged"] is None


def test_a_version_that_is_not_there_is_said_so_and_forgotten(ask):
    ask("stage", number=9, timeout=0.2)
    assert "VersionGoneError" in staged(ask)["error"]
    ask("stage")
    assert staged(ask)["error"] is None


def test_a_version_whose_sender_has_ended_is_not_waited_for(ask):
    ask("stage")
    assert staged(ask)["error"] is None
    ask("release")
    ask.sender.shutdown()
    ask("stage", timeout=600)
    assert "VersionGoneError" in staged(ask)["error"]


def test_two_schemes_are_read_until_one_is_left(ask, run_dir):
    """A driver may still go back; one that begins anew reads from one scheme only."""
    elsewhere = ws.DoubleBufferScheme(f"{run_dir}/elsewhere")
    here, there = ws.DoubleBufferScheme(run_dir).to_url(), elsewhere.to_url()
    with elsewhere.create_sender() as sender:
        sender.connect()
        version = list(sender.update_weights({"w": torch.ones(3)}, version=7).version)
        ask("init", scheme=there, first=0, total=1, beside=True)
        ask("stage", scheme=there, version=version)
        assert staged(ask)["staged"] == version
        ask("stage")
        assert staged(ask)["staged"] == [ask.epoch, 1]
        assert set(ask.engine._readers) == {here, there}
        ask("release")
        ask("leave", scheme=here)
        assert set(ask.engine._readers) == {there}
        ask("init", first=0, total=1)
        assert set(ask.engine._readers) == {here}
        ask("stage")
        assert staged(ask)["staged"] == [ask.epoch, 1]


def test_what_was_given_up_is_waited_for_by_nobody_and_kept_by_nobody(ask, monkeypatch):
    """A driver that is interrupted lets go at once: requests go on meanwhile."""
    go, opened, closed = threading.Event(), [], []
    open_one = ask.engine._open

    def slow(url, version, deadline):
        snapshot = open_one(url, version, deadline)
        opened.append(snapshot)
        close = snapshot.close
        monkeypatch.setattr(snapshot, "close", lambda: (closed.append(snapshot), close()))
        assert go.wait(30)
        return snapshot

    with monkeypatch.context() as patch:
        patch.setattr(ask.engine, "_open", slow)
        assert ask("stage")["staging"]
        assert ask("release") | {"staging": False} == ask("release")
        assert not closed
        assert ask("stage")["staging"]  # waits in its own thread for the one before
        go.set()
        answer = staged(ask)
    assert (answer["staged"], answer["error"]) == ([ask.epoch, 1], None)
    assert closed == opened[:1]
    assert len(opened) == 2
