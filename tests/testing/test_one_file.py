"""The scheme of docs/writing-a-scheme.md passes the suite."""

import contextlib
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.testing import one_file
from tests.testing.one_file import OneFileScheme
from weightsync.testing import SchemeConformance, flip_bit


@contextlib.contextmanager
def damaged():
    """A bit of every version is lost after it was digested, before it is written."""
    digest_of = one_file.digest_of

    def digest_and_damage(data):
        digest = digest_of(data)
        if isinstance(data, torch.Tensor):
            flip_bit(data)
        return digest

    with mock.patch.object(one_file, "digest_of", digest_and_damage):
        yield


class TestOneFile(SchemeConformance):
    @pytest.fixture
    def scheme(self, tmp_path):
        return OneFileScheme(str(tmp_path / "run"))

    def stored_files(self, scheme):
        return [path for path in Path(scheme.path).iterdir() if path.name.startswith(("head", "w"))]

    def damage(self):
        return damaged

    def scheme_at(self, path):
        return OneFileScheme(str(path / "run"))
