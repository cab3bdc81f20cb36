"""A fallback keeps the contract of transports, as each of its schemes does."""

import dataclasses
import os
from pathlib import Path

import pytest

import weightsync as ws
from weightsync.testing import SchemeConformance


@pytest.mark.slow
class TestFallback(SchemeConformance):
    @pytest.fixture
    def scheme(self, run_dir):
        os.mkdir(run_dir, 0o700)
        return self.below(run_dir)

    def below(self, path):
        return ws.FallbackScheme(
            [ws.DoubleBufferScheme(f"{path}/first"), ws.DoubleBufferScheme(f"{path}/second")]
        )

    def for_receivers(self, scheme, count):
        roomy = [dataclasses.replace(one, slots=count + 1) for one in scheme.schemes]
        return dataclasses.replace(scheme, schemes=roomy)

    def stored_files(self, scheme):
        names = ("head.json", "manifest.json", "slot*.json", "slot*.digests", "slot*.bin")
        return [path for name in names for path in Path(scheme.schemes[0].path).rglob(name)]

    def scheme_at(self, path):
        return self.below(str(path))

    def wrong_options(self):
        return [{"schemes": []}, {"schemes": ["shm:///a"] * 2}, {"retry_after": -1}]


@pytest.mark.slow
class TestFromBroadcastToDisk(SchemeConformance):
    """The first of two that have little in common, most of the time."""

    keeps_versions = False

    @pytest.fixture
    def scheme(self, run_dir):
        return ws.FallbackScheme([ws.NCCLScheme(backend="gloo"), ws.DiskScheme(run_dir)])

    def endpoints(self, scheme):
        return [(scheme.schemes[0].master_address, scheme.schemes[0].port)]
