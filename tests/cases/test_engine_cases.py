"""Cases about engines, on the fake one: buffers, fusion, layouts, sleep, caches, requests.

Those about updates that fail are in ``test_engine_cases_failures.py``.
"""

import pytest
import torch
from torch import nn

import weightsync as ws
from tests.conftest import assert_same
from tests.fakes import FUSED, SHAPES, assert_holds, attached, fake, weights
from weightsync.deadline import Deadline
from weightsync.testing import FakeEngine, flip_bit


def test_b4_buffers_lost_in_sleep_are_reported_by_name_before_resume(ends):
    engine = FakeEngine(SHAPES, FUSED, buffers={"rope": torch.arange(4.0)})
    sender, receiver = attached(ends, engine)
    sender.update_weights(weights(1), version=1)
    engine.sleep()
    engine.wake()
    with pytest.raises(ws.EngineError, match="rope"):
        receiver.poll_and_apply()
    assert receiver.status().state == "unusable"
    assert not receiver.ready
    assert engine.calls[-1] == "resume"
    assert engine.version_label is None


def test_b4_buffers_that_the_engine_backs_up_are_right_again(ends):
    engine = FakeEngine(SHAPES, FUSED, buffers={"rope": torch.arange(4.0)}, backs_up=True)
    sender, receiver = attached(ends, engine)
    sender.update_weights(weights(1), version=1)
    before = engine.generate([1])
    engine.sleep()
    engine.wake()
    assert receiver.poll_and_apply().version.number == 1
    assert engine.generate([1]) == before
    assert_same(engine.buffers["rope"], torch.arange(4.0))


@pytest.mark.parametrize("order", [("k_proj", "v_proj", "q_proj"), ("v_proj", "q_proj", "k_proj")])
def test_m4_parts_of_a_fused_weight_in_any_order_and_only_one_of_them(ends, order):
    engine = FakeEngine(SHAPES, FUSED, strict=False)
    rest = [name for name in SHAPES if name not in order]
    sender, _ = attached(ends, engine)
    first = weights(1, (order[0], *rest[:2], order[1], *rest[2:], order[2]))
    sender.update_weights(first, version=1)
    assert_holds(engine, first)
    only = {"q_proj": torch.full(SHAPES["q_proj"], 7.0)}
    report = sender.update_weights(only, version=2)
    assert report.tensors == 1
    assert_holds(engine, {**first, **only})


def test_m4_half_a_fused_weight_is_refused_where_the_engine_is_strict(ends):
    engine = FakeEngine(SHAPES, FUSED)
    sender, receiver = attached(ends, engine)
    first = weights(1)
    sender.update_weights(first, version=1)
    with pytest.raises(ws.ReceiverError, match="k_proj"):
        sender.update_weights({"q_proj": torch.zeros(SHAPES["q_proj"])}, version=2)
    assert_holds(engine, first)
    assert receiver.version.number == 1
    assert "pause" not in engine.calls[engine.calls.index("resume") :]  # never touched


def test_q1_q5_a_parameter_replaced_and_laid_out_anew_takes_every_update(ends):
    engine = FakeEngine(SHAPES, FUSED, relaid=("qkv", "embed"))
    sender, _ = attached(ends, engine)
    for number in range(1, 4):
        engine.calls.clear()
        sent = weights(number)
        sender.update_weights(sent, version=number)
        assert engine.parameters["embed"].shape == (8, 10)
        assert_holds(engine, sent)
        assert (engine.calls.count("start"), engine.calls.count("finish")) == (1, 1)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda e: flip_bit(e.parameters["norm"], 9, 3), {"norm"}),
        (
            lambda e: e.parameters.update(gate_up=e.parameters["gate_up"].roll(12, 0)),
            {"gate_proj", "up_proj"},
        ),
        (lambda e: e.part("v_proj").copy_(weights(1)["v_proj"]), {"v_proj"}),
    ],
    ids=["flipped bit", "gate and up swapped", "one stale tensor"],
)
def test_q4_verify_finds_and_names_what_the_engine_holds_wrongly(ends, damage, named):
    engine = FakeEngine(SHAPES, FUSED)
    sender, receiver = attached(ends, engine)
    sender.update_weights(weights(1), version=1)
    sent = weights(2)
    sent["norm"][3] = float("nan")
    sender.update_weights(sent, version=2)
    assert receiver.verify_weights().ok
    damage(engine)
    found = receiver.verify_weights()
    assert set(found.different) == named
    assert not found.ok


class Answering(FakeEngine):
    """One whose tensors nobody can look at."""

    def verify(self, update):
        names = tuple(update.snapshot.manifest.by_name)
        return ws.Verification(update.version, 0, (), names)

    def answers(self):
        return self.generate([1, 2])


@pytest.mark.parametrize("stale", [False, True])
def test_q4_an_engine_that_cannot_be_looked_into_is_judged_by_its_answers(ends, stale):
    engine = Answering(SHAPES, FUSED)
    sender, receiver = attached(ends, engine)
    sender.update_weights(weights(1), version=1)
    if stale:
        flip_bit(engine.parameters["norm"], 9, 3)
    assert receiver.verify_weights().answers is None
    found = receiver.verify_weights(answers=True)
    assert found.answers is not stale
    assert found.ok is not stale
    assert set(found.unchecked) == set(SHAPES)
    assert_holds(engine, weights(1))


def test_q4_nan_payloads_are_compared_by_bits(ends):
    one = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    engine = FakeEngine({"w": (1,)})
    sender, receiver = attached(ends, engine)
    sender.update_weights({"w": one}, version=1)
    assert receiver.verify_weights().ok
    flip_bit(engine.parameters["w"], 0, 1)
    assert engine.parameters["w"].isnan().all()
    assert receiver.verify_weights().different == ("w",)


def test_s1_weights_lost_in_sleep_are_applied_again_whatever_the_step(ends):
    engine = FakeEngine(SHAPES, FUSED)
    sender, receiver = attached(ends, engine)
    sent = weights(5)
    sender.update_weights(sent, version=5)
    answer = engine.generate([1, 2])
    engine.sleep()
    engine.wake()
    assert not receiver.ready
    with pytest.raises(ws.EngineUnusableError, match="sleep"):
        receiver.require_ready()
    sender.update_weights(sent, version=5)
    assert receiver.ready
    assert_holds(engine, sent)
    assert engine.generate([1, 2]) == answer


def test_s1_a_polling_receiver_applies_the_same_version_again_after_sleep(ends):
    engine = FakeEngine(SHAPES, FUSED)
    sender = ends.sender(weights(5))
    receiver = ends.receiver(engine)
    sender.update_weights(version=5)
    assert receiver.poll_and_apply().version.number == 5
    assert receiver.poll_and_apply() is None
    engine.sleep()
    assert receiver.poll_and_apply().version.number == 5
    assert_holds(engine, weights(5))


def test_k1_no_answer_comes_out_of_a_cache_of_old_weights(ends):
    engine = FakeEngine(SHAPES, FUSED)
    sender, _ = attached(ends, engine)
    sender.update_weights(weights(1), version=1)
    old = engine.generate([1, 2, 3])
    engine.calls.clear()
    sender.update_weights(weights(2), version=2)
    new = engine.generate([1, 2, 3])
    engine.flush(Deadline(0))
    assert new == engine.generate([1, 2, 3]) != old
    steps = engine.calls
    assert steps.index("load") < steps.index("flush") < steps.index("label")
    assert steps.index("label") < steps.index("resume")


def test_k1_a_flush_that_fails_fails_the_update_and_the_old_version_comes_back(ends):
    engine = FakeEngine(SHAPES, FUSED)
    sender, receiver = attached(ends, engine)
    first = weights(1)
    sender.update_weights(first, version=1)
    engine.fail["flush"] = ws.EngineError("blocks are in use")
    with pytest.raises(ws.ReceiverError, match="blocks are in use"):
        sender.update_weights(weights(2), version=2)
    assert_holds(engine, first)
    assert engine.version_label.number == 1 == receiver.version.number
    assert receiver.status().state == "rolled back"


def test_f1_kept_requests_are_neither_aborted_nor_labelled_early(ends):
    engine = FakeEngine(SHAPES, FUSED, mode="keep")
    engine.running = 16
    sender, _ = attached(ends, engine)
    engine.calls.clear()
    sender.update_weights(weights(1), version=1)
    assert (engine.running, engine.aborted) == (16, 0)
    assert engine.calls == [
        "check", "stage", "pause", "start", "load", "finish", "flush", "label", "resume",
    ]  # fmt: skip


def test_f1_abort_is_done_only_where_it_was_asked_for(ends):
    engine = FakeEngine(SHAPES, FUSED, mode="abort")
    engine.running = 16
    sender, _ = attached(ends, engine)
    sender.update_weights(weights(1), version=1)
    assert (engine.running, engine.aborted) == (0, 16)


# -------------------------------------------------------------------- more of each kind


def test_b4_every_lost_buffer_is_named_at_every_update_until_the_engine_has_it_again(ends):
    buffers = {"rope": torch.arange(4.0), "mask": torch.ones(2)}
    engine = fake(buffers=buffers)
    sender, receiver = attached(ends, engine)
    sender.update_weights(weights(1), version=1)
    engine.sleep()
    engine.wake()
    for number in (2, 3):
        with pytest.raises(ws.ReceiverError, match=r"mask, rope"):
            sender.update_weights(weights(number), version=number)
        assert receiver.state == "unusable"
        with pytest.raises(ws.EngineUnusableError, match="rope"):
            receiver.guard().generate([1])
    engine.restore({"rope": torch.arange(4.0), "mask": torch.ones(2)})  # by its user, say
    sender.update_weights(weights(4), version=4)
    assert receiver.ready
    assert receiver.guard().generate([1])


def test_b4_an_engine_that_never_slept_is_not_held_up_by_one_that_lost_its_buffers(ends):
    engines = {
        "a": fake(buffers={"rope": torch.ones(2)}),
        "b": fake(buffers={"rope": torch.ones(2)}),
    }
    sender, receiver = attached(ends, ws.Replicas(engines))
    sender.update_weights(weights(1), version=1)
    engines["b"].sleep()
    engines["b"].wake()
    with pytest.raises(ws.ReceiverError, match=r"engine 'b'.*rope"):
        sender.update_weights(weights(2), version=2)
    assert_holds(engines["a"], weights(2))
    receiver.require_ready("a")


def test_f1_requests_go_on_after_the_update_and_new_ones_wait_for_its_end(ends):
    engine = fake(mode="keep")
    sender, _ = attached(ends, engine)
    sender.update_weights(weights(1), version=1)
    for prompt in range(16):
        engine.begin([prompt])
    engine.advance(5)

    def meanwhile(name):
        engine.advance(3)  # paused: nobody gets a token
        if name == "norm":
            engine.begin([99])

    engine.during_load = meanwhile
    sender.update_weights(weights(2), version=2)
    engine.advance(2)
    assert [len(request.versions) for request in engine.requests] == [*[7] * 16, 2]
    assert not any(request.aborted for request in engine.requests)


def test_f1_aborted_requests_are_marked_and_new_ones_are_not(ends):
    engine = fake(mode="abort")
    sender, _ = attached(ends, engine)
    old = engine.begin([1])
    sender.update_weights(weights(1), version=1)
    new = engine.begin([2])
    engine.advance(1)
    assert (old.aborted, old.versions) == (True, [])
    assert (new.aborted, len(new.versions)) == (False, 1)


def test_f3_an_answer_says_which_version_each_token_is_of(ends):
    engine = fake()
    sender, _ = attached(ends, engine)
    seven = sender.update_weights(weights(7), version=7).version
    request = engine.begin([1, 2])
    engine.advance(57)
    eight = sender.update_weights(weights(8), version=8).version
    engine.advance(71)
    assert request.spans() == [(seven, 57), (eight, 71)]


def test_f3_a_version_that_was_rolled_back_is_in_no_answer(ends):
    engine = fake()
    sender, _ = attached(ends, engine)
    seven = sender.update_weights(weights(7), version=7).version
    request = engine.begin([1, 2])
    engine.advance(10)
    for step in ("load", "finish", "flush", "label"):
        engine.fail[step] = RuntimeError(step)
        with pytest.raises(ws.ReceiverError):
            sender.update_weights(weights(8))
        engine.advance(10)
    assert request.spans() == [(seven, 50)]


def test_f3_tokens_of_an_unusable_engine_claim_no_version(ends):
    engine = fake()
    sender, receiver = attached(ends, engine)
    seven = sender.update_weights(weights(7), version=7).version
    request = engine.begin([1, 2])
    engine.advance(3)
    engine.fail["load"] = [RuntimeError("bad shard")] * 2
    with pytest.raises(ws.ReceiverError):
        sender.update_weights(weights(8), version=8)
    engine.advance(2)
    nine = sender.update_weights(weights(9), version=9).version
    engine.advance(4)
    assert request.spans() == [(seven, 3), (None, 2), (nine, 4)]
    assert receiver.ready


def test_k1_a_flush_that_is_confirmed_at_the_third_try_is_waited_for(ends):
    engine = fake()
    sender, _ = attached(ends, engine)
    sender.update_weights(weights(1), version=1)
    old = engine.generate([1, 2, 3])
    engine.unconfirmed = 2
    sender.update_weights(weights(2), version=2)
    assert engine.unconfirmed == 0
    assert engine.generate([1, 2, 3]) != old


def test_k1_a_flush_that_is_never_confirmed_leaves_nothing_that_answers(ends):
    engine = fake()
    sender, receiver = attached(ends, engine, apply_timeout=0.2)
    sender.update_weights(weights(1), version=1)
    old = engine.generate([1, 2, 3])
    engine.unconfirmed = 10**9
    with pytest.raises(ws.ReceiverError, match=r"did not confirm.*rolling back.*did not confirm"):
        sender.update_weights(weights(2), version=2, timeout=0.2)
    assert (receiver.state, engine.version_label) == ("unusable", None)
    with pytest.raises(ws.EngineUnusableError, match="did not confirm"):
        receiver.guard().generate([1, 2, 3])
    engine.unconfirmed = 0
    sender.update_weights(weights(3), version=3)
    assert receiver.guard().generate([1, 2, 3]) != old


def test_k1_what_was_cached_of_a_version_is_gone_when_the_same_one_is_loaded_again(ends):
    """After a rollback the cache is flushed as well: it may hold what half a load computed."""
    engine = fake()
    sender, _ = attached(ends, engine)
    sender.update_weights(weights(1), version=1)
    engine.generate([1])
    engine.calls.clear()
    engine.fail["finish"] = RuntimeError("out of memory")
    with pytest.raises(ws.ReceiverError):
        sender.update_weights(weights(2), version=2)
    steps = engine.calls
    assert steps.index("flush") > steps.index("finish")
    assert steps[-3:] == ["flush", "label", "resume"]


def test_s1_sleep_in_the_middle_of_an_update_means_another_one(ends):
    engine = fake()
    sender, receiver = attached(ends, engine)
    sender.update_weights(weights(1), version=1)

    def doze(name):
        if name == "v_proj":
            engine.during_load = lambda name: None
            engine.sleep()

    engine.during_load = doze
    sender.update_weights(weights(2), version=2)
    assert not receiver.ready
    with pytest.raises(ws.EngineUnusableError, match="sleep"):
        receiver.guard().generate([1])
    engine.wake()
    assert receiver.poll_and_apply().version.number == 2
    assert receiver.ready
    assert_holds(engine, weights(2))


def test_s1_sleep_before_the_first_update(ends):
    engine = fake()
    engine.sleep()
    sender, receiver = attached(ends, engine)
    engine.wake()
    sender.update_weights(weights(1), version=1)
    assert receiver.ready
    assert_holds(engine, weights(1))


def test_s1_sleep_while_only_an_older_version_can_be_had(ends):
    """The newest version failed, and the engine was rolled back; then it sleeps."""
    engine = fake()
    sender, receiver = attached(ends, engine, slots=3)
    sender.update_weights(weights(1), version=1)
    engine.fail["load"] = RuntimeError("bad shard")
    with pytest.raises(ws.ReceiverError):
        sender.update_weights(weights(2), version=2)
    engine.sleep()
    engine.wake()
    assert not receiver.ready
    assert receiver.poll_and_apply().version.number == 2
    assert_holds(engine, weights(2))


def test_m4_a_failure_between_the_parts_of_a_fused_weight_leaves_no_half_of_it(ends):
    engine = fake()
    sender, receiver = attached(ends, engine)
    sender.update_weights(weights(1), version=1)
    for name in ("k_proj", "v_proj", "up_proj"):

        def stumble(at, name=name):
            if at == name:
                engine.during_load = lambda name: None
                raise KeyError(name)

        engine.during_load = stumble
        with pytest.raises(ws.ReceiverError, match=name):
            sender.update_weights(weights(2))
        assert_holds(engine, weights(1))
        assert receiver.state == "rolled back"


def test_m4_the_order_of_parts_may_change_from_one_update_to_the_next(ends):
    engine = fake()
    sender, _ = attached(ends, engine)
    names = list(SHAPES)
    for number in range(1, 6):
        names = names[3:] + names[:3]
        sender.update_weights(weights(number, names), version=number)
        assert_holds(engine, weights(number))


@pytest.mark.parametrize("step", ["start", "load", "finish", "flush"])
def test_q1_q5_a_failure_in_any_layout_is_rolled_back_in_the_right_one(ends, step):
    engine = fake(relaid=("qkv", "embed"))
    sender, _ = attached(ends, engine)
    sender.update_weights(weights(1), version=1)
    engine.fail[step] = RuntimeError("out of memory")
    with pytest.raises(ws.ReceiverError, match="out of memory"):
        sender.update_weights(weights(2), version=2)
    assert engine.parameters["embed"].shape == (8, 10)
    assert_holds(engine, weights(1))
    sender.update_weights(weights(3), version=3)
    assert_holds(engine, weights(3))


def test_q1_an_engine_that_failed_between_two_layouts_takes_the_next_update(ends):
    engine = fake(relaid=("qkv", "gate_up", "embed"))
    sender, receiver = attached(ends, engine)
    sender.update_weights(weights(1), version=1)
    engine.fail["finish"] = [RuntimeError("out of memory")] * 2
    with pytest.raises(ws.ReceiverError):
        sender.update_weights(weights(2), version=2)
    assert receiver.state == "unusable"
    sender.update_weights(weights(3), version=3)
    assert_holds(engine, weights(3))
    assert receiver.verify_weights().ok


def test_q4_a_flipped_bit_in_a_weight_that_is_laid_out_anew(ends):
    engine = fake(relaid=("embed",))
    sender, receiver = attached(ends, engine)
    sender.update_weights(weights(1), version=1)
    assert receiver.verify_weights().ok
    flip_bit(engine.parameters["embed"], 17, 5)
    assert receiver.verify_weights().different == ("embed",)


def test_q4_what_cannot_be_compared_is_listed_and_not_ok(ends):
    engine = fake(strict=False)
    sender, receiver = attached(ends, engine)
    sender.update_weights({**weights(1), "extra": torch.ones(3)}, version=1)
    found = receiver.verify_weights()
    assert (found.different, found.unchecked, found.ok) == ((), ("extra",), False)


def test_e1_addresses_stay_through_updates_failures_and_rollbacks(ends):
    engine = fake()
    module = nn.Linear(3, 3)
    module.weight.tag = "kept"
    sender, _ = attached(ends, engine)
    before = {name: (id(t), t.data_ptr()) for name, t in engine.parameters.items()}
    for number in range(1, 7):
        if number in (2, 4):  # rolled back, and not even that
            engine.fail["finish"] = [RuntimeError("out of memory")] * (number // 2)
            with pytest.raises(ws.ReceiverError):
                sender.update_weights(weights(number), version=number)
        else:
            sender.update_weights(weights(number), version=number)
    assert {name: (id(t), t.data_ptr()) for name, t in engine.parameters.items()} == before
    assert module.weight.tag == "kept"


def test_e1_modules_of_several_replicas_keep_addresses_and_attributes(ends):
    modules = {name: nn.Linear(3, 3) for name in "ab"}
    for module in modules.values():
        module.weight.tag = "kept"
    before = {n: (id(m.weight), m.weight.data_ptr()) for n, m in modules.items()}
    sender, _ = attached(ends, ws.Replicas(modules))
    for number in range(1, 4):
        sent = {"weight": torch.full((3, 3), float(number)), "bias": torch.ones(3)}
        sender.update_weights(sent, version=number)
    assert {n: (id(m.weight), m.weight.data_ptr()) for n, m in modules.items()} == before
    for module in modules.values():
        assert module.weight.tag == "kept"
        assert module.weight.eq(3).all()
        assert module.weight.requires_grad
