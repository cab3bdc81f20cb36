"""How a group is let go; NCCL's own is a stand-in here, which says what was asked of it."""

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch

from weightsync.schemes.nccl import group
from weightsync.schemes.nccl.group import Group

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


class Stuck:
    """Of NCCL: orderly ends wait for a member that is dead."""

    def __init__(self, aborts=True):
        self.asked = []
        self._aborts = aborts

    def shutdown(self):
        self.asked.append("shutdown")
        raise AssertionError("this would wait for ever")

    def abort(self):
        self.asked.append("abort")
        if not self._aborts:
            raise RuntimeError("no abort")


def group_of(backend, device=GPU, works=()):
    made = Group.__new__(Group)
    made.size, made._device, made._group, made._works = 2, device, backend, list(works)
    return made


@pytest.mark.parametrize("works", [(), (object(),)], ids=["at rest", "under way"])
def test_a_group_on_gpus_is_aborted_whatever_its_state(works):
    backend = Stuck()
    leaving = group_of(backend, works=works)
    assert leaving.leave()
    assert backend.asked == ["abort"]
    assert leaving.leave()
    assert backend.asked == ["abort"]


def test_a_group_that_was_not_aborted_is_not_said_to_be_over():
    assert not group_of(Stuck(aborts=False)).leave()


def test_a_group_at_rest_on_cpus_ends_orderly():
    class Gloo:
        asked = False

        def shutdown(self):
            self.asked = True

    backend = Gloo()
    assert group_of(backend, CPU).leave()
    assert backend.asked


def test_a_group_is_let_go_where_no_thread_begins_any_more(monkeypatch):
    """Python 3.12 and later start none once the interpreter ends."""

    def refuse(self):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    kept = []
    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(group, "_keep", kept.extend)
    backend = Stuck()
    assert not group_of(backend).leave()
    assert kept == [backend]


def test_what_is_left_while_the_interpreter_ends_is_not_destroyed(monkeypatch):
    kept = []
    monkeypatch.setattr(group, "_keep", kept.extend)
    monkeypatch.setattr(group, "_ending", threading.Event())
    group._ending.set()
    backend = Stuck()
    assert group_of(backend).leave()
    for thread in list(group._leaving):
        thread.join(5)
    assert kept == [backend]


def test_connections_are_those_of_what_is_used_and_made_at_set_up(monkeypatch):
    """Or the first bucket would wait for its members in NCCL, where no deadline holds."""
    asked = []

    class NCCL:
        class Options:
            def __init__(self, is_high_priority_stream=False):
                asked.append(("high priority", is_high_priority_stream))

        def __init__(self, store, rank, size, options):
            pass

        def __getattr__(self, kind):
            def collective(tensors, options=None):
                asked.append((kind, len(tensors[0])))
                return SimpleNamespace(is_completed=lambda: True, wait=lambda: None)

            return collective

    monkeypatch.setattr(group.dist, "ProcessGroupNCCL", NCCL, raising=False)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    made = Group("nccl", torch.distributed.HashStore(), "key", 0, 2, "", CPU, 1.0)
    assert asked == [("high priority", True), ("broadcast", 1)]
    made.settle(made.broadcast(torch.zeros(3)))
    assert asked[2:] == [("broadcast", 3)]
