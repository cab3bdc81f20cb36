"""The transport by broadcast keeps the contract of transports, on gloo."""

import contextlib
from unittest import mock

import pytest

import weightsync as ws
from weightsync.schemes.nccl.buckets import Packer
from weightsync.testing import SchemeConformance, flip_bit


@contextlib.contextmanager
def damaged():
    """A bit of every bucket is lost after it was digested, before it is sent."""
    finished = Packer._bucket

    def damage(packer, parts):
        for part in parts:
            part.buffer = part.buffer.clone()
            flip_bit(part.buffer)
        return finished(packer, parts)

    with mock.patch.object(Packer, "_bucket", damage):
        yield


class TestNCCL(SchemeConformance):
    keeps_versions = False

    @pytest.fixture
    def scheme(self):
        return ws.NCCLScheme(backend="gloo")

    def damage(self):
        return damaged

    def endpoints(self, scheme):
        return [(scheme.master_address, scheme.port)]

    def wrong_options(self):
        return [{"backend": "smoke"}, {"num_replicas": 0}, {"master_port": 70000}, {"buffers": 0}]
