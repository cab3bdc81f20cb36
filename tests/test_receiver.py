"""The inference end: order of calls, rollback, readiness, other ways to be driven."""

import threading

import pytest
import torch
from torch import nn

import weightsync as ws
from tests.conftest import WAIT, assert_all_same
from weightsync.engine import Engine


def weights(value):
    return {"a": torch.full((3,), float(value)), "b": torch.full((2, 2), value)}


class Recording(Engine):
    """A fake engine: a mapping, a log of the calls, and failures to order."""

    def __init__(self, fails=()):
        self.tensors = weights(0)
        self.calls = []
        self.fails = set(fails)
        self.lost = False
        self.invalid = ()

    def call(self, name):
        self.calls.append(name)
        if name in self.fails:
            raise RuntimeError(f"{name} went wrong")

    target = property(lambda self: self.tensors)

    def connect(self, url, deadline):
        self.call("connect")

    def check(self, manifest):
        self.call("check")
        return super().check(manifest)

    def stage(self, update, deadline):
        self.call("stage")

    def pause(self, deadline):
        self.call("pause")

    def apply(self, update, deadline):
        self.calls.append(f"apply {update.version.number}")
        for count, (name, tensor) in enumerate(update.snapshot):
            self.tensors[name].copy_(tensor)
            if count == 0 and f"apply {update.version.number}" in self.fails:
                raise RuntimeError("apply went wrong")
        self.lost = False

    def unrestored(self):
        return self.invalid

    def flush(self, deadline):
        self.call("flush")

    def label(self, version):
        self.call(f"label {version.number if version else None}")

    def resume(self):
        self.call("resume")

    def lost_weights(self):
        return self.lost

    def close(self):
        self.call("close")


ONE_UPDATE = ["check", "stage", "pause", "apply {}", "flush", "label {}", "resume"]


def steps(number):
    return [step.format(number) for step in ONE_UPDATE]


class TestOrderOfCalls:
    def test_one_update(self, ends):
        """K1, F1: flushed after the load, labelled then, resumed last."""
        engine = Recording()
        sender, receiver = ends.pair(weights(1), engine)
        sender.update_weights(version=1)
        report = receiver.poll_and_apply()
        assert engine.calls == ["connect", *steps(1)]
        assert_all_same(engine.tensors, weights(1))
        assert report.version == receiver.version
        assert receiver.poll_and_apply() is None
        assert engine.calls == ["connect", *steps(1)]
        receiver.shutdown()
        receiver.shutdown()
        assert engine.calls[-1] == "close"
        assert engine.calls.count("close") == 1

    def test_before_connect(self, ends):
        receiver = ends.receiver(weights(0), connect=False)
        for use in (receiver.poll_and_apply, receiver.apply_weights, receiver.follow):
            with pytest.raises(ws.WeightSyncError, match=r"connect\(\)"):
                use()
        with pytest.raises(ws.WeightSyncError, match=r"connect\(\)"):
            next(iter(receiver))
        with pytest.raises(ws.EngineUnusableError):
            receiver.verify_weights()
        assert receiver.version is None
        assert not receiver.ready

    def test_before_the_sender(self, ends):
        receiver = ends.receiver(weights(0), connect=False)
        with pytest.raises(ws.DeadlineError, match=ends.path):
            receiver.connect(timeout=0.05)
        assert not receiver.connected
        sender = ends.sender(weights(1))
        receiver.connect(timeout=WAIT)
        sender.update_weights(version=1)
        assert receiver.poll_and_apply().version.number == 1

    def test_before_the_first_version(self, ends):
        _, receiver = ends.pair(weights(1), weights(0))
        assert receiver.poll_and_apply() is None
        assert receiver.poll_and_apply(timeout=0.01) is None
        with pytest.raises(ws.DeadlineError, match="no version"):
            receiver.apply_weights(timeout=0.01)
        assert not receiver.ready
        with pytest.raises(ws.EngineUnusableError, match="none has arrived"):
            receiver.require_ready()

    def test_connect_twice(self, ends):
        sender, receiver = ends.pair(weights(1), weights(0))
        receiver.connect(timeout=WAIT)
        assert len(sender.receivers()) == 1

    def test_after_shutdown(self, ends):
        sender, receiver = ends.pair(weights(1), weights(0))
        sender.update_weights(version=1)
        receiver.poll_and_apply()
        receiver.shutdown()
        assert sender.receivers() == []
        with pytest.raises(ws.WeightSyncError, match=r"connect\(\)"):
            receiver.poll_and_apply()
        receiver.connect(timeout=WAIT)
        sender.update_weights(weights(2), version=2)
        assert receiver.poll_and_apply().version.number == 2

    def test_a_lease_does_not_outlive_a_shutdown(self, ends):
        """With two slots: a leaked lease would block the third version."""
        sender, receiver = ends.pair(weights(1), weights(0))
        for number in range(1, 6):
            sender.update_weights(version=number, timeout=WAIT)
            receiver.poll_and_apply()
            receiver.shutdown()
            receiver.connect(timeout=WAIT)

    def test_context_manager(self, ends):
        sender = ends.sender(weights(1))
        with ends.receiver(weights(0)):
            assert len(sender.receivers()) == 1
        assert sender.receivers() == []


class TestWrongUse:
    @pytest.mark.parametrize("id", ["../x", "a/b", "x" * 101, ".x", "a\0b", "ä", "a b", "a\n"])
    def test_ids(self, ends, id):
        with pytest.raises(ws.SchemeError, match="id"):
            ends.receiver(weights(0), id=id, connect=False)

    def test_ids_by_default_are_unique(self, ends):
        ids = {ends.receiver(weights(0), connect=False).id for _ in range(20)}
        assert len(ids) == 20

    def test_an_id_twice(self, ends):
        sender, _ = ends.pair(weights(1), weights(0), receiver={"id": "r1"})
        other = ends.receiver(weights(0), id="r1", connect=False)
        with pytest.raises(ws.WeightSyncError, match="another live receiver is called 'r1'"):
            other.connect(timeout=1)
        assert [r.state for r in sender.receivers()] == ["connected"]

    @pytest.mark.parametrize("thing", [None, 5, "llm", object(), [torch.ones(1)], nn.Linear])
    def test_not_an_engine(self, ends, thing):
        with pytest.raises(ws.EngineError, match="not an engine"):
            ends.receiver(thing, connect=False)

    @pytest.mark.timeout(60)
    def test_a_receiver_of_an_engine_that_has_one_is_no_member_of_the_run(self, ends, monkeypatch):
        """The trainer is not told of it, and it does not wait for one to tell."""
        monkeypatch.setattr("weightsync.receiver._REPORT_SECONDS", 600.0)
        target = weights(0)
        sender, receiver = ends.pair(weights(1), target, receiver={"id": "first"})
        second = ends.receiver(target, id="second", connect=False)
        with pytest.raises(ws.EngineError, match="driven by another receiver"):
            second.connect(timeout=WAIT)
        elsewhere = ws.DoubleBufferScheme(f"{ends.path}-of-no-trainer").create_receiver(target)
        with pytest.raises(ws.EngineError, match="driven by another receiver"):
            elsewhere.connect(timeout=600)
        assert [told.receiver for told in sender.receivers()] == ["first"]
        sender.attach(receiver)
        assert sender.update_weights(version=1, wait="applied").behind() == ()

    def test_unknown_options(self, ends):
        with pytest.raises(ws.EngineError, match="colour"):
            ends.receiver(weights(0), colour="red", connect=False)
        with pytest.raises(ws.EngineError, match="strict"):
            ends.receiver(Recording(), strict=True, connect=False)

    @pytest.mark.parametrize(
        ("engine", "takes"),
        [
            (nn.Linear(1, 1), "strict, pad, cast"),
            ([nn.Linear(1, 1)], "strict, pad, cast"),
            (ws.VLLMServer("http://127.0.0.1:1"), "mode, targets, wake, apply, stage"),
        ],
        ids=["a module", "a list", "a server"],
    )
    def test_an_unknown_option_is_told_which_there_are(self, ends, engine, takes):
        with pytest.raises(
            ws.EngineError, match=f"no option 'colour': it takes {takes}; every"
        ) as error:
            ends.receiver(engine, colour="red", connect=False)
        assert "__init__" not in str(error.value)

    def test_an_option_of_another_form_is_not_taken(self, ends):
        with pytest.raises(ws.EngineError, match="VLLMServer has no option 'attribute'"):
            ends.receiver(ws.VLLMServer("http://127.0.0.1:1"), attribute="llm", connect=False)

    @pytest.mark.parametrize("value", ["yes", "no", 1, 0, None])
    @pytest.mark.parametrize("option", ["strict", "pad", "cast", "stage"])
    def test_what_is_true_or_false_is_nothing_else(self, ends, option, value):
        """ "no" and 0 would be taken for what they are not, or what they may be by accident."""
        engine = ws.VLLMServer("http://127.0.0.1:1") if option == "stage" else weights(0)
        with pytest.raises(ws.EngineError, match=f"{option}=.*: True or False"):
            ends.receiver(engine, connect=False, **{option: value})

    def test_an_adapter_takes_none_of_the_options_that_are_for_weights(self):
        server = ws.VLLMServer("http://127.0.0.1:1")
        with pytest.raises(ws.EngineError, match="no option 'stage'"):
            ws.VLLMAdapter(server, stage=True)
        with pytest.raises(ws.EngineError, match="one_name='policy': True or False"):
            ws.VLLMAdapter(server, one_name="policy")

    @pytest.mark.parametrize("timeout", [-1, float("nan"), True, "60"])
    def test_the_timeout_of_updates_is_looked_at_before_there_is_one(self, ends, timeout):
        with pytest.raises(ValueError, match="timeout"):
            ends.receiver(weights(0), apply_timeout=timeout, connect=False)

    @pytest.mark.parametrize("timeout", [-1, float("nan"), True, "60"])
    def test_timeouts(self, ends, timeout):
        _, receiver = ends.pair(weights(1), weights(0))
        for use in (receiver.connect, receiver.poll_and_apply):
            with pytest.raises(ValueError, match="timeout"):
                use(timeout=timeout)

    def test_infinite_timeouts(self, ends):
        sender, receiver = ends.pair(weights(1), weights(0), receiver={"apply_timeout": 1e300})
        sender.update_weights(version=1)
        assert receiver.poll_and_apply(timeout=float("inf")).version.number == 1
        receiver.follow()
        receiver.shutdown()

    def test_another_model(self, ends):
        """Both sets of names, and both shapes."""
        target = {"a": torch.zeros(3), "here": torch.zeros(1)}
        sender, receiver = ends.pair(weights(1), target)
        sender.update_weights(version=1)
        with pytest.raises(ws.MismatchError, match=r"'here'.*'b'"):
            receiver.poll_and_apply()
        assert target["a"].tolist() == [0, 0, 0]
        assert not receiver.ready
        told = sender.receivers()[0]
        assert told.version is None
        assert "'here'" in told.error

    def test_a_version_that_is_gone(self, ends):
        sender, receiver = ends.pair(weights(1), weights(0))
        first = sender.update_weights(version=1).version
        sender.update_weights(version=2)
        sender.update_weights(version=3)
        with pytest.raises(ws.VersionGoneError, match="1"):
            receiver.apply_weights(first)
        with pytest.raises(ws.VersionGoneError):
            receiver.apply_weights(ws.Version(1, 1))
        assert receiver.poll_and_apply().version.number == 3


class TestFailures:
    @pytest.mark.parametrize("step", ["check", "stage"])
    def test_before_anything_was_touched(self, ends, step):
        engine = Recording()
        sender, receiver = ends.pair(weights(1), engine)
        sender.update_weights(version=1)
        receiver.poll_and_apply()
        engine.fails = {step}
        engine.calls.clear()
        sender.update_weights(weights(2), version=2)
        with pytest.raises(RuntimeError, match=f"{step} went wrong"):
            receiver.poll_and_apply()
        assert "pause" not in engine.calls
        assert receiver.version.number == 1
        assert receiver.ready
        assert_all_same(engine.tensors, weights(1))
        told = sender.receivers()[0]
        assert (told.version.number, told.attempted.number) == (1, 2)
        assert f"{step} went wrong" in told.error
        engine.fails = set()
        assert receiver.poll_and_apply().version.number == 2
        assert sender.receivers()[0].error is None

    @pytest.mark.parametrize("step", ["apply 2", "label 2"])
    def test_rolled_back(self, ends, step):
        """Promise 10, C1: the engine holds the last good version, and says so."""
        engine = Recording()
        sender, receiver = ends.pair(weights(1), engine, scheme=ends.scheme(slots=3))
        sender.update_weights(version=1)
        receiver.poll_and_apply()
        engine.fails = {step}
        engine.calls.clear()
        sender.update_weights(weights(2), version=2)
        with pytest.raises(RuntimeError, match="went wrong"):
            receiver.poll_and_apply()
        assert engine.calls[-4:] == ["apply 1", "flush", "label 1", "resume"]
        assert_all_same(engine.tensors, weights(1))
        assert receiver.version.number == 1
        assert receiver.status().state == "rolled back"
        assert sender.receivers()[0].state == "rolled back"
        engine.fails = set()
        sender.update_weights(weights(3), version=3)
        assert receiver.poll_and_apply().version.number == 3
        assert receiver.status().state == "applied"
        assert_all_same(engine.tensors, weights(3))

    def test_a_failed_update_does_not_block_the_next_one(self, ends):
        """C1, with as few slots as there can be: 3 fails, the version stays 2, 4 is delivered."""
        engine = Recording({"apply 3"})
        sender, receiver = ends.pair(weights(0), engine, sender={"timeout": 2})
        for number in (1, 2, 3, 4):
            sender.update_weights(weights(number), version=number)
            if number == 3:
                with pytest.raises(RuntimeError, match="apply went wrong"):
                    receiver.poll_and_apply()
                assert receiver.version.number == 2
                assert_all_same(engine.tensors, weights(2))
            else:
                assert receiver.poll_and_apply().version.number == number
        assert_all_same(engine.tensors, weights(4))

    def test_nothing_to_roll_back_to(self, ends):
        engine = Recording({"apply 1"})
        sender, receiver = ends.pair(weights(1), engine)
        sender.update_weights(version=1)
        with pytest.raises(RuntimeError, match="apply went wrong"):
            receiver.poll_and_apply()
        assert engine.calls[-2:] == ["label None", "resume"]
        assert receiver.status().state == "unusable"
        assert not receiver.ready
        with pytest.raises(ws.EngineUnusableError, match="apply went wrong"):
            receiver.require_ready()
        engine.fails = set()
        assert receiver.poll_and_apply().version.number == 1
        assert receiver.ready

    def test_rolling_back_fails_too(self, ends):
        engine = Recording()
        sender, receiver = ends.pair(weights(1), engine)
        sender.update_weights(version=1)
        receiver.poll_and_apply()
        engine.fails = {"apply 1", "apply 2"}
        sender.update_weights(weights(2), version=2)
        with pytest.raises(RuntimeError, match="apply went wrong"):
            receiver.poll_and_apply()
        assert engine.calls[-1] == "resume"
        assert receiver.status().state == "unusable"
        assert receiver.version is None
        assert sender.receivers()[0].state == "unusable"
        engine.fails = set()
        for number in (3, 4, 5):  # no lease was leaked
            sender.update_weights(weights(number), version=number, timeout=WAIT)
            assert receiver.poll_and_apply().version.number == number

    def test_resume_fails(self, ends):
        """The weights are in, but requests do not go on: that is no success."""
        engine = Recording({"resume"})
        sender, receiver = ends.pair(weights(1), engine)
        sender.update_weights(version=1)
        with pytest.raises(RuntimeError, match="resume went wrong"):
            receiver.poll_and_apply()
        assert sender.receivers()[0].state != "applied"
        engine.fails = set()
        for number in (2, 3, 4):
            sender.update_weights(weights(number), version=number, timeout=WAIT)
            receiver.poll_and_apply()
        assert_all_same(engine.tensors, weights(4))

    def test_pause_fails(self, ends):
        engine = Recording({"pause"})
        sender, receiver = ends.pair(weights(1), engine)
        sender.update_weights(version=1)
        with pytest.raises(RuntimeError, match="pause went wrong"):
            receiver.poll_and_apply()
        assert engine.calls[-1] == "resume"
        assert "apply 1" not in engine.calls

    def test_connect_fails(self, ends):
        """H3: the sender learns why nobody came."""
        sender = ends.sender(weights(1))
        receiver = ends.receiver(Recording({"connect"}), connect=False, id="r1")
        with pytest.raises(RuntimeError, match="connect went wrong"):
            receiver.connect(timeout=WAIT)
        with pytest.raises(ws.ReceiverError, match=r"'r1'.*connect went wrong"):
            sender.connect(timeout=WAIT, receivers=["r1"])

    def test_what_sleep_took_is_not_restored(self, ends):
        """B4: not silent."""
        engine = Recording()
        sender, receiver = ends.pair(weights(1), engine)
        engine.invalid = ("rotary.inv_freq",)
        sender.update_weights(version=1)
        with pytest.raises(ws.EngineError, match=r"rotary\.inv_freq"):
            receiver.poll_and_apply()
        assert not receiver.ready


def test_weights_lost_in_sleep(ends):
    """S1: sent again, whatever the version."""
    engine = Recording()
    sender, receiver = ends.pair(weights(1), engine)
    sender.update_weights(version=5)
    receiver.poll_and_apply()
    engine.lost = True
    for tensor in engine.tensors.values():
        tensor.zero_()
    assert not receiver.ready
    with pytest.raises(ws.EngineUnusableError, match="sleep"):
        receiver.require_ready()
    assert receiver.poll_and_apply().version.number == 5
    assert_all_same(engine.tensors, weights(1))
    assert receiver.ready
    assert receiver.poll_and_apply() is None


def test_a_corrupted_slot_is_never_loaded(ends):
    """Promise 1: one bit, and the receiver keeps what it has."""
    target = weights(0)
    sender, receiver = ends.pair(weights(1), target, scheme=ends.scheme(slots=3))
    sender.update_weights(version=1)
    receiver.poll_and_apply()
    report = sender.update_weights(weights(2), version=2)
    status = ends.scheme().inspect()
    slot = next(s for s in status.slots if s.version == report.version)
    with open(f"{ends.path}/{slot.generation}/slot{slot.slot}.bin", "r+b") as file:
        file.seek(1)
        byte = file.read(1)[0]
        file.seek(1)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(ws.CorruptError, match="'a'"):
        receiver.poll_and_apply()
    assert_all_same(target, weights(1))
    assert receiver.version.number == 1
    sender.update_weights(weights(3), version=3)
    assert receiver.poll_and_apply().version.number == 3


def test_meant_for_others(ends):
    """H5: each receiver ends at the version last sent to it. One slot more than receivers."""
    scheme = ends.scheme(slots=4)
    sender = ends.sender(weights(0), scheme=scheme, timeout=2)
    names = ("r1", "r2", "r3")
    receivers = {name: ends.receiver(weights(0), scheme=scheme, id=name) for name in names}
    last = dict.fromkeys(receivers)
    for number in range(12):
        names = [["r1", "r2", "r3"], ["r1"], ["r2", "r3"]][number % 3]
        sender.update_weights(weights(number), version=number, receivers=names)
        for name, receiver in receivers.items():
            report = receiver.poll_and_apply()
            assert (report is not None) == (name in names)
            if name in names:
                last[name] = number
            assert receiver.version.number == last[name]


def test_iterating(ends):
    target = weights(0)
    sender, receiver = ends.pair(weights(1), target)
    seen = []
    sender.update_weights(version=1)
    for report in receiver:
        seen.append(report.version.number)
        assert target["b"].eq(seen[-1]).all()
        if seen[-1] == 3:
            break
        sender.update_weights(weights(seen[-1] + 1), version=seen[-1] + 1)
    assert seen == [1, 2, 3]


def test_following(ends):
    target = weights(0)
    sender, receiver = ends.pair(weights(1), target)
    applied = threading.Semaphore(0)
    receiver.follow(on_update=lambda report: applied.release())
    with pytest.raises(ws.WeightSyncError, match="before"):
        receiver.follow()
    for number in (1, 2, 3):
        sender.update_weights(weights(number), version=number)
        assert applied.acquire(timeout=WAIT)
        with receiver.hold() as version:
            assert version.number == number
            assert_all_same(target, weights(number))
    receiver.shutdown()
    assert not receiver.connected


def test_following_goes_on_after_errors(ends):
    sender, receiver = ends.pair(weights(1), Recording({"apply 1"}))
    failed, applied = threading.Event(), threading.Event()

    def on_error(error):
        receiver.engine.fails = set()
        failed.set()

    receiver.follow(on_update=lambda report: applied.set(), on_error=on_error)
    sender.update_weights(version=1)
    assert failed.wait(WAIT)
    assert applied.wait(WAIT)
    assert receiver.version.number == 1


def test_nothing_changes_while_held(ends):
    target = weights(0)
    sender, receiver = ends.pair(weights(1), target)
    receiver.follow()
    with receiver.hold() as version:
        assert version is None
        sender.update_weights(version=1)
        assert not threading.Event().wait(0.05)
        assert_all_same(target, weights(0))
    assert sender.update_weights(version=1, wait="applied", timeout=WAIT).receivers
    assert_all_same(target, weights(1))


def test_rebind(ends):
    """C4: updates go to the object they are bound to; a copy is another one."""
    model = nn.Linear(2, 2)
    sender, receiver = ends.pair({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, model)
    sender.update_weights(version=1)
    receiver.poll_and_apply()
    copy = nn.Linear(2, 2)
    assert receiver.is_bound_to(model)
    assert not receiver.is_bound_to(copy)
    receiver.rebind(copy)
    assert receiver.is_bound_to(copy)
    assert not receiver.ready
    assert sender.receivers()[0].version is None
    assert receiver.apply_weights().version.number == 1
    assert copy.weight.eq(1).all()
    assert receiver.ready


def test_a_sender_that_comes_back(ends):
    """C8: the first version of its new life is newer, whatever its number."""
    target = weights(0)
    sender, receiver = ends.pair(weights(1), target)
    sender.update_weights(version=100)
    receiver.poll_and_apply()
    sender.shutdown()
    assert receiver.poll_and_apply() is None
    assert_all_same(target, weights(1))
    again = ends.sender(weights(2))
    again.update_weights(version=0)
    assert receiver.poll_and_apply(timeout=WAIT).version.number == 0
    assert_all_same(target, weights(2))
    assert [r.receiver for r in again.receivers()] == [receiver.id]
