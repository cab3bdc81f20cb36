"""A module, or a mapping of tensors, as an engine (promise 8: in place)."""

import pytest
import torch
from torch import nn

import weightsync as ws
from tests.conftest import as_bytes, assert_all_same, assert_same, copy_of


def update(ends, weights, target, **options):
    """Send weights into a target once; its report."""
    ends.sender(weights).update_weights(version=1)
    return ends.receiver(target, **options).poll_and_apply()


def unchanged(target):
    """Remembers a mapping's bytes; the returned function checks them."""
    before = {name: copy_of(tensor) for name, tensor in target.items()}
    return lambda: assert_all_same(target, before)


def test_a_mapping(ends):
    target = {"a": torch.zeros(2), "b": torch.zeros(3, dtype=torch.int64)}
    report = update(ends, {"b": torch.arange(3), "a": torch.ones(2)}, target)
    assert target["a"].tolist() == [1, 1]
    assert target["b"].tolist() == [0, 1, 2]
    assert report.tensors == 2
    assert report.nbytes == 2 * 4 + 3 * 8


def test_a_parameter_stays_a_leaf(ends):
    model = nn.Linear(2, 3)
    model.bias.requires_grad_(False)
    model.weight.grad = torch.full((3, 2), 5.0)
    update(ends, {"weight": torch.ones(3, 2), "bias": torch.ones(3)}, model)
    assert model.weight.eq(1).all()
    assert (model.weight.requires_grad, model.bias.requires_grad) == (True, False)
    assert model.weight.is_leaf
    assert model.weight.grad.eq(5).all()
    model(torch.ones(1, 2)).sum().backward()


def test_the_graph_of_an_earlier_forward_pass_does_not_forbid_it(ends):
    model = nn.Linear(2, 2)
    loss = model(torch.ones(1, 2)).sum()
    update(ends, {"weight": torch.ones(2, 2), "bias": torch.ones(2)}, model)
    assert model.weight.eq(1).all()
    del loss


@pytest.mark.parametrize("strided", [False, True])
def test_a_module_made_under_inference_mode(ends, strided):
    """M2: it refuses ``copy_`` outside."""
    with torch.inference_mode():
        model = nn.Linear(3, 2)
        if strided:
            model.weight = nn.Parameter(torch.zeros(3, 2).t(), requires_grad=False)
    assert model.weight.is_inference()
    update(ends, {"weight": torch.full((2, 3), 4.0), "bias": torch.ones(2)}, model)
    assert model.weight.eq(4).all()
    assert model.bias.eq(1).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(4, 3).t(),
        lambda: torch.zeros(3, 8)[:, ::2],
        lambda: torch.zeros(30)[1::2][:12].view(3, 4),
        lambda: torch.zeros(2, 3, 4)[1],
        lambda: torch.zeros(100)[1:13].view(3, 4),
    ],
)
def test_strided_targets(ends, make):
    target = make()
    base = target._base if target._base is not None else target
    sent = torch.arange(1.0, 13).view(3, 4)
    update(ends, {"w": sent}, {"w": target})
    assert_same(target.contiguous(), sent)
    assert base.count_nonzero() == 12  # and nothing beside it


def test_odd_addresses(ends):
    """A view at an address that no dtype would be aligned to."""
    store = torch.zeros(50, dtype=torch.uint8)
    target = store[3:23]
    update(ends, {"w": torch.arange(20, dtype=torch.uint8)}, {"w": target})
    assert store.tolist() == [0] * 3 + list(range(20)) + [0] * 27


def test_an_expanded_target_is_refused_by_name_before_anything_changes(ends):
    """Several elements of it are one place in memory."""
    target = {"a": torch.zeros(2), "w": torch.zeros(1).expand(4)}
    same = unchanged(target)
    with pytest.raises(ws.WeightSyncError, match="'w'"):
        update(ends, {"a": torch.ones(2), "w": torch.arange(4.0)}, target)
    same()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(4, device="meta"),
        lambda: nn.UninitializedParameter(),
        lambda: torch.zeros(4).to_sparse(),
    ],
    ids=["meta", "lazy", "sparse"],
)
def test_a_target_without_memory_is_refused_by_name(ends, make):
    """Not reported as applied: there is nowhere to write to."""
    target = {"a": torch.zeros(2), "w": make()}
    with pytest.raises(ws.WeightSyncError, match="'w'"):
        update(ends, {"a": torch.ones(2), "w": torch.arange(4.0)}, target)
    assert target["a"].tolist() == [0, 0]


def test_something_that_is_no_tensor(ends):
    with pytest.raises(ws.EngineError, match="'note'"):
        update(ends, {"a": torch.ones(1)}, {"a": torch.ones(1), "note": 5})


def test_extra_state_is_left_alone(ends):
    model = nn.Linear(2, 2)
    model.get_extra_state = lambda: {"note": 5}
    model.set_extra_state = lambda state: None
    update(ends, {"weight": torch.ones(2, 2), "bias": torch.ones(2)}, model)
    assert model.weight.eq(1).all()


class TestStrict:
    """N7 and its kind."""

    def test_missing_and_unexpected(self, ends):
        target = {"both": torch.zeros(2), "here": torch.zeros(2), "here too": torch.zeros(0)}
        same = unchanged(target)
        sent = {"both": torch.ones(2), "there": torch.ones(2)}
        with pytest.raises(ws.MismatchError, match=r"'here'.*'there'") as caught:
            update(ends, sent, target)
        assert caught.value.missing == ("here", "here too")
        assert caught.value.unexpected == ("there",)
        same()

    def test_not_strict(self, ends):
        target = {"both": torch.zeros(2), "here": torch.zeros(2)}
        sent = {"both": torch.ones(2), "there": torch.ones(2)}
        report = update(ends, sent, target, strict=False)
        assert report.missing == ("here",)
        assert report.unexpected == ("there",)
        assert target["both"].tolist() == [1, 1]
        assert target["here"].tolist() == [0, 0]

    def test_nothing_in_common(self, ends):
        """Also without ``strict``: an update that would write nothing is a mistake."""
        target = {"model.a": torch.zeros(2)}
        with pytest.raises(ws.MismatchError, match=r"model\.a"):
            update(ends, {"a": torch.ones(2)}, target, strict=False)

    @pytest.mark.parametrize("strict", [True, False])
    @pytest.mark.parametrize(
        "other", [torch.zeros(3), torch.zeros(2, 1), torch.zeros(2).half(), torch.zeros(())]
    )
    def test_another_shape_or_dtype(self, ends, strict, other):
        target = {"a": torch.zeros(2), "b": other}
        same = unchanged(target)
        with pytest.raises(ws.MismatchError) as caught:
            update(ends, {"a": torch.ones(2), "b": torch.ones(2)}, target, strict=strict)
        assert set(caught.value.different) == {"b"}
        sent, here = caught.value.different["b"]
        assert sent in str(caught.value)
        assert here in str(caught.value)
        same()

    def test_many_names_make_a_short_message(self, ends):
        target = {f"layer.{n}": torch.zeros(1) for n in range(500)}
        with pytest.raises(ws.MismatchError, match="500 tensors here") as caught:
            update(ends, {"a": torch.ones(1)}, target)
        assert len(str(caught.value)) < 1000
        assert len(caught.value.missing) == 500


class TestCast:
    """D1: dtypes differ only where the user says so."""

    def test_values_are_converted(self, ends):
        sent = {"w": torch.tensor([1.0 + 2**-10, -0.0, float("inf")]), "n": torch.tensor([3])}
        target = {"w": torch.zeros(3, dtype=torch.bfloat16), "n": torch.zeros(1, dtype=torch.int8)}
        update(ends, sent, target, cast=True)
        assert_same(target["w"], sent["w"].bfloat16())
        assert target["n"].tolist() == [3]

    def test_they_verify(self, ends):
        target = {"w": torch.zeros(3, dtype=torch.bfloat16)}
        ends.sender({"w": torch.rand(3)}).update_weights(version=1)
        receiver = ends.receiver(target, cast=True)
        receiver.poll_and_apply()
        assert receiver.verify_weights().ok


class TestPad:
    """E6: the rows that both have."""

    @pytest.mark.parametrize(("there", "here"), [(128, 70), (70, 128)])
    def test_rows(self, ends, there, here):
        sent = torch.rand(there, 4)
        target = {"embed": torch.full((here, 4), 7.0), "w": torch.zeros(2)}
        report = update(ends, {"embed": sent, "w": torch.ones(2)}, target, pad=True)
        assert_same(target["embed"][:70], sent[:70])
        assert target["embed"][70:].eq(7).all()
        assert target["w"].tolist() == [1, 1]
        assert report.missing == report.unexpected == ()

    @pytest.mark.parametrize("here", [(70, 5), (70,), (70, 4, 1), ()])
    def test_only_the_number_of_rows(self, ends, here):
        target = {"embed": torch.zeros(here)}
        same = unchanged(target)
        with pytest.raises(ws.MismatchError, match="embed"):
            update(ends, {"embed": torch.rand(128, 4)}, target, pad=True)
        same()

    def test_with_a_cast(self, ends):
        sent = torch.rand(5, 2)
        target = {"embed": torch.zeros(3, 2, dtype=torch.bfloat16)}
        update(ends, {"embed": sent}, target, pad=True, cast=True)
        assert_same(target["embed"], sent[:3].bfloat16())

    def test_verify(self, ends):
        target = {"embed": torch.full((70, 4), 7.0)}
        ends.sender({"embed": torch.rand(128, 4)}).update_weights(version=1)
        receiver = ends.receiver(target, pad=True)
        receiver.poll_and_apply()
        assert receiver.verify_weights().ok
        target["embed"][69, 3] += 1
        assert receiver.verify_weights().different == ("embed",)

    def test_empty_and_full(self, ends):
        target = {"a": torch.zeros(0, 4), "b": torch.ones(3, 4)}
        update(ends, {"a": torch.ones(3, 4), "b": torch.ones(0, 4)}, target, pad=True)
        assert target["b"].eq(1).all()


class TestVerify:
    """Q4: whatever is different is found, and named."""

    @pytest.fixture
    def receiver(self, ends):
        nan = torch.tensor([0x7F800001, 0x7FC00000, -1]).to(torch.int32).view(torch.float32)
        weights = {
            "gate": torch.rand(4, 4),
            "up": torch.rand(4, 4),
            "nan": nan,
            "flag": torch.tensor(True),
            "strided": torch.rand(4, 6),
            "empty": torch.rand(0),
        }
        target = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        target["strided"] = torch.zeros(6, 4).t()
        ends.sender(weights).update_weights(version=1)
        receiver = ends.receiver(target)
        receiver.poll_and_apply()
        return receiver

    def test_clean(self, receiver):
        found = receiver.verify_weights()
        assert found.ok
        assert found.checked == 6
        assert found.different == found.unchecked == ()
        assert found.version == receiver.version

    @pytest.mark.parametrize("name", ["gate", "up", "nan", "flag", "strided"])
    def test_one_bit(self, receiver, name):
        target = receiver.engine.target[name]
        (target.t() if name == "strided" else target).view(-1).view(torch.uint8)[0] ^= 1
        assert receiver.verify_weights().different == (name,)
        assert not receiver.verify_weights().ok

    def test_swapped(self, receiver):
        target = receiver.engine.target
        target["gate"], target["up"] = target["up"], target["gate"]
        assert set(receiver.verify_weights().different) == {"gate", "up"}

    def test_the_sign_of_zero(self, ends):
        target = {"w": torch.ones(2)}
        ends.sender({"w": torch.zeros(2)}).update_weights(version=1)
        receiver = ends.receiver(target)
        receiver.poll_and_apply()
        target["w"].neg_()
        assert receiver.verify_weights().different == ("w",)


def test_two_sent_for_one_here_that_differ(ends):
    """Promise 2: a tie here of what is no tie there cannot be filled; it must not pick one."""
    shared = torch.zeros(2)
    target = {"embed": shared, "head": shared}
    with pytest.raises(ws.MismatchError, match=r"'embed'.*'head'"):
        update(ends, {"embed": torch.ones(2), "head": torch.zeros(2)}, target)
    assert shared.tolist() == [0, 0]


def test_two_sent_for_one_here_that_are_equal(ends):
    """The tie was lost on the way to the sender (a gathered state dict): no harm done."""
    shared = torch.zeros(2)
    target = {"embed": shared, "head": shared}
    update(ends, {"embed": torch.ones(2), "head": torch.ones(2)}, target)
    assert shared.tolist() == [1, 1]


def test_one_sent_for_two_here(ends):
    """A tie there, none here: both are filled."""
    shared = torch.rand(2)
    target = {"embed": torch.zeros(2), "head": torch.zeros(2)}
    report = update(ends, {"embed": shared, "head": shared}, target)
    assert_same(target["embed"], shared)
    assert_same(target["head"], shared)
    assert report.tensors == 1


def test_only_the_alias_is_here(ends):
    shared = torch.rand(2)
    target = {"head": torch.zeros(2)}
    update(ends, {"embed": shared, "head": shared}, target)
    assert_same(target["head"], shared)


def test_what_was_replaced_between_updates_is_found(ends):
    model = nn.Linear(2, 2)
    weights = {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
    sender, receiver = ends.pair(weights, model)
    sender.update_weights(version=1)
    receiver.poll_and_apply()
    old = model.weight
    model.weight = nn.Parameter(torch.zeros(2, 2))
    sender.update_weights({name: tensor + 1 for name, tensor in weights.items()}, version=2)
    receiver.poll_and_apply()
    assert model.weight.eq(2).all()
    assert old.eq(1).all()
    model.bias.data = torch.zeros(2)
    sender.update_weights({name: tensor + 2 for name, tensor in weights.items()}, version=3)
    receiver.poll_and_apply()
    assert model.bias.eq(3).all()


def test_as_bytes_of_the_sent_ones_are_read_only_in_effect(ends):
    """What a receiver does to its tensors does not reach the slot, nor another receiver."""
    one, other = {"w": torch.zeros(4)}, {"w": torch.zeros(4)}
    ends.sender({"w": torch.ones(4)}).update_weights(version=1)
    ends.receiver(one).poll_and_apply()
    one["w"].fill_(9)
    ends.receiver(other).poll_and_apply()
    assert as_bytes(other["w"]).tolist() == as_bytes(torch.ones(4)).tolist()
