"""The conformance suite of transports: pytest classes that a scheme's own tests subclass.

::

    from weightsync.testing import SchemeConformance

    class TestMyScheme(SchemeConformance):
        @pytest.fixture
        def scheme(self, tmp_path):
            return MyScheme(str(tmp_path / "run"))

It knows nothing of any scheme: it uses senders, receivers, and the contract of
:mod:`weightsync.transport`, from processes that are killed, stopped and started again.
docs/writing-a-scheme.md tells what a scheme may say of itself.
"""

from __future__ import annotations

from weightsync.testing.conformance.base import Conformance, Run
from weightsync.testing.conformance.configuration import Configuration
from weightsync.testing.conformance.hostile import Hostile
from weightsync.testing.conformance.leases import Leases
from weightsync.testing.conformance.liveness import Liveness
from weightsync.testing.conformance.moving import Moving
from weightsync.testing.conformance.reports import Reports
from weightsync.testing.conformance.room import Room
from weightsync.testing.conformance.round_trip import RoundTrip
from weightsync.testing.conformance.versions import Versions
from weightsync.testing.conformance.workers import Workers

__all__ = [
    "Configuration",
    "Conformance",
    "Hostile",
    "Leases",
    "Liveness",
    "Moving",
    "Reports",
    "Room",
    "RoundTrip",
    "Run",
    "SchemeConformance",
    "Versions",
    "Workers",
]


class SchemeConformance(
    RoundTrip, Versions, Leases, Liveness, Moving, Hostile, Room, Configuration, Reports, Workers
):
    """All parts."""
