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
from weightsync.testing.conformance.round_trip import RoundTrip

__all__ = ["Conformance", "RoundTrip", "Run", "SchemeConformance"]


class SchemeConformance(RoundTrip):
    """All parts."""
