"""A receiver with several engines in another process: one of them dies or gets stuck.

H1, H3: the others have the new version, the sender is told by name, nobody waits without end.
"""

import os
import time
from types import SimpleNamespace

import pytest

import weightsync as ws
from tests.live.processes import WAIT, constants, end_receiver, eventually, fill, value_of
from weightsync.engines.module import ModuleEngine

SHAPE = {"nbytes": 4 << 20, "tensors": 4}


class Mortal(ModuleEngine):
    """Does as it is told at its next load."""

    orders = ""

    def apply(self, update, deadline):
        order, self.orders = self.orders, ""
        if order == "die":
            self.dead = True
        if order == "exit":
            os._exit(9)
        if order == "fail":
            next(iter(self.target.values())).fill_(77)
            raise RuntimeError("bad shard")
        if order == "hang":
            time.sleep(3600)
        self._require_alive()
        super().apply(update, deadline)

    dead = False

    def connect(self, url, deadline):
        self._require_alive()

    def _require_alive(self):
        if self.dead:
            raise ws.EngineDiedError("its process is gone")


def receive(state, scheme, id="r", count=3, apply_timeout=2.0, words=""):
    state.engines = {name: Mortal(constants(-1, **SHAPE)) for name in "abc"[:count]}
    if words:
        state.engines["b"].connect = lambda url, deadline: (_ for _ in ()).throw(
            RuntimeError(words)
        )
    state.receiver = scheme.create_receiver(
        ws.Replicas(state.engines), id=id, apply_timeout=apply_timeout
    )
    state.receiver.connect(WAIT)
    state.receiver.follow()


def order(state, name, what):
    state.engines[name].orders = what


def revive(state, name):
    state.engines[name].dead = False


def held(state):
    return {name: value_of(engine.target) for name, engine in state.engines.items()}


@pytest.fixture(params=["shm", pytest.param("nccl", marks=pytest.mark.slow)])
def scheme(request, run_dir):
    if request.param == "shm":
        return ws.DoubleBufferScheme(run_dir, slots=3)
    return ws.NCCLScheme(backend="gloo", bucket_mb=1, peer_timeout=2.0, buffers=3)


@pytest.fixture
def sender(scheme):
    weights = constants(0, **SHAPE)
    with scheme.create_sender(weights, timeout=WAIT) as made:
        made.connect()
        made.weights = weights
        yield made


def send(sender, number, **options):
    fill(sender.weights, number)
    return sender.update_weights(version=number, wait="applied", **options)


def refuse(sender, number, **options):
    began = time.monotonic()
    with pytest.raises(ws.ReceiverError) as caught:
        send(sender, number, **options)
    (failure,) = caught.value.failures
    engines = {e.engine: (e.state, e.version and e.version.number) for e in failure.engines}
    return SimpleNamespace(
        words=str(caught.value), engines=engines, seconds=time.monotonic() - began, failure=failure
    )


def test_engines_that_fail_die_come_back_and_get_stuck(peer, scheme, sender):
    other = peer()
    other.call(receive, scheme)
    report = send(sender, 1)
    assert {e.engine: e.state for e in report.receivers[0].engines} == dict.fromkeys(
        "abc", "applied"
    )

    other.call(order, "a", "fail")
    told = refuse(sender, 2)
    assert "engine 'a': RuntimeError: bad shard" in told.words
    assert told.engines["a"] == ("rolled back", 1)
    assert told.engines["b"] == told.engines["c"] == ("applied", 2)
    send(sender, 3)  # if it has not tried again by itself
    assert other.call(held) == dict.fromkeys("abc", 3)

    other.call(order, "b", "die")
    told = refuse(sender, 4)
    assert "engine 'b': EngineDiedError: its process is gone" in told.words
    assert told.engines == {"a": ("applied", 4), "b": ("dead", None), "c": ("applied", 4)}
    send(sender, 5)  # said once
    assert other.call(held) == {"a": 5, "b": 3, "c": 5}
    other.call(revive, "b")
    report = send(sender, 6)
    assert [e.state for e in report.receivers[0].engines] == ["applied"] * 3
    assert other.call(held) == dict.fromkeys("abc", 6)

    other.call(order, "c", "hang")
    told = refuse(sender, 7)
    assert told.seconds < 15
    assert "engine 'c': DeadlineError" in told.words
    assert told.engines["a"] == told.engines["b"] == ("applied", 7)
    assert told.engines["c"] == ("unusable", None)
    for number in (8, 9, 10):  # it is away, and keeps nobody from anything
        told = refuse(sender, number)
        assert told.seconds < 10
        assert told.engines["a"] == told.engines["b"] == ("applied", number)


def test_a_receiver_that_is_killed_between_pause_and_resume(peer, scheme, sender):
    """kill -9 while its engines load: dead at once; one in its place is served by the next."""
    victim, other = peer(), peer()
    victim.call(receive, scheme, "victim")
    other.call(receive, scheme, "other")
    send(sender, 1)
    victim.call(order, "b", "exit")
    fill(sender.weights, 2)
    with pytest.raises(ws.ReceiverError, match="'victim'") as caught:
        sender.update_weights(version=2, wait="applied")
    assert [(f.receiver, f.state) for f in caught.value.failures] == [("victim", "dead")]
    again = peer()
    again.call(receive, scheme, "victim")
    eventually(lambda: len([r for r in sender.receivers() if r.state != "dead"]) == 2)
    report = send(sender, 3)
    assert {r.receiver: r.state for r in report.receivers} == {
        "victim": "applied",
        "other": "applied",
    }
    assert again.call(held) == other.call(held) == dict.fromkeys("abc", 3)
    again.call(end_receiver)


def test_an_engine_that_cannot_be_set_up_is_told_with_its_name(peer, scheme, sender):
    """H3."""
    other = peer()
    other.start(receive, scheme, "r-17", words="no nccl")
    with pytest.raises(ws.ReceiverError, match=r"r-17.*engine 'b': RuntimeError: no nccl"):
        sender.connect(timeout=WAIT, receivers=1)
