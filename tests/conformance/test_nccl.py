"""The transport by broadcast keeps the contract of transports, on gloo."""

import pytest

import weightsync as ws
from weightsync.testing import SchemeConformance


class TestNCCL(SchemeConformance):
    keeps_versions = False

    @pytest.fixture
    def scheme(self):
        return ws.NCCLScheme(backend="gloo")

    def endpoints(self, scheme):
        return [(scheme.master_address, scheme.port)]

    def wrong_options(self):
        return [{"backend": "smoke"}, {"num_replicas": 0}, {"master_port": 70000}, {"buffers": 0}]
