"""Cases about updates that fail, on the fake engine: what it holds afterwards, and who is told.

Promise 10: after any failed update an engine holds a whole known version, or is marked unusable
and says so until the next full update.
"""

import contextlib
import copy
import json
import random
import threading
import time

import pytest
import torch
from torch import nn

import weightsync as ws
from tests.conftest import WAIT, assert_same
from tests.fakes import assert_holds, attached, fake, holds, weights
from weightsync.run.records import MAX_WORDS, report_from_json, report_to_json
from weightsync.testing.faults import Bomb


@pytest.mark.parametrize("step", ["check", "stage", "pause", "start", "load", "finish", "label"])
def test_c1_p10_a_failure_at_any_step_leaves_the_last_good_version(ends, step):
    engine = fake()
    sender, receiver = attached(ends, engine)
    sender.update_weights(weights(1), version=1)
    second = weights(2)
    sender.update_weights(second, version=2)
    engine.fail[step] = RuntimeError(f"{step} went wrong")
    with pytest.raises(ws.ReceiverError, match=f"{step} went wrong") as caught:
        sender.update_weights(weights(3), version=3)
    (failure,) = caught.value.failures
    assert failure.receiver == receiver.id
    assert failure.version.number == 2
    assert_holds(engine, second)
    assert engine.version_label.number == 2
    assert not engine.paused
    fourth = weights(4)
    assert sender.update_weights(fourth, version=4).receivers[0].state == "applied"
    assert_holds(engine, fourth)


def test_p10_a_failure_in_mid_load_is_rolled_back_bit_for_bit(ends):
    engine = fake()
    sender, receiver = attached(ends, engine)
    first = weights(1)
    sender.update_weights(first, version=1)

    def stumble(name):
        if name == "gate_proj":
            engine.during_load = lambda name: None
            raise RuntimeError("bad shard")

    engine.during_load = stumble
    with pytest.raises(ws.ReceiverError, match="bad shard"):
        sender.update_weights(weights(2), version=2)
    assert_holds(engine, first)
    assert receiver.verify_weights().ok


def test_p10_without_a_version_to_roll_back_to_the_engine_is_unusable_until_the_next(ends):
    engine = fake()
    sender, receiver = attached(ends, engine)
    engine.fail["finish"] = RuntimeError("out of memory")
    with pytest.raises(ws.ReceiverError, match="out of memory"):
        sender.update_weights(weights(1), version=1)
    assert receiver.status().state == "unusable"
    assert receiver.version is None
    with pytest.raises(ws.EngineUnusableError, match="out of memory"):
        receiver.require_ready()
    sender.update_weights(weights(2), version=2)
    receiver.require_ready()
    assert_holds(engine, weights(2))


def test_c4_a_copy_of_the_model_is_told_from_the_one_that_is_updated(ends):
    model = nn.Linear(3, 3)
    sender, receiver = attached(ends, model)
    used = copy.deepcopy(model)
    sent = {"weight": torch.ones(3, 3), "bias": torch.ones(3)}
    sender.update_weights(sent, version=1)
    assert receiver.is_bound_to(model)
    assert not receiver.is_bound_to(used)
    assert not torch.equal(used.weight, sent["weight"])
    receiver.rebind(used)
    assert receiver.version is None  # the copy holds nothing confirmed yet
    assert receiver.apply_weights().version.number == 1
    assert_same(used.weight.detach(), sent["weight"])
    sender.update_weights({name: 2 * tensor for name, tensor in sent.items()}, version=2)
    assert_same(used.weight.detach(), 2 * sent["weight"])
    assert_same(model.weight.detach(), sent["weight"])


def test_h3_an_engine_that_cannot_be_set_up_is_told_to_the_sender(ends):
    engine = fake()
    engine.fail["connect"] = RuntimeError("no nccl")
    sender = ends.sender()
    receiver = ends.receiver(engine, connect=False, id="r-17")
    with pytest.raises(RuntimeError, match="no nccl"):
        receiver.connect(timeout=5)
    with pytest.raises(ws.ReceiverError, match="no nccl") as caught:
        sender.connect(timeout=5, receivers=1)
    assert caught.value.failures[0].receiver == "r-17"


@pytest.mark.parametrize("slots", [2, 3])
def test_c1_the_same_number_can_be_tried_again_after_a_failure(ends, slots):
    engine = fake()
    scheme = ends.scheme(slots=slots)
    sender = ends.sender(scheme=scheme, timeout=5)
    receiver = ends.receiver(engine, scheme=scheme)
    sender.update_weights(weights(1), version=1)
    receiver.poll_and_apply()
    receiver.follow()
    sender.update_weights(weights(2), version=2, wait="applied")
    engine.fail["load"] = RuntimeError("bad shard")
    with pytest.raises(ws.ReceiverError, match="bad shard"):
        sender.update_weights(weights(3), version=3, wait="applied")
    report = sender.update_weights(weights(3), version=3, wait="applied")
    assert report.receivers[0].version.number == 3
    assert_holds(engine, weights(3))


def test_p10_an_engine_that_cannot_be_resumed_is_unusable(ends):
    engine = fake()
    sender, receiver = attached(ends, engine)
    sender.update_weights(weights(1), version=1)
    engine.fail["resume"] = [RuntimeError("stuck")] * 3
    with pytest.raises(ws.ReceiverError, match="stuck"):
        sender.update_weights(weights(2), version=2)
    assert (receiver.status().state, receiver.version) == ("unusable", None)
    sender.update_weights(weights(3), version=3)
    assert_holds(engine, weights(3))


# -------------------------------------------------------------------- more of each kind


@pytest.mark.parametrize("step", ["label", "flush", "finish"])
def test_p10_a_rollback_that_fails_at_any_step_is_said_and_recovered_from(ends, step):
    engine = fake()
    sender, receiver = attached(ends, engine)
    one = sender.update_weights(weights(1), version=1).version
    engine.fail[step] = [RuntimeError("first"), RuntimeError("second")]
    with pytest.raises(ws.ReceiverError, match=rf"first.*rolling back to {one} failed.*second"):
        sender.update_weights(weights(2), version=2)
    assert (receiver.state, receiver.version, engine.version_label) == ("unusable", None, None)
    assert not engine.paused
    with pytest.raises(ws.EngineUnusableError, match="second"):
        receiver.require_ready()
    for number in (3, 4, 5):  # and no slot is lost
        sender.update_weights(weights(number), version=number)
        assert_holds(engine, weights(number))
    assert receiver.status().error is None


def test_p10_an_engine_that_cannot_even_be_labelled_is_known_as_unusable_here(ends):
    engine = fake()
    sender, receiver = attached(ends, engine)
    sender.update_weights(weights(1), version=1)
    engine.fail["label"] = [ConnectionError("gone")] * 3
    with pytest.raises(ws.ReceiverError, match="gone"):
        sender.update_weights(weights(2), version=2)
    assert receiver.state == "unusable"
    with pytest.raises(ws.EngineUnusableError):
        receiver.guard().generate([1])


def test_p10_a_name_that_the_check_let_through_and_the_load_does_not_know(ends):
    engine = fake(strict=False)
    sender, receiver = attached(ends, engine)
    sender.update_weights(weights(1), version=1)

    def unknown(name):
        if name == "extra":
            raise KeyError("'extra' is no parameter")

    engine.during_load = unknown
    with pytest.raises(ws.ReceiverError, match="'extra' is no parameter"):
        sender.update_weights({**weights(2), "extra": torch.ones(1)}, version=2)
    assert_holds(engine, weights(1))
    assert receiver.state == "rolled back"


def test_p10_an_engine_that_was_left_paused_and_half_loaded_is_whole_after_the_next_update(ends):
    """Its receiver was killed between pause and resume; another one takes over."""
    engine = fake()
    engine.paused = True
    engine.part("q_proj").fill_(3.0)
    engine.version_label = ws.Version(1, 1)
    sender, receiver = attached(ends, engine)
    assert (receiver.state, receiver.version) == ("connected", None)
    with pytest.raises(ws.EngineUnusableError):
        receiver.guard().generate([1])
    sender.update_weights(weights(1), version=1)
    assert_holds(engine, weights(1))
    assert receiver.guard().generate([1])


def test_p10_an_update_that_is_refused_leaves_an_unusable_engine_unusable(ends):
    """A partial update, say: only a full one recovers."""
    engine = fake()
    sender, receiver = attached(ends, engine)
    engine.fail["load"] = RuntimeError("bad shard")
    with pytest.raises(ws.ReceiverError):
        sender.update_weights(weights(1), version=1)
    partial = {name: tensor for name, tensor in weights(2).items() if name != "k_proj"}
    with pytest.raises(ws.ReceiverError, match="k_proj"):
        sender.update_weights(partial, version=2)
    assert receiver.state == "unusable"
    with pytest.raises(ws.EngineUnusableError, match="k_proj"):
        receiver.require_ready()
    sender.update_weights(weights(3), version=3)
    receiver.require_ready()


@pytest.mark.parametrize("step", ["stage", "pause", "load", "flush", "resume"])
def test_p10_a_shutdown_in_the_middle_of_an_update_waits_until_the_engine_is_whole(ends, step):
    engine = fake()
    sender = ends.sender(scheme=ends.scheme(slots=3))
    receiver = ends.receiver(engine, scheme=ends.scheme(slots=3))
    receiver.follow()
    sender.update_weights(weights(1), version=1, wait="applied")
    engine.stuck[step] = go_on = threading.Event()
    engine.calls.clear()
    sender.update_weights(weights(2), version=2)
    while step not in engine.calls:
        time.sleep(0.001)
    ending = threading.Thread(target=receiver.shutdown)
    ending.start()
    ending.join(0.05)
    assert ending.is_alive()
    go_on.set()
    ending.join(WAIT)
    assert not ending.is_alive()
    assert_holds(engine, weights(2))
    assert engine.version_label.number == 2
    assert not engine.paused
    for number in (3, 4, 5):  # its leases are over
        sender.update_weights(weights(number), version=number, timeout=WAIT)


def test_c1_two_engines_that_fail_in_turn_get_all_of_every_later_version(ends):
    engines = {"a": fake(), "b": fake()}
    sender, receiver = attached(ends, ws.Replicas(engines), slots=3)
    sender.update_weights(weights(1), version=1)
    for number in range(2, 10):
        failing, other = ("a", "b") if number % 2 else ("b", "a")
        engines[failing].fail["finish"] = RuntimeError(f"out of memory at {number}")
        with pytest.raises(ws.ReceiverError, match=f"'{failing}'.*out of memory at {number}"):
            sender.update_weights(weights(number), version=number)
        assert_holds(engines[other], weights(number))
        label = engines[failing].version_label
        assert_holds(engines[failing], weights(label.number))
        assert receiver.version == min(engine.version_label for engine in engines.values())


def test_c1_what_a_waiting_sender_is_told_of_each_engine(ends):
    """wait="applied" with a receiver in the background: versions, states and words come over."""
    engines = {"good": fake(), "bad": fake(), "dying": fake()}
    scheme = ends.scheme(slots=3)
    sender = ends.sender(scheme=scheme)
    receiver = ends.receiver(ws.Replicas(engines), scheme=scheme)
    receiver.follow()
    report = sender.update_weights(weights(1), version=1, wait="applied")
    assert [e.state for e in report.receivers[0].engines] == ["applied"] * 3
    engines["bad"].fail["load"] = RuntimeError("bad shard")
    engines["dying"].fail["pause"] = ws.EngineDiedError("killed")
    with pytest.raises(ws.ReceiverError, match=r"'bad'.*bad shard.*'dying'.*killed") as caught:
        sender.update_weights(weights(2), version=2, wait="applied", timeout=WAIT)
    told = {e.engine: e for e in caught.value.failures[0].engines}
    assert told["good"].version.number == 2
    assert (told["bad"].version.number, told["bad"].state) == (1, "rolled back")
    assert (told["dying"].version, told["dying"].state) == (None, "dead")
    assert ws.SyncReport.from_dict(json.loads(json.dumps(caught.value.report.to_dict())))
    # The dead one was said. The other two are well: no error any more.
    report = sender.update_weights(weights(3), version=3, wait="applied", timeout=WAIT)
    assert {e.engine: e.state for e in report.receivers[0].engines} == {
        "good": "applied",
        "bad": "applied",
        "dying": "dead",
    }


def test_c1_one_that_dies_is_told_although_the_receiver_has_the_version(ends):
    engines = {"a": fake(), "b": fake()}
    scheme = ends.scheme(slots=3)
    sender = ends.sender(scheme=scheme)
    ends.receiver(ws.Replicas(engines), scheme=scheme).follow()
    sender.update_weights(weights(1), version=1, wait="applied")
    engines["b"].fail["load"] = ws.EngineDiedError("killed")
    with pytest.raises(ws.ReceiverError, match="'b': EngineDiedError: killed") as caught:
        sender.update_weights(weights(2), version=2, wait="applied", timeout=WAIT)
    assert caught.value.failures[0].version.number == 2
    sender.update_weights(weights(3), version=3, wait="applied", timeout=WAIT)
    for number in range(4, 8):  # nor does the sender take a version for refused because of it
        sender.update_weights(weights(number), version=number, timeout=WAIT)


def test_c4_the_guard_and_the_receiver_tell_whom_the_updates_reach(ends):
    used, bound = nn.Linear(2, 2), nn.Linear(2, 2)
    sender, receiver = attached(ends, bound)
    sent = {"weight": torch.ones(2, 2), "bias": torch.zeros(2)}
    sender.update_weights(sent, version=1)
    assert not receiver.is_bound_to(used)
    assert receiver.guard()(torch.ones(2)).tolist() == [2, 2]
    receiver.rebind(used)
    assert receiver.is_bound_to(used)
    with pytest.raises(ws.EngineUnusableError):
        receiver.guard()(torch.ones(2))


def test_c4_among_several_each_object_is_known(ends):
    models = {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}
    _, receiver = attached(ends, ws.Replicas(models))
    assert receiver.is_bound_to(models["a"])
    assert receiver.is_bound_to(models["b"])
    assert not receiver.is_bound_to(copy.deepcopy(models["b"]))


def test_h3_a_library_that_is_missing_in_one_engine_is_told_by_name(ends):
    engines = {"a": fake(), "b": fake()}
    sender, _ = attached(ends, ws.Replicas(engines), id="r-17")
    engines["b"].fail["start"] = ImportError("libnccl.so.2: cannot open shared object file")
    with pytest.raises(ws.ReceiverError, match=r"r-17.*'b': ImportError: libnccl.so.2"):
        sender.update_weights(weights(1), version=1)


# -------------------------------------------------------------------- what is received


def record(**engine):
    report = ws.ReceiverReport(
        "r", "applied", ws.Version(1, 2), engines=(ws.EngineReport("a", "dead"),)
    )
    fields = json.loads(report_to_json(report))
    fields["engines"][0].update(engine)
    return fields


def test_a_record_with_a_dead_engine_is_read_as_it_was_written():
    read = report_from_json(json.dumps(record()).encode(), "x")
    assert read.engines[0].state == "dead"
    assert read.version == ws.Version(1, 2)


@pytest.mark.parametrize(
    "engine",
    [
        {"name": 5},
        {"name": None},
        {"state": "fine"},
        {"state": ["dead"]},
        {"version": [1]},
        {"version": [1, -2]},
        {"attempted": [True, 2]},
        {"error": {"a": 1}},
        {"apply": "soon"},
        {"pause": None},
    ],
)
def test_x1_a_record_with_a_malformed_engine_is_refused(engine):
    with pytest.raises(ws.ProtocolError):
        report_from_json(json.dumps(record(**engine)).encode(), "x")


@pytest.mark.parametrize("engines", [5, "ab", {"a": 1}, [5], [[]], None, [{}]])
def test_x1_a_record_whose_engines_are_none_is_refused(engines):
    fields = {**record(), "engines": engines}
    with pytest.raises(ws.ProtocolError):
        report_from_json(json.dumps(fields).encode(), "x")


def test_x1_a_pickle_in_the_place_of_a_record_is_not_loaded(ends, tmp_path):
    engines = {"a": fake(), "b": fake()}
    sender, _ = attached(ends, ws.Replicas(engines), id="r-17")
    sender.update_weights(weights(1), version=1)
    bomb = Bomb(tmp_path / "marker")
    with open(f"{ends.path}/receivers/r-17.json", "wb") as file:
        file.write(bytes(bomb))
    assert [report.state for report in sender.receivers()] == ["failed"]
    assert not bomb.exploded


def test_x1_the_words_of_many_engines_are_a_record_that_can_be_sent(ends):
    """Errors quote peers, in whatever script and length."""
    engines = {f"engine {n}": fake() for n in range(40)}
    sender, receiver = attached(ends, ws.Replicas(engines))
    for engine in engines.values():
        engine.fail["load"] = RuntimeError("é\\" * 4000)
    with pytest.raises(ws.ReceiverError):
        sender.update_weights(weights(1), version=1)
    data = report_to_json(receiver.status())
    assert len(json.dumps({"report": data.decode()})) < 1 << 16
    read = report_from_json(data, "x")
    assert sum(len(e.error) for e in read.engines) <= MAX_WORDS
    assert {e.state for e in read.engines} == {"unusable"}


# -------------------------------------------------------------------- any order


STEPS = ["check", "stage", "pause", "start", "load", "finish", "flush", "label", "resume"]
KINDS = [RuntimeError, ws.EngineError, ws.DeadlineError, OSError, SystemExit, KeyboardInterrupt]


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.slow] * (seed >= 8)) for seed in range(24)]
)
def test_p10_whatever_fails_in_whatever_order_each_engine_is_whole_or_refused(
    ends, monkeypatch, seed
):
    monkeypatch.setattr("weightsync.attempt._AGAIN", (0.0, 0.0))
    chance = random.Random(seed)
    count = chance.choice([1, 2, 3])
    engines = {name: fake(relaid=chance.choice([(), ("qkv", "embed")])) for name in "abc"[:count]}
    slots = chance.choice([2, 3])
    scheme = ends.scheme(slots=slots)
    sender = ends.sender(scheme=scheme)
    receiver = ends.receiver(ws.Replicas(engines), scheme=scheme)
    drives = chance.random() < 0.5
    if drives:
        sender.attach(receiver)
    for number in range(1, 31):
        for engine in engines.values():
            disturb(engine, chance)
        with contextlib.suppress(
            ws.WeightSyncError, RuntimeError, OSError, SystemExit, KeyboardInterrupt
        ):
            sender.update_weights(weights(number), version=number, timeout=2)
        for _ in range(chance.choice([0, 1, 2]) if drives else 1):
            with contextlib.suppress(Exception, SystemExit, KeyboardInterrupt):
                receiver.poll_and_apply()
        require_whole_or_refused(receiver, engines)
    for engine in engines.values():
        engine.fail.clear()
        if engine.dead:
            engine.restart()
    sender.update_weights(weights(100), version=100, timeout=WAIT)
    receiver.apply_weights()
    for engine in engines.values():
        assert_holds(engine, weights(100))
    assert receiver.state == "applied"
    assert receiver.status().error is None


def disturb(engine, chance):
    if engine.dead and chance.random() < 0.5:
        engine.restart()
    if chance.random() < 0.1:
        engine.sleep()
        engine.wake()
    engine.unconfirmed = chance.choice([0, 0, 1])
    for _ in range(chance.choice([0, 0, 1, 1, 2])):
        step = chance.choice(STEPS)
        kind = chance.choice([RuntimeError, ws.EngineError] if step == "label" else KINDS)
        kind = ws.EngineDiedError if chance.random() < 0.1 else kind
        engine.fail[step] = [kind("injected") for _ in range(chance.choice([1, 1, 2]))]


def require_whole_or_refused(receiver, engines):
    """The oracle: what the receiver and the engine say of it is what it holds."""
    for told in receiver.status().engines:
        engine = engines[told.engine]
        try:
            receiver.require_ready(told.engine)
        except ws.EngineUnusableError:
            with pytest.raises(ws.EngineUnusableError):
                receiver.guard(told.engine).generate([1])
            lost = engine.dead or engine.lost_weights()
            assert told.version is None or lost
            assert engine.version_label is None or lost
        else:
            assert holds(engine, weights(told.version.number)), f"{told} holds something else"
            assert engine.version_label == told.version
            assert not engine.paused
