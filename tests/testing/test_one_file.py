"""The scheme of docs/writing-a-scheme.md passes the suite."""

import contextlib
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.docs import blocks, run
from tests.testing import one_file
from tests.testing.one_file import OneFileScheme
from weightsync.testing import SchemeConformance, flip_bit

PAGE = "docs/writing-a-scheme.md"


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


@pytest.mark.slow
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


def test_the_page_shows_this_scheme():
    shown = "".join(text for name, text in blocks(PAGE).items() if name.startswith("one file"))
    written = Path(one_file.__file__).read_text().partition('"""\n\n')[2]
    assert lines(shown) == lines(written)


def lines(text):
    return [line for line in text.splitlines() if line]


def test_the_suite_of_the_page(run_dir):
    names = run(PAGE, "suite", run_dir, OneFileScheme=OneFileScheme)
    assert issubclass(names["TestOneFile"], SchemeConformance)
