"""What of a GPU as a device can be seen without one."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from weightsync.device import cuda
from weightsync.errors import NoRoomError


@pytest.fixture
def entered(monkeypatch):
    """The devices and streams that are made torch's current ones; stream 1 is."""
    seen = []

    @contextmanager
    def enter(what):
        seen.append(what)
        yield
        seen.append(f"left {what}")

    monkeypatch.setattr(torch.cuda, "device", lambda place: enter(str(place)))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: enter(f"stream {stream.number}"))
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    return seen


def stream(place, number=1):
    return SimpleNamespace(device=torch.device(place), device_index=0, number=number)


@pytest.mark.parametrize("number", [1, 2])
def test_work_has_the_device_of_its_stream_whatever_is_current(entered, number):
    """A thread may have used another GPU before, or none."""
    with cuda._on(stream("cuda:3", number)):
        entered.append("work")
    others = [] if number == 1 else ["stream 2"]
    left = [f"left {what}" for what in others]
    assert entered == ["cuda:3", *others, "work", *left, "left cuda:3"]


def test_a_gpu_that_is_full_is_no_room(entered, monkeypatch):
    def full(*sizes, **options):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(NoRoomError, match="cuda:3 has no room for 800 bytes"):
        cuda.CUDALane(stream("cuda:3", 2)).empty(100)
