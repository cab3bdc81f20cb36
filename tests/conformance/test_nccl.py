"""The transport by broadcast keeps the contract of transports, on gloo."""

import contextlib
from unittest import mock

import pytest

import weightsync as ws
from tests.schemes.nccl.on_gpus import pretend
from weightsync.schemes.nccl import publisher, reader
from weightsync.schemes.nccl.transfer import Transfer
from weightsync.testing import SchemeConformance, flip_bit


@contextlib.contextmanager
def damaged():
    """A bit of every bucket is lost after it was digested, before it is sent."""
    sent = Transfer.send

    def damage(transfer, bucket):
        for part in bucket.parts:
            part.buffer = part.buffer.clone()
            flip_bit(part.buffer)
        sent(transfer, bucket)

    with mock.patch.object(Transfer, "send", damage):
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


@pytest.mark.slow
class TestNCCLOnGPUs(TestNCCL):
    """As if buckets and versions were on GPUs, at the ends that are in this process."""

    @pytest.fixture(autouse=True)
    def gpus(self, monkeypatch):
        for module in (publisher, reader):
            monkeypatch.setattr(module, "gpu_of", module.gpu_of)
        pretend()
