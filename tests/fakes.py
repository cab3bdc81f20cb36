"""Fake engines of one shape, and what is sent to them; what crosses to a device, watched."""

import torch

from tests.conftest import assert_same
from weightsync import upload
from weightsync.chunks import CHUNK
from weightsync.testing import FakeEngine

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


def watched_windows(monkeypatch):
    """The windows that are copied to a device from now on, in turn; each is one chunk long."""
    monkeypatch.setattr(upload, "WINDOW", CHUNK)
    seen, plain = [], upload._Way.copy

    def copy(self, lane, memory, window, base):
        seen.append(window)
        plain(self, lane, memory, window, base)

    monkeypatch.setattr(upload._Way, "copy", copy)
    return seen


def fake(**options):
    return FakeEngine(SHAPES, FUSED, **options)


def weights(seed, order=tuple(SHAPES)):
    generator = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {name: made[name] for name in order}


def holds(engine, sent):
    """Whether an engine has exactly what was sent."""
    try:
        assert_holds(engine, sent)
    except AssertionError:
        return False
    return True


def assert_holds(engine, sent):
    for name, tensor in sent.items():
        assert_same(engine.part(name), tensor)


def attached(ends, engine, slots=2, **options):
    """A sender, and a receiver that it drives."""
    scheme = ends.scheme(slots=slots)
    sender = ends.sender(scheme=scheme)
    receiver = ends.receiver(engine, scheme=scheme, **options)
    sender.attach(receiver)
    return sender, receiver
