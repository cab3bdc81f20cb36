"""Several engines of one receiver: into an update together, each for itself when one fails."""

import threading
import time

import pytest

import weightsync as ws
from tests.conftest import WAIT
from tests.fakes import assert_holds, attached, fake, holds, weights
from weightsync.testing import FakeEngine


def replicas(count=3, **options):
    names = "abcdefgh"[:count]
    return {name: fake(**options) for name in names}


def states(receiver):
    return {e.engine: (e.state, e.version and e.version.number) for e in receiver.status().engines}


class Recorded(FakeEngine):
    """Writes its steps into a log that several engines share."""

    def __init__(self, log, name):
        super().__init__({"w": (4,)})
        self.log, self.label_of = log, name

    def _step(self, step):
        self.log.append((step, self.label_of))
        super()._step(step)


class TestTogether:
    def test_all_have_staged_before_any_is_paused_and_all_are_paused_before_any_loads(self, ends):
        log = []
        names = ["a", "b", "c"]
        engines = ws.Replicas({name: Recorded(log, name) for name in names})
        sender, _ = attached(ends, engines)
        for number in range(1, 4):
            log.clear()
            sender.update_weights({"w": weights(number)["norm"][:4]}, version=number)
            steps = [step for step, _ in log]
            assert sorted(log) == sorted((step, name) for step in set(steps) for name in names)
            last_stage = max(i for i, step in enumerate(steps) if step == "stage")
            pauses = [i for i, step in enumerate(steps) if step == "pause"]
            assert last_stage < min(pauses) < max(pauses) < steps.index("start")
            for name in names:
                own = [step for step, whose in log if whose == name]
                assert own[-2:] == ["label", "resume"]

    def test_a_slow_one_is_waited_for_while_the_others_still_answer(self, ends):
        engines = replicas(2)
        sender, _ = attached(ends, ws.Replicas(engines))
        sender.update_weights(weights(1), version=1)
        engines["a"].stuck["stage"] = go_on = threading.Event()
        engines["b"].calls.clear()
        thread = threading.Thread(target=sender.update_weights, args=(weights(2),))
        thread.start()
        while "stage" not in engines["b"].calls:
            time.sleep(0.001)
        assert not engines["b"].paused
        assert engines["b"].generate([1])
        go_on.set()
        thread.join(WAIT)
        assert all(holds(engine, weights(2)) for engine in engines.values())

    def test_one_engine_is_driven_in_the_thread_of_the_caller(self, ends):
        engine = fake()
        sender, _ = attached(ends, engine)
        used = set()
        engine.during_load = lambda name: used.add(threading.current_thread())
        sender.update_weights(weights(1), version=1)
        assert used == {threading.current_thread()}


@pytest.mark.parametrize("step", ["check", "stage", "pause", "start", "load", "finish", "label"])
class TestOneFails:
    def test_it_keeps_its_version_and_the_others_have_the_new_one(self, ends, step):
        engines = replicas()
        sender, receiver = attached(ends, ws.Replicas(engines))
        sender.update_weights(weights(1), version=1)
        engines["b"].fail[step] = RuntimeError("bad shard")
        with pytest.raises(
            ws.ReceiverError, match=r"engine 'b': RuntimeError: bad shard"
        ) as caught:
            sender.update_weights(weights(2), version=2)
        assert holds(engines["a"], weights(2))
        assert holds(engines["b"], weights(1))
        assert holds(engines["c"], weights(2))
        assert [e.version_label.number for e in engines.values()] == [2, 1, 2]
        assert not any(engine.paused for engine in engines.values())
        (told,) = caught.value.failures
        assert [(e.engine, e.version.number) for e in told.engines] == [
            ("a", 2),
            ("b", 1),
            ("c", 2),
        ]
        assert "'a'" not in told.error
        assert receiver.version.number == 1
        assert receiver.ready
        sender.update_weights(weights(3), version=3)
        assert {engine.version_label.number for engine in engines.values()} == {3}
        assert receiver.status().error is None

    def test_at_its_first_update(self, ends, step):
        engines = replicas(2)
        sender, receiver = attached(ends, ws.Replicas(engines))
        engines["a"].fail[step] = RuntimeError("bad shard")
        with pytest.raises(ws.ReceiverError, match="bad shard"):
            sender.update_weights(weights(1), version=1)
        assert_holds(engines["b"], weights(1))
        receiver.require_ready("b")
        with pytest.raises(ws.EngineUnusableError, match="bad shard"):
            receiver.require_ready("a")
        with pytest.raises(ws.EngineUnusableError, match="'a'"):
            receiver.require_ready()
        assert engines["a"].version_label is None
        assert receiver.version is None
        # The next look brings the one that lacks it to the same version, and pauses no other.
        engines["b"].calls.clear()
        assert receiver.poll_and_apply().version.number == 1
        assert engines["b"].calls == []
        assert_holds(engines["a"], weights(1))
        receiver.require_ready()


class TestOneDies:
    @pytest.mark.parametrize(
        "step", ["check", "stage", "pause", "start", "load", "flush", "resume"]
    )
    def test_it_is_named_once_and_the_others_go_on(self, ends, step):
        engines = replicas()
        sender, receiver = attached(ends, ws.Replicas(engines))
        sender.update_weights(weights(1), version=1)
        engines["c"].fail[step] = ws.EngineDiedError("killed")
        with pytest.raises(
            ws.ReceiverError, match=r"engine 'c': EngineDiedError: killed"
        ) as caught:
            sender.update_weights(weights(2), version=2)
        assert "'a', 'b' hold" not in str(caught.value)  # the receiver says it to its own caller
        assert states(receiver) == {"a": ("applied", 2), "b": ("applied", 2), "c": ("dead", None)}
        assert receiver.version.number == 2
        receiver.require_ready()
        with pytest.raises(ws.EngineUnusableError, match="dead"):
            receiver.require_ready("c")
        report = sender.update_weights(weights(3), version=3)
        assert report.receivers[0].version.number == 3
        assert {e.engine: e.state for e in report.receivers[0].engines}["c"] == "dead"
        assert all(holds(engines[name], weights(3)) for name in "ab")

    def test_one_that_comes_back_is_taken_up_by_the_next_update(self, ends):
        engines = replicas(2)
        sender, receiver = attached(ends, ws.Replicas(engines))
        sender.update_weights(weights(1), version=1)
        engines["a"].fail["load"] = ws.EngineDiedError("killed")
        with pytest.raises(ws.ReceiverError):
            sender.update_weights(weights(2), version=2)
        sender.update_weights(weights(3), version=3)  # still dead: said before
        engines["a"].restart()
        engines["a"].calls.clear()
        sender.update_weights(weights(4), version=4)
        assert engines["a"].calls[0] == "connect"
        assert states(receiver) == {"a": ("applied", 4), "b": ("applied", 4)}
        assert_holds(engines["a"], weights(4))
        assert receiver.status().error is None

    def test_between_two_updates_it_is_refused_at_once_and_named_by_the_next(self, ends):
        engines = replicas(2)
        sender, receiver = attached(ends, ws.Replicas(engines))
        sender.update_weights(weights(1), version=1)
        engines["a"].dead = True
        assert not receiver.ready
        with pytest.raises(ws.EngineUnusableError, match=r"'a'.*EngineDiedError"):
            receiver.guard("a").generate([1])
        assert receiver.guard("b").generate([1])
        with pytest.raises(ws.EngineError, match="engine 'a': EngineDiedError"):
            receiver.poll_and_apply()  # which looks after it, and finds it dead
        assert receiver.ready  # as of those that live
        with pytest.raises(ws.ReceiverError, match="engine 'a': EngineDiedError"):
            sender.update_weights(weights(2), version=2)
        sender.update_weights(weights(3), version=3)
        assert_holds(engines["b"], weights(3))

    def test_one_that_dies_again_is_named_again(self, ends):
        engines = replicas(2)
        sender, _ = attached(ends, ws.Replicas(engines))
        for number in range(1, 9, 4):
            engines["a"].fail["load"] = ws.EngineDiedError("killed")
            with pytest.raises(ws.ReceiverError, match="killed"):
                sender.update_weights(weights(number), version=number)
            sender.update_weights(weights(number + 1), version=number + 1)
            engines["a"].restart()
            sender.update_weights(weights(number + 2), version=number + 2)
            assert_holds(engines["a"], weights(number + 2))

    def test_all_of_them(self, ends):
        engines = replicas(2)
        sender, receiver = attached(ends, ws.Replicas(engines))
        sender.update_weights(weights(1), version=1)
        for engine in engines.values():
            engine.fail["stage"] = ws.EngineDiedError("killed")
        for number in (2, 3):  # said every time: there is nobody left
            with pytest.raises(ws.ReceiverError, match=r"'a'.*'b'"):
                sender.update_weights(weights(number), version=number)
            assert (receiver.state, receiver.version) == ("unusable", None)
            assert not receiver.ready
        with pytest.raises(ws.EngineUnusableError):
            receiver.require_ready()
        engines["b"].restart()
        sender.update_weights(weights(4), version=4)
        assert states(receiver) == {"a": ("dead", None), "b": ("applied", 4)}

    def test_the_only_one_comes_back(self, ends):
        engine = fake()
        sender, receiver = attached(ends, engine)
        sender.update_weights(weights(1), version=1)
        engine.fail["load"] = ws.EngineDiedError("killed")
        with pytest.raises(ws.ReceiverError, match="killed"):
            sender.update_weights(weights(2), version=2)
        with pytest.raises(ws.EngineUnusableError, match="killed"):
            receiver.require_ready()
        engine.restart()
        sender.update_weights(weights(3), version=3)
        assert_holds(engine, weights(3))
        receiver.require_ready()

    def test_while_it_is_brought_back_to_the_former_version(self, ends):
        engines = replicas(2)
        sender, receiver = attached(ends, ws.Replicas(engines))
        sender.update_weights(weights(1), version=1)
        engines["a"].fail["load"] = [RuntimeError("bad shard"), ws.EngineDiedError("killed")]
        with pytest.raises(ws.ReceiverError, match=r"bad shard.*killed"):
            sender.update_weights(weights(2), version=2)
        assert states(receiver)["a"] == ("dead", None)

    def test_one_that_comes_back_as_another_engine_is_refused(self, ends):
        class Growing(FakeEngine):
            count = 0

            def workers(self, deadline):
                return self.count

        engine, other = Growing({"w": (1,)}), Growing({"w": (1,)})
        sender, receiver = attached(ends, ws.Replicas({"a": engine, "b": other}))
        engine.fail["check"] = ws.EngineDiedError("killed")
        with pytest.raises(ws.ReceiverError, match="killed"):
            sender.update_weights({"w": weights(1)["norm"][:1]}, version=1)
        engine.restart()
        engine.count = 2
        sender.update_weights({"w": weights(2)["norm"][:1]}, version=2)
        assert "0 worker processes and has 2" in receiver.status().engines[0].error
        assert states(receiver)["b"] == ("applied", 2)


class TestOneIsStuck:
    @pytest.mark.parametrize("step", ["stage", "pause", "load", "resume"])
    def test_the_others_go_on_within_the_deadline_and_it_comes_back(self, ends, step):
        engines = replicas()
        sender, receiver = attached(ends, ws.Replicas(engines), slots=3, apply_timeout=1.0)
        sender.update_weights(weights(1), version=1)
        engines["a"].stuck[step] = go_on = threading.Event()
        began = time.monotonic()
        with pytest.raises(ws.ReceiverError, match=r"engine 'a': DeadlineError") as caught:
            sender.update_weights(weights(2), version=2, timeout=1.0)
        assert time.monotonic() - began < 10
        assert "engine 'b'" not in str(caught.value)
        for name in "bc":
            assert_holds(engines[name], weights(2))
            assert not engines[name].paused
        assert states(receiver)["a"] == ("unusable", None)
        with pytest.raises(ws.EngineUnusableError, match="come back"):
            receiver.require_ready("a")
        # The next ones cost nothing: it is known to be away.
        began = time.monotonic()
        with pytest.raises(ws.ReceiverError, match="come back"):
            sender.update_weights(weights(3), version=3)
        assert time.monotonic() - began < 1
        engines["a"].stuck.clear()
        go_on.set()
        late = receiver._fleet.member("a").late
        late.thread.join(WAIT)
        assert not engines["a"].paused
        label = engines["a"].version_label
        assert holds(engines["a"], weights(label.number if label else 1))  # whole, whichever
        sender.update_weights(weights(4), version=4)
        assert states(receiver) == dict.fromkeys("abc", ("applied", 4))
        assert all(holds(engine, weights(4)) for engine in engines.values())

    def test_what_it_may_still_read_is_not_overwritten(self, ends):
        """It is late inside of a load: the lease lasts until it has come back."""
        engines = replicas(2)
        sender, receiver = attached(ends, ws.Replicas(engines), slots=3, apply_timeout=0.5)
        sender.update_weights(weights(1), version=1)
        engines["a"].stuck["load"] = go_on = threading.Event()
        with pytest.raises(ws.ReceiverError):
            sender.update_weights(weights(2), version=2, timeout=0.5)
        for number in (3, 4):  # three slots: one for what it reads, two for the others
            with pytest.raises(ws.ReceiverError, match="come back"):
                sender.update_weights(weights(number), version=number, timeout=WAIT)
        late = receiver._fleet.member("a").late
        go_on.set()
        late.thread.join(WAIT)
        assert_holds(engines["a"], weights(2))  # of which there would be nothing left
        assert engines["a"].version_label.number == 2
        for number in (5, 6, 7):  # and its slot is free again
            sender.update_weights(weights(number), version=number, timeout=WAIT)

    def test_one_that_is_late_and_fails_is_not_brought_back_to_what_is_overwritten(self, ends):
        engines = replicas(2)
        sender, receiver = attached(ends, ws.Replicas(engines), slots=3, apply_timeout=0.5)
        sender.update_weights(weights(1), version=1)
        engines["a"].stuck["load"] = go_on = threading.Event()
        engines["a"].fail["load"] = RuntimeError("bad shard")
        with pytest.raises(ws.ReceiverError, match="come back"):
            sender.update_weights(weights(2), version=2, timeout=0.5)
        late = receiver._fleet.member("a").late
        engines["a"].stuck.clear()
        go_on.set()
        late.thread.join(WAIT)
        assert engines["a"].version_label is None
        assert "too late" in late.attempt.words
        sender.update_weights(weights(3), version=3)
        assert_holds(engines["a"], weights(3))

    def test_one_that_is_late_and_whole_is_not_loaded_again(self, ends):
        engines = replicas(2)
        sender, receiver = attached(ends, ws.Replicas(engines), apply_timeout=0.4)
        engines["a"].stuck["finish"] = go_on = threading.Event()
        with pytest.raises(ws.ReceiverError, match="come back"):
            sender.update_weights(weights(1), version=1, timeout=0.4)
        late = receiver._fleet.member("a").late
        go_on.set()
        late.thread.join(WAIT)
        engines["a"].calls.clear()
        assert receiver.poll_and_apply().version.number == 1
        assert engines["a"].calls == []
        receiver.require_ready()

    def test_a_receiver_ends_without_one_that_does_not_come_back(self, ends):
        engines = replicas(2)
        sender, receiver = attached(ends, ws.Replicas(engines), apply_timeout=0.4)
        engines["a"].stuck["load"] = go_on = threading.Event()
        with pytest.raises(ws.ReceiverError):
            sender.update_weights(weights(1), version=1, timeout=0.4)
        late = receiver._fleet.member("a").late
        sender.detach(receiver)
        began = time.monotonic()
        receiver.shutdown()
        assert time.monotonic() - began < 5
        go_on.set()
        late.thread.join(WAIT)


class TestResume:
    def test_that_fails_once_is_tried_again(self, ends):
        engine = fake()
        sender, _ = attached(ends, engine)
        engine.fail["resume"] = RuntimeError("connection reset")
        assert sender.update_weights(weights(1), version=1).receivers[0].state == "applied"
        assert not engine.paused

    def test_that_fails_for_good_leaves_the_others(self, ends):
        engines = replicas(2)
        sender, receiver = attached(ends, ws.Replicas(engines))
        sender.update_weights(weights(1), version=1)
        engines["a"].fail["resume"] = [RuntimeError("stuck")] * 3
        with pytest.raises(ws.ReceiverError, match=r"'a': RuntimeError: stuck.*not be resumed"):
            sender.update_weights(weights(2), version=2)
        assert states(receiver) == {"a": ("unusable", None), "b": ("applied", 2)}
        assert engines["a"].version_label is None
        sender.update_weights(weights(3), version=3)
        assert not engines["a"].paused
        assert states(receiver)["a"] == ("applied", 3)

    def test_after_a_failure_says_both(self, ends):
        engine = fake()
        sender, receiver = attached(ends, engine)
        sender.update_weights(weights(1), version=1)
        engine.fail = {"load": RuntimeError("bad shard"), "resume": [RuntimeError("stuck")] * 3}
        with pytest.raises(ws.ReceiverError, match=r"bad shard.*stuck"):
            sender.update_weights(weights(2), version=2)
        assert receiver.state == "unusable"


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
class TestInterrupts:
    def test_of_the_only_engine_pass_through_after_all_is_whole_again(self, ends, kind):
        engine = fake()
        sender, receiver = attached(ends, engine)
        sender.update_weights(weights(1), version=1)
        engine.fail["load"] = kind("now")
        with pytest.raises(kind):
            sender.update_weights(weights(2), version=2)
        assert_holds(engine, weights(1))
        assert not engine.paused
        assert receiver.state == "rolled back"
        sender.update_weights(weights(3), version=3)
        assert_holds(engine, weights(3))

    def test_in_the_middle_of_a_rollback_say_that_nothing_is_held(self, ends, kind):
        engine = fake()
        sender, receiver = attached(ends, engine)
        sender.update_weights(weights(1), version=1)
        engine.fail["load"] = [RuntimeError("bad shard"), kind("now")]
        with pytest.raises(kind):
            sender.update_weights(weights(2), version=2)
        assert (receiver.state, engine.version_label) == ("unusable", None)
        assert not engine.paused
        sender.update_weights(weights(3), version=3)
        assert_holds(engine, weights(3))

    def test_of_one_of_several_are_its_own_affair(self, ends, kind):
        engines = replicas(2)
        sender, receiver = attached(ends, ws.Replicas(engines))
        sender.update_weights(weights(1), version=1)
        engines["a"].fail["load"] = kind("now")
        with pytest.raises(ws.ReceiverError, match=f"'a': {kind.__name__}: now"):
            sender.update_weights(weights(2), version=2)
        assert_holds(engines["a"], weights(1))
        assert states(receiver)["b"] == ("applied", 2)


class TestConnect:
    def test_one_that_cannot_be_set_up_is_named_to_both_ends(self, ends):
        """H3."""
        engines = replicas(3)
        engines["b"].fail["connect"] = RuntimeError("no nccl")
        sender = ends.sender()
        receiver = ends.receiver(ws.Replicas(engines), connect=False, id="r-17")
        with pytest.raises(ws.EngineError, match="engine 'b': RuntimeError: no nccl"):
            receiver.connect(timeout=5)
        with pytest.raises(ws.ReceiverError, match=r"r-17.*'b'.*no nccl"):
            sender.connect(timeout=5, receivers=1)
        assert receiver.state == "failed"
        receiver.connect(timeout=5)  # it may be tried again
        assert receiver.state == "connected"

    def test_one_that_does_not_answer_is_named_at_the_deadline(self, ends):
        engines = replicas(2)
        engines["b"].stuck["connect"] = go_on = threading.Event()
        ends.sender()
        receiver = ends.receiver(ws.Replicas(engines), connect=False)
        began = time.monotonic()
        with pytest.raises(ws.EngineError, match="engine 'b': DeadlineError"):
            receiver.connect(timeout=0.5)
        assert time.monotonic() - began < 5
        go_on.set()

    def test_again_keeps_what_is_held(self, ends):
        engine = fake()
        sender, receiver = attached(ends, engine)
        sender.update_weights(weights(1), version=1)
        receiver.connect(timeout=WAIT)
        assert (receiver.state, receiver.version.number) == ("applied", 1)

    def test_after_a_shutdown_a_failure_does_not_read_what_was_given_back(self, ends):
        engine = fake()
        sender, receiver = attached(ends, engine)
        sender.update_weights(weights(1), version=1)
        receiver.shutdown()
        receiver.connect(timeout=WAIT)
        with pytest.raises(ws.EngineUnusableError, match="to compare with"):
            receiver.verify_weights()
        engine.fail["load"] = RuntimeError("bad shard")
        with pytest.raises(ws.ReceiverError, match=r"bad shard.*no earlier version"):
            sender.update_weights(weights(2), version=2)
        assert receiver.state == "unusable"


class TestTwoReceiversOfOneEngine:
    def test_are_refused_until_the_first_has_ended(self, ends):
        engine = fake()
        first = ends.receiver(engine, connect=False)
        ends.sender()
        first.connect(timeout=WAIT)
        second = ends.receiver(engine, connect=False)
        with pytest.raises(ws.EngineError, match="another receiver of this process"):
            second.connect(timeout=1)
        first.shutdown()
        second.connect(timeout=WAIT)

    def test_one_that_could_not_connect_keeps_nobody_out(self, ends):
        engine = fake()
        first = ends.receiver(engine, connect=False)
        with pytest.raises(ws.DeadlineError):
            first.connect(timeout=0.05)  # no sender
        ends.sender()
        ends.receiver(engine)

    def test_one_that_was_thrown_away_keeps_nobody_out(self, ends):
        engine = fake()
        ends.sender()
        first = ends.scheme().create_receiver(engine)
        first.connect(timeout=WAIT)
        first.shutdown()
        del first
        ends.receiver(engine)

    def test_among_several_too(self, ends):
        shared = fake()
        ends.sender()
        ends.receiver(ws.Replicas([shared, fake()]))
        other = ends.receiver(ws.Replicas([fake(), shared]), connect=False)
        with pytest.raises(ws.EngineError, match="another receiver of this process"):
            other.connect(timeout=1)


class TestRebind:
    def test_to_more_engines_of_which_one_stays(self, ends):
        one, other = fake(), fake()
        one.close = lambda: pytest.fail("it goes on being used")
        sender, receiver = attached(ends, one)
        sender.update_weights(weights(1), version=1)
        receiver.rebind(ws.Replicas({"one": one, "other": other}))
        del one.close
        assert receiver.version is None
        sender.update_weights(weights(2), version=2)
        assert states(receiver) == {"one": ("applied", 2), "other": ("applied", 2)}

    def test_in_the_middle_of_an_update_is_refused(self, ends):
        one, other = fake(), fake()
        sender, receiver = attached(ends, one)

        def rebind(name):
            receiver.rebind(other)

        one.during_load = rebind
        with pytest.raises(ws.ReceiverError, match="from within an update"):
            sender.update_weights(weights(1), version=1)
        one.during_load = lambda name: receiver.poll_and_apply()
        sender.detach(receiver)
        with pytest.raises(ws.WeightSyncError, match="from within an update"):
            receiver.poll_and_apply()
        one.during_load = lambda name: None
        assert receiver.poll_and_apply().version.number == 1

    def test_from_another_thread_waits_for_the_update(self, ends):
        one, other = fake(), fake()
        sender, receiver = attached(ends, one)
        one.stuck["load"] = go_on = threading.Event()
        updating = threading.Thread(target=sender.update_weights, args=(weights(1),))
        updating.start()
        while "load" not in one.calls:
            time.sleep(0.001)
        rebinding = threading.Thread(target=receiver.rebind, args=(other,))
        rebinding.start()
        rebinding.join(0.1)
        assert rebinding.is_alive()
        go_on.set()
        rebinding.join(WAIT)
        updating.join(WAIT)
        assert_holds(one, weights(1))
        assert receiver.is_bound_to(other)
        sender.update_weights(weights(2))
        assert_holds(other, weights(2))
        assert_holds(one, weights(1))

    def test_to_one_that_cannot_be_set_up_leaves_all_as_it_was(self, ends):
        one, other = fake(), fake()
        sender, receiver = attached(ends, one)
        sender.update_weights(weights(1), version=1)
        other.fail["connect"] = RuntimeError("no backend")
        with pytest.raises(RuntimeError, match="no backend"):
            receiver.rebind(other)
        assert receiver.is_bound_to(one)
        assert receiver.version.number == 1
        sender.update_weights(weights(2), version=2)
        assert_holds(one, weights(2))


def test_a_new_version_does_not_wait_until_a_failed_one_is_tried_again(ends):
    """In the background: the pause after errors grows, and is not for the engines that are well."""
    engines = replicas(2, buffers={"rope": weights(0)["norm"].clone()})
    sender = ends.sender(scheme=ends.scheme(slots=3))
    receiver = ends.receiver(ws.Replicas(engines), scheme=ends.scheme(slots=3))
    sender.update_weights(weights(1), version=1)
    receiver.poll_and_apply()
    engines["a"].sleep()
    engines["a"].wake()  # its buffer is lost for good: every update of it fails
    receiver.follow()
    began = time.monotonic()
    for number in range(2, 12):
        with pytest.raises(ws.ReceiverError, match=r"'a'.*rope"):
            sender.update_weights(weights(number), version=number, wait="applied", timeout=WAIT)
        assert_holds(engines["b"], weights(number))
    assert time.monotonic() - began < 8  # the pauses alone would be minutes


def test_weights_of_one_that_slept_are_brought_back_without_the_others(ends):
    engines = replicas(2)
    sender, receiver = attached(ends, ws.Replicas(engines))
    sender.update_weights(weights(1), version=1)
    engines["a"].sleep()
    engines["a"].wake()
    engines["b"].calls.clear()
    assert not receiver.ready
    receiver.require_ready("b")
    with pytest.raises(ws.EngineUnusableError, match="'a' lost its weights in sleep"):
        receiver.require_ready("a")
    assert receiver.poll_and_apply().version.number == 1
    assert engines["b"].calls == []
    assert_holds(engines["a"], weights(1))
    assert receiver.ready


def test_an_engine_that_does_not_say_whether_it_slept_is_not_ready(ends):
    class Mute(FakeEngine):
        def lost_weights(self):
            raise ConnectionError("no answer")

    engine = Mute({"w": (2,)})
    sender, receiver = attached(ends, engine)
    sender.update_weights({"w": weights(1)["norm"][:2]}, version=1)
    assert not receiver.ready
    with pytest.raises(ws.EngineUnusableError):
        receiver.require_ready()


def test_verification_names_the_engine_and_those_that_hold_another_version(ends):
    engines = replicas(3)
    sender, receiver = attached(ends, ws.Replicas(engines))
    sender.update_weights(weights(1), version=1)
    engines["b"].fail["load"] = RuntimeError("bad shard")
    with pytest.raises(ws.ReceiverError):
        sender.update_weights(weights(2), version=2)
    engines["c"].part("k_proj").zero_()
    found = receiver.verify_weights()
    assert found.different == ("c: k_proj",)
    assert found.unchecked == (f"b: all of it, as it holds {receiver.version}",)
    assert not found.ok


def test_reports_speak_of_the_engines_of_this_update_only(ends):
    engines = replicas(2)
    sender, receiver = attached(ends, ws.Replicas(engines))
    engines["a"].during_load = lambda name: time.sleep(0.02)
    first = sender.update_weights(weights(1), version=1)
    assert first.seconds.pause >= 0.1
    engines["a"].during_load = lambda name: None
    engines["b"].sleep()
    assert receiver.poll_and_apply().seconds.pause < 0.1
