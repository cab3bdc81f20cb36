"""For tests of schemes, engines and training loops, ours and other people's."""

from __future__ import annotations

from weightsync.testing.fake_engine import FakeEngine, flip_bit

__all__ = ["FakeEngine", "flip_bit"]
