"""The double buffer keeps the contract of transports."""

import dataclasses
from pathlib import Path

import pytest

import weightsync as ws
from weightsync.testing import SchemeConformance


class TestDoubleBuffer(SchemeConformance):
    @pytest.fixture
    def scheme(self, run_dir):
        return ws.DoubleBufferScheme(run_dir)

    def for_receivers(self, scheme, count):
        # A receiver keeps its lease on the version that its engine holds.
        return dataclasses.replace(scheme, slots=count + 1)

    def stored_files(self, scheme):
        names = ("head.json", "manifest.json", "slot*.json", "slot*.digests", "slot*.bin")
        return [path for name in names for path in Path(scheme.path).rglob(name)]

    def scheme_at(self, path):
        return ws.DoubleBufferScheme(str(path / "run"))

    def wrong_options(self):
        return [{"slots": 1}, {"on_busy": "hope"}, {"path": "run"}, {"verify": 1}, {"threads": 0}]
