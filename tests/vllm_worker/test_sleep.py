"""What sleep takes from a worker, on a stand-in for one: vLLM's CPU build does not sleep."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from weightsync.vllm_worker.sleep import watch

pytestmark = pytest.mark.vllm


class Layer(nn.Module):
    def __init__(self, value, shared=None):
        super().__init__()
        self.weight = shared or nn.Parameter(torch.full((3,), value))
        self.register_buffer("table", torch.full((2,), value))
        self.workspace = torch.full((4,), value)
        packed = torch.full((5,), value)
        self.kernel = lambda x: x + packed
        self.stacked = (torch.full((6,), value),)


class Worker:
    """Sleeps as vLLM's does: keeps the model's buffers at level 2, and nothing else."""

    device = torch.device("cpu")

    def __init__(self, draft=False):
        self.model = Layer(1.0)
        drafter = Layer(2.0) if draft else None
        self.model_runner = SimpleNamespace(
            get_model=lambda: self.model, get_draft_model=lambda: drafter
        )
        self.draft = drafter
        self._buffers = {}
        self._weights = []

    def everything(self):
        for model in filter(None, (self.model, self.draft)):
            (packed,) = [cell.cell_contents for cell in model.kernel.__closure__]
            yield from (model.weight.data, model.table, model.workspace, packed, model.stacked[0])

    def sleep(self, level=1):
        self._weights = [tensor.clone() for tensor in self.everything()] if level == 1 else []
        if level == 2:
            self._buffers = {name: b.clone() for name, b in self.model.named_buffers()}
        for tensor in self.everything():
            tensor.fill_(float("nan"))

    def wake_up(self, tags=None):
        if tags is None or "weights" in tags:
            for tensor, former in zip(self.everything(), self._weights, strict=False):
                tensor.copy_(former)
            for name, buffer in self._buffers.items():
                self.model.get_buffer(name).copy_(buffer)
            self._buffers = {}


def values(model):
    (packed,) = [cell.cell_contents for cell in model.kernel.__closure__]
    return [
        set(t.tolist())
        for t in (model.weight, model.table, model.workspace, packed, *model.stacked)
    ]


def test_light_sleep_loses_nothing_and_is_told_by_what_is_away():
    worker = Worker()
    seen = watch(worker)
    worker.sleep(1)
    assert seen.asleep == {"weights", "kv_cache"}
    worker.wake_up(["weights"])
    assert seen.asleep == {"kv_cache"}
    assert values(worker.model) == 5 * [{1.0}]
    worker.wake_up()
    assert (seen.asleep, seen.lost, seen.deep) == (set(), set(), 0)


def test_s1_after_deep_sleep_the_weights_are_lost_until_they_are_loaded():
    worker = Worker()
    seen = watch(worker)
    worker.sleep(level=2)
    worker.wake_up(tags=["weights"])
    worker.wake_up(tags=["kv_cache"])
    assert seen.lost == {"model"}
    assert worker.model.weight.isnan().all()
    seen.loaded("model")
    assert not seen.lost


def test_b4_what_no_update_brings_back_is_kept_through_deep_sleep():
    """Workspaces, packed copies in closures, stacks of adapters: neither parameters nor buffers."""
    worker = Worker()
    watch(worker)
    worker.sleep(2)
    worker.wake_up(["kv_cache"])
    assert worker.model.workspace.isnan().all()  # its memory is not there yet
    worker.wake_up(["weights"])
    assert values(worker.model)[1:] == 4 * [{1.0}]


def test_a_draft_model_that_updates_leave_alone_sleeps_without_harm():
    worker = Worker(draft=True)
    seen = watch(worker)
    worker.sleep(2)
    worker.wake_up()
    assert values(worker.draft) == 5 * [{2.0}]
    assert seen.lost == {"model"}


def test_a_draft_model_that_is_a_target_is_lost_like_the_model():
    worker = Worker(draft=True)
    seen = watch(worker)
    seen.targets = frozenset({"model", "draft"})
    worker.sleep(2)
    worker.wake_up()
    assert seen.lost == {"model", "draft"}
    assert worker.draft.weight.isnan().all()
    assert values(worker.draft)[1:] == 4 * [{2.0}]


def test_what_a_draft_shares_with_the_model_is_not_kept():
    """It would be an old weight in a new model."""
    worker = Worker(draft=True)
    worker.draft.weight = worker.model.weight
    watch(worker)
    worker.sleep(2)
    worker.wake_up()
    assert worker.model.weight.isnan().all()


def test_b4_what_cannot_be_put_back_is_named():
    worker = Worker()
    seen = watch(worker)
    worker.sleep(2)
    worker.model.workspace.set_(torch.zeros(9))
    worker.wake_up()
    assert seen.invalid == {"model: .workspace"}


def test_a_second_sleep_while_asleep_changes_nothing():
    worker = Worker()
    seen = watch(worker)
    worker.sleep(2)
    worker.sleep(2)
    worker.wake_up()
    assert seen.deep == 1
    assert values(worker.model)[2:] == 3 * [{1.0}]
