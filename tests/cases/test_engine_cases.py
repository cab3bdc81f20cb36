"""Cases about engines, on the fake one: buffers, fusion, layouts, sleep, caches, requests."""

import copy

import pytest
import torch
from torch import nn

import weightsync as ws
from tests.conftest import assert_same
from weightsync.deadline import Deadline
from weightsync.testing import FakeEngine, flip_bit

SHAPES = {
    "embed": (10, 8),
    "q_proj": (16, 8),  # 4 heads of 4
    "k_proj": (8, 8),  # 2 heads of 4
    "v_proj": (8, 8),
    "gate_proj": (12, 8),
    "up_proj": (12, 8),
    "norm": (8,),
}
FUSED = {"qkv": ("q_proj", "k_proj", "v_proj"), "gate_up": ("gate_proj", "up_proj")}


def weights(seed, order=tuple(SHAPES)):
    generator = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {name: made[name] for name in order}


def attached(ends, engine, **options):
    sender = ends.sender()
    receiver = ends.receiver(engine, **options)
    sender.attach(receiver)
    return sender, receiver


def assert_holds(engine, sent):
    for name, tensor in sent.items():
        assert_same(engine.part(name), tensor)


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


@pytest.mark.parametrize("step", ["check", "stage", "pause", "start", "load", "finish", "label"])
def test_c1_p10_a_failure_at_any_step_leaves_the_last_good_version(ends, step):
    engine = FakeEngine(SHAPES, FUSED)
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
    engine = FakeEngine(SHAPES, FUSED)
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
    engine = FakeEngine(SHAPES, FUSED)
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
    engine = FakeEngine(SHAPES, FUSED)
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
    engine = FakeEngine(SHAPES, FUSED)
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
    engine = FakeEngine(SHAPES, FUSED)
    sender, receiver = attached(ends, engine)
    sender.update_weights(weights(1), version=1)
    engine.fail["resume"] = [RuntimeError("stuck")] * 3
    with pytest.raises(ws.ReceiverError, match="stuck"):
        sender.update_weights(weights(2), version=2)
    assert (receiver.status().state, receiver.version) == ("unusable", None)
    sender.update_weights(weights(3), version=3)
    assert_holds(engine, weights(3))
