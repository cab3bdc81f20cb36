"""A receiver moves from one run to another while its engine serves, whole or not at all."""

import itertools
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import weightsync as ws
from tests.conftest import WAIT, assert_all_same
from weightsync.engines.module import ModuleEngine
from weightsync.testing import FakeEngine
from weightsync.testing.processes import eventually

SHAPES = {"a": (3,), "b": (2, 2)}


def weights(value):
    return {name: torch.full(shape, float(value)) for name, shape in SHAPES.items()}


class Failing(ModuleEngine):
    """Fails half-way through the updates that bring a certain value."""

    def __init__(self, target, value):
        super().__init__(target)
        self.value = value

    def apply(self, update, deadline):
        super().apply(update, deadline)
        if (update.snapshot.tensor("a") == self.value).all():
            raise RuntimeError("no such kernel")


class Runs:
    """Senders of runs of their own, and a receiver that goes from one to the other."""

    def __init__(self, path):
        os.mkdir(path, 0o700)
        self.path = path
        self._made = []

    def scheme(self, kind):
        where = f"{self.path}/{len(self._made)}-{kind}"
        return {
            "shm": lambda: ws.DoubleBufferScheme(where),
            "disk": lambda: ws.DiskScheme(where, durable=False),
            "nccl": lambda: ws.NCCLScheme(backend="gloo"),
            "fallback": lambda: ws.FallbackScheme(
                [ws.DoubleBufferScheme(where), ws.DiskScheme(f"{where}-2", durable=False)]
            ),
        }[kind]()

    def sender(self, kind="shm", value=None, version=1, scheme=None):
        """A connected sender; with a value it has published it."""
        sender = (scheme or self.scheme(kind)).create_sender(weights(0), timeout=WAIT)
        self._made.append(sender)
        sender.connect(timeout=WAIT)
        if value is not None:
            sender.update_weights(weights(value), version=version)
        return sender

    def receiver(self, sender, engine, **options):
        receiver = sender.scheme.create_receiver(engine, **options)
        self._made.insert(0, receiver)
        receiver.connect(timeout=WAIT)
        return receiver

    def shutdown(self):
        for made in self._made:
            made.shutdown()


@pytest.fixture
def runs(run_dir):
    made = Runs(run_dir)
    yield made
    made.shutdown()


def publish_while(receiver, scheme, sender, value, version):
    """Switch, and publish meanwhile: some schemes hand a version to those who are there only."""
    with ThreadPoolExecutor(1) as pool:
        switching = pool.submit(receiver.switch, scheme, WAIT)
        eventually(lambda: sender.receivers() or None, WAIT)
        sender.update_weights(weights(value), version=version)
        return switching.result(WAIT)


@pytest.mark.parametrize(
    ("one", "other"), list(itertools.product(["shm", "disk", "nccl", "fallback"], repeat=2))
)
def test_from_every_scheme_to_every_other(runs, one, other):
    """The new run's versions are older by the clock and have lower numbers: newer is within one."""
    new = runs.sender(other)
    old = runs.sender(one)
    held = weights(0)
    receiver = runs.receiver(old, held, id="engine")
    old.update_weights(weights(1), version=100)
    receiver.poll_and_apply(WAIT)
    report = publish_while(receiver, new.scheme, new, 2, version=5)
    assert_all_same(held, weights(2))
    assert (report.version.number, report.scheme) == (5, new.scheme.url_scheme)
    assert receiver.version == report.version < old.version
    assert receiver.scheme == new.scheme
    assert receiver.verify_weights().ok
    assert receiver.poll_and_apply() is None
    eventually(lambda: not old.receivers() or None, WAIT)
    receiver.follow()
    answers = new.update_weights(weights(3), version=6, wait="applied").receivers
    assert [(r.receiver, r.state) for r in answers] == [("engine", "applied")]
    assert_all_same(held, weights(3))


def test_while_it_follows(runs):
    """Updates of the former run go on until the other has a version, and not afterwards."""
    old, new = runs.sender(value=1), runs.sender()
    held = weights(0)
    receiver = runs.receiver(old, held)
    seen, errors = [], []
    receiver.follow(seen.append, errors.append)
    with ThreadPoolExecutor(1) as pool:
        switching = pool.submit(receiver.switch, new.scheme, WAIT)
        eventually(lambda: new.receivers() or None, WAIT)
        old.update_weights(weights(2), version=2, wait="applied")
        assert_all_same(held, weights(2))
        new.update_weights(weights(3), version=1, wait="applied")
        assert switching.result(WAIT).version == new.version
    old.update_weights(weights(4), version=3)
    new.update_weights(weights(5), version=2, wait="applied")
    assert_all_same(held, weights(5))
    eventually(lambda: seen[-1].version == new.version or None, WAIT)  # told after the sender
    assert errors == []


def test_the_former_sender_waits_for_it_no_more(runs):
    """Neither later, nor with what it is waiting for."""
    old, new = runs.sender(value=1), runs.sender(value=2)
    leaving, staying = (runs.receiver(old, weights(0), id=id) for id in ("leaving", "staying"))
    staying.follow()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(old.update_weights, weights(3), version=2, wait="applied")
        eventually(lambda: staying.version == (old.version.epoch, 2) or None, WAIT)
        assert not waiting.done()
        leaving.switch(new.scheme)
        assert [r.receiver for r in waiting.result(WAIT).receivers] == ["staying"]
    answers = old.update_weights(weights(4), version=3, wait="applied").receivers
    assert [r.receiver for r in answers] == ["staying"]


def test_a_version_that_was_just_seen_in_the_former_run_is_left_there(runs, caplog):
    new, old = runs.sender(value=2), runs.sender(value=1)
    held = weights(0)
    receiver = runs.receiver(old, held)
    wait = receiver._subscriber.wait

    def seen_and_left(after, deadline):
        version = wait(after, deadline)
        receiver.switch(new.scheme)
        return version

    receiver._subscriber.wait = seen_and_left
    assert receiver.poll_and_apply() is None
    assert receiver.version == new.version
    assert_all_same(held, weights(2))
    assert caplog.records == []


def test_an_attached_receiver_is_driven_no_more(runs):
    old, new = runs.sender(), runs.sender(value=2)
    held = weights(0)
    receiver = runs.receiver(old, held)
    old.attach(receiver)
    old.update_weights(weights(1), version=1)
    receiver.switch(new.scheme)
    assert old.update_weights(weights(3), version=2).receivers == ()
    assert_all_same(held, weights(2))
    new.attach(receiver)
    new.update_weights(weights(4), version=2)
    assert_all_same(held, weights(4))


OTHERS = {
    "shape": ({**weights(9), "a": torch.ones(4)}, r"1 tensors differ in shape \('a'.*\[4\].*\[3\]"),
    "missing": ({"a": torch.ones(3)}, r"1 tensors are not there \('b'\)"),
    "unexpected": ({**weights(9), "c": torch.ones(1)}, r"1 tensors are not here \('c'\)"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_another_architecture_is_refused_untouched(runs, kind):
    other, words = OTHERS[kind]
    old, new = runs.sender(value=1), runs.sender()
    engine = FakeEngine(SHAPES, strict=False)  # it would take some of them
    receiver = runs.receiver(old, engine, id="engine")
    receiver.poll_and_apply(WAIT)
    before = receiver.status()
    new.update_weights(other, version=7)
    calls = len(engine.calls)
    with pytest.raises(ws.MismatchError, match=words) as refused:
        receiver.switch(new.scheme)
    assert new.scheme.to_url() in str(refused.value)
    assert set(engine.calls[calls:]) <= {"connect"}
    assert receiver.status() == before
    assert engine.version_label == old.version
    assert receiver.verify_weights().ok
    receiver.follow()
    old.update_weights(weights(2), version=2, wait="applied")
    assert_all_same(engine.parameters, weights(2))


@pytest.mark.parametrize("kind", ["shm", "nccl"])
def test_the_other_sender_hears_why_it_was_refused(runs, kind):
    old, new = runs.sender(value=1), runs.sender(kind)
    receiver = runs.receiver(old, weights(0), id="engine")
    receiver.poll_and_apply(WAIT)
    words = r"engine.*stays in its former run.*shape \('a'"
    with ThreadPoolExecutor(1) as pool:
        refused = pool.submit(receiver.switch, new.scheme, WAIT)
        eventually(lambda: new.receivers() or None, WAIT)
        with pytest.raises(ws.ReceiverError, match=words):
            new.update_weights({**weights(0), "a": torch.ones(4)}, version=1, wait="applied")
        with pytest.raises(ws.MismatchError):
            refused.result(WAIT)


def test_a_dtype_is_the_engines_business(runs):
    old, new = runs.sender(value=1), runs.sender()
    new.update_weights({n: t.double() for n, t in weights(2).items()}, version=1)
    strict = runs.receiver(old, weights(0))
    strict.poll_and_apply(WAIT)
    with pytest.raises(ws.MismatchError, match="dtype"):
        strict.switch(new.scheme)
    held = weights(0)
    casting = runs.receiver(old, held, cast=True)
    casting.poll_and_apply(WAIT)
    casting.switch(new.scheme)
    assert_all_same(held, weights(2))


class OneRun(ModuleEngine):
    """Knows where its updates come from, and of one place only."""

    def connect(self, url, deadline):
        self.url = url

    def apply(self, update, deadline):
        assert update.url == self.url
        super().apply(update, deadline)


def test_an_engine_of_one_run_at_a_time(runs):
    old, new, other = runs.sender(value=1), runs.sender(value=2), runs.sender()
    other.update_weights({"a": torch.ones(4)}, version=1)
    held = weights(0)
    receiver = runs.receiver(old, OneRun(held))
    receiver.poll_and_apply(WAIT)
    with pytest.raises(ws.MismatchError):
        receiver.switch(other.scheme)
    old.update_weights(weights(3), version=2)
    receiver.poll_and_apply(WAIT)
    assert_all_same(held, weights(3))
    receiver.switch(new.scheme)
    assert_all_same(held, weights(2))


def test_a_request_in_flight_goes_on(runs):
    """Kept, as in any update; until then it is answered by the former run's version."""
    old, new = runs.sender(value=1), runs.sender(value=2)
    engine = FakeEngine(SHAPES)
    receiver = runs.receiver(old, engine)
    receiver.poll_and_apply(WAIT)
    request = engine.begin([1, 2])
    engine.advance(3)
    receiver.switch(new.scheme)
    engine.advance(2)
    assert request.spans() == [(old.version, 3), (new.version, 2)]


def test_a_failure_half_way_leaves_it_in_the_former_run(runs):
    old, new = runs.sender(value=1), runs.sender(value=2)
    held = weights(0)
    receiver = runs.receiver(old, Failing(held, value=2))
    receiver.poll_and_apply(WAIT)
    with pytest.raises(RuntimeError, match="no such kernel"):
        receiver.switch(new.scheme)
    assert_all_same(held, weights(1))
    assert (receiver.version, receiver.state, receiver.ready) == (old.version, "applied", True)
    receiver.follow()
    old.update_weights(weights(3), version=2, wait="applied")
    assert_all_same(held, weights(3))
    new.update_weights(weights(4), version=2)  # it is known there no more
    receiver.switch(new.scheme)
    assert_all_same(held, weights(4))


def test_several_engines_move_together(runs):
    old, new = runs.sender(value=1), runs.sender(value=2)
    one, other = weights(0), weights(0)
    receiver = runs.receiver(old, ws.Replicas({"one": one, "other": other}))
    receiver.poll_and_apply(WAIT)
    report = receiver.switch(new.scheme)
    assert [e.version for e in report.receivers[0].engines] == [new.version] * 2
    assert_all_same(one, weights(2))
    assert_all_same(other, weights(2))


def test_of_several_engines_none_moves_alone(runs):
    old, new = runs.sender(value=1), runs.sender(value=2)
    one, other = weights(0), weights(0)
    receiver = runs.receiver(old, ws.Replicas({"one": one, "other": Failing(other, value=2)}))
    receiver.poll_and_apply(WAIT)
    with pytest.raises(ws.EngineError, match=r"'other'.*no such kernel"):
        receiver.switch(new.scheme)
    assert_all_same(one, weights(1))
    assert_all_same(other, weights(1))
    assert [e.version for e in receiver.status().engines] == [old.version] * 2
    assert receiver.verify_weights().ok


def test_an_engine_that_does_not_come_back_is_loaded_anew_when_it_does(runs):
    """What it holds then is of a run that nobody follows."""
    old, new = runs.sender(value=1), runs.sender(value=2)
    one, other = FakeEngine(SHAPES), FakeEngine(SHAPES)
    replicas = ws.Replicas({"one": one, "other": other})
    receiver = runs.receiver(old, replicas, apply_timeout=0.5)
    receiver.poll_and_apply(WAIT)
    other.stuck["load"] = stuck = threading.Event()
    with pytest.raises(ws.EngineError, match=r"'other'.*did not come back"):
        receiver.switch(new.scheme)
    assert receiver.status().engines[0].version == old.version
    assert_all_same(one.parameters, weights(1))
    assert not receiver.ready
    del other.stuck["load"]
    stuck.set()
    eventually(lambda: other.version_label == new.version or None, WAIT)
    assert not receiver.ready
    assert receiver.poll_and_apply(WAIT).version == old.version
    assert receiver.ready
    assert_all_same(other.parameters, weights(1))


def test_a_dead_engine_keeps_the_others_from_nothing(runs):
    old, new = runs.sender(value=1), runs.sender(value=2)
    alive, dead = FakeEngine(SHAPES), FakeEngine(SHAPES)
    receiver = runs.receiver(old, ws.Replicas({"alive": alive, "dead": dead}))
    receiver.poll_and_apply(WAIT)
    dead.dead = True
    old.update_weights(weights(3), version=2)
    with pytest.raises(ws.EngineError, match="'dead'"):
        receiver.poll_and_apply(WAIT)
    report = receiver.switch(new.scheme)
    assert [(e.engine, e.state) for e in report.receivers[0].engines] == [
        ("alive", "applied"),
        ("dead", "dead"),
    ]
    dead.restart()
    new.update_weights(weights(4), version=2)
    receiver.poll_and_apply(WAIT)
    assert_all_same(dead.parameters, weights(4))


def test_nobody_is_there(runs):
    """The engine goes on with what it has; the error says where nothing was found."""
    old = runs.sender(value=1)
    held = weights(0)
    receiver = runs.receiver(old, held)
    receiver.poll_and_apply(WAIT)
    nowhere = runs.scheme("shm")
    with pytest.raises(ws.DeadlineError, match=nowhere.path):
        receiver.switch(nowhere, timeout=0.1)
    silent = runs.sender()
    with pytest.raises(ws.DeadlineError, match="no version to switch to"):
        receiver.switch(silent.scheme, timeout=0.1)
    assert silent.receivers() == []
    receiver.follow()
    old.update_weights(weights(2), version=2, wait="applied")
    assert_all_same(held, weights(2))


def test_a_shutdown_ends_the_wait(runs):
    old, silent = runs.sender(value=1), runs.sender()
    receiver = runs.receiver(old, weights(0))
    with ThreadPoolExecutor(1) as pool:
        switching = pool.submit(receiver.switch, silent.scheme, 60.0)
        eventually(lambda: silent.receivers() or None, WAIT)
        began = time.monotonic()
        receiver.shutdown()
        with pytest.raises(ws.WeightSyncError):
            switching.result(WAIT)
    assert time.monotonic() - began < WAIT
    assert silent.receivers() == []


def test_what_it_follows_already(runs):
    old = runs.sender(value=1)
    receiver = runs.receiver(old, weights(0))
    with pytest.raises(ws.WeightSyncError, match="already"):
        receiver.switch(old.scheme)
    unconnected = old.scheme.create_receiver(weights(0))
    with pytest.raises(ws.WeightSyncError, match=r"connect\(\)"):
        unconnected.switch(runs.scheme("shm"))


def test_a_run_whose_sender_has_ended_is_taken_over_first(runs):
    """A directory of versions is served once a sender holds it, which need not publish."""
    ended = runs.sender("disk", value=7, version=3)
    version = ended.version
    ended.shutdown()
    old = runs.sender(value=1)
    held = weights(0)
    receiver = runs.receiver(old, held)
    receiver.poll_and_apply(WAIT)
    runs.sender(scheme=ended.scheme)
    assert receiver.switch(ended.scheme).version == version
    assert_all_same(held, weights(7))


def test_from_an_event_loop(runs):
    import asyncio

    old, new = runs.sender(value=1), runs.sender(value=2)
    held = weights(0)
    receiver = runs.receiver(old, held)
    assert asyncio.run(receiver.switch_async(new.scheme)).version == new.version
    assert_all_same(held, weights(2))


def test_the_loser_of_two_switches_leaves_the_engine_where_the_other_brought_it(runs):
    old, chosen, late = runs.sender(value=1), runs.sender(value=2), runs.sender()
    held = weights(0)
    receiver = runs.receiver(old, OneRun(held))
    receiver.poll_and_apply(WAIT)
    with ThreadPoolExecutor(1) as pool:
        losing = pool.submit(receiver.switch, late.scheme, WAIT)
        eventually(lambda: late.receivers() or None, WAIT)
        receiver.switch(chosen.scheme, WAIT)
        late.update_weights(weights(9), version=1)
        with pytest.raises(ws.WeightSyncError, match="rebound, or switched, meanwhile"):
            losing.result(WAIT)
    chosen.update_weights(weights(3), version=2)
    receiver.poll_and_apply(WAIT)
    assert_all_same(held, weights(3))


def test_an_attached_receiver_that_is_just_switching_answers_for_no_other_run(runs, monkeypatch):
    old, new = runs.sender(value=1), runs.sender(value=5)
    held, inside, asked = weights(0), threading.Event(), threading.Event()
    receiver = runs.receiver(old, ModuleEngine(held))
    old.attach(receiver)
    old.update_weights(weights(2), version=2)
    stage, apply = receiver.engine.stage, receiver.apply_from

    def staged(update, deadline):
        inside.set()
        assert asked.wait(WAIT)
        stage(update, deadline)

    def applied(*arguments):
        asked.set()
        return apply(*arguments)

    monkeypatch.setattr(receiver.engine, "stage", staged)
    monkeypatch.setattr(receiver, "apply_from", applied)
    with ThreadPoolExecutor(1) as pool:
        switching = pool.submit(receiver.switch, new.scheme, WAIT)
        assert inside.wait(WAIT)
        report = old.update_weights(weights(3), version=3)
        switching.result(WAIT)
    assert report.receivers == ()
    assert_all_same(held, weights(5))


def test_an_engine_that_was_behind_is_known_to_hold_what_it_was_brought_back_to(runs):
    old, new = runs.sender(value=1), runs.sender(value=50)
    one, other = Failing(weights(0), value=50), Failing(weights(0), value=2)
    receiver = runs.receiver(old, ws.Replicas({"one": one, "other": other}))
    receiver.poll_and_apply(WAIT)
    old.update_weights(weights(2), version=2)
    with pytest.raises(ws.EngineError, match="no such kernel"):
        receiver.poll_and_apply(WAIT)  # the other one is brought back to version 1
    other.value = 50
    with pytest.raises(ws.EngineError, match="no such kernel"):
        receiver.switch(new.scheme, WAIT)
    held = {name: engine.target for name, engine in receiver.engines.items()}
    known = {report.engine: report.version.number for report in receiver.status().engines}
    assert known == {name: int(target["a"][0]) for name, target in held.items()}
