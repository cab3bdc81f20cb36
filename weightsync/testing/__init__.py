"""For tests of schemes, engines and training loops, ours and other people's.

:class:`FakeEngine` is an engine in miniature. :class:`SchemeConformance` is a suite of tests that
every scheme passes, and each class of it one part; :mod:`~weightsync.testing.faults` makes things
go wrong. The suite needs pytest; the fake engine does not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from weightsync.testing.fake_engine import FakeEngine, flip_bit

if TYPE_CHECKING:
    from weightsync.testing.conformance import Configuration as Configuration
    from weightsync.testing.conformance import Hostile as Hostile
    from weightsync.testing.conformance import Leases as Leases
    from weightsync.testing.conformance import Liveness as Liveness
    from weightsync.testing.conformance import Reports as Reports
    from weightsync.testing.conformance import Room as Room
    from weightsync.testing.conformance import RoundTrip as RoundTrip
    from weightsync.testing.conformance import SchemeConformance as SchemeConformance
    from weightsync.testing.conformance import Versions as Versions
    from weightsync.testing.conformance import Workers as Workers

_SUITE = "weightsync.testing.conformance"
_PARTS = (
    "SchemeConformance",
    "RoundTrip",
    "Versions",
    "Leases",
    "Liveness",
    "Hostile",
    "Room",
    "Configuration",
    "Reports",
    "Workers",
)

__all__ = ["FakeEngine", "flip_bit", *_PARTS]


def __getattr__(name: str) -> Any:
    if name not in _PARTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import pytest

    pytest.register_assert_rewrite(_SUITE)  # so that a failed assertion shows its values
    return getattr(importlib.import_module(_SUITE), name)
