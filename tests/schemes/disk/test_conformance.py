"""The suite that every scheme passes, over a file system."""

from pathlib import Path

import pytest

import weightsync as ws
from weightsync.testing import SchemeConformance


class TestDiskScheme(SchemeConformance):
    buffered_bytes = 32 << 20

    @pytest.fixture
    def scheme(self, tmp_path):
        return ws.DiskScheme(str(tmp_path / "run"))

    def stored_files(self, scheme):
        run = Path(scheme.path)
        newest = max(run.glob("step-*"), default=None)
        return [run / "HEAD", *newest.iterdir()] if newest else []

    def scheme_at(self, path):
        return ws.DiskScheme(str(path / "run"))

    def wrong_options(self):
        return [
            {"keep": 0}, {"keep": "3"}, {"keep": True}, {"shard_bytes": 5}, {"durable": 1},
            {"verify": None}, {"keep_files": "yes"}, {"direct": 1}, {"threads": 0},
            {"path": "relative"}, {"path": "/"}, {"path": 5}, {"reader_path": "relative"},
        ]  # fmt: skip
