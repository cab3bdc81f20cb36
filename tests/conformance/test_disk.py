"""Versions as directories keep the contract of transports."""

from pathlib import Path

import pytest

import weightsync as ws
from weightsync.testing import SchemeConformance


@pytest.mark.slow
class TestDisk(SchemeConformance):
    @pytest.fixture
    def scheme(self, run_dir):
        return ws.DiskScheme(run_dir, keep=1)

    def stored_files(self, scheme):
        kept = (".lock", "receivers")
        files = [path for path in Path(scheme.path).rglob("*") if path.is_file()]
        return [path for path in files if not any(part in str(path) for part in kept)]

    def scheme_at(self, path):
        return ws.DiskScheme(str(path / "run"), keep=1)

    def wrong_options(self):
        return [{"keep": 0}, {"shard_bytes": 1}, {"durable": "yes"}, {"path": "run"}]
