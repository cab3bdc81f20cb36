"""Every code block in README and docs runs (those with vLLM: tests/vllm/test_docs.py)."""

import re

import pytest
import torch

from tests.docs import PAGES, ROOT, blocks, run
from weightsync.version import Version

WITH_VLLM = {("README.md", "engine")}


def test_every_block_has_a_name_by_which_it_is_tested():
    for page in PAGES:
        assert "" not in blocks(page), page


def test_all_blocks_are_known_here():
    found = {(page, name) for page in PAGES for name in blocks(page)}
    tested = {
        ("README.md", "trainer"),
        ("docs/getting-started.md", "one process"),
        ("docs/getting-started.md", "configuration"),
    }
    assert found == tested | WITH_VLLM


def test_the_trainer_of_the_readme(run_dir):
    names = run("README.md", "trainer", run_dir, model=torch.nn.Linear(4, 4))
    assert names["report"].version == Version(names["report"].version.epoch, 3)
    names["sender"].shutdown()


def test_one_process(run_dir):
    run("docs/getting-started.md", "one process", run_dir, run_directory=run_dir)


def test_configuration(run_dir):
    run("docs/getting-started.md", "configuration", run_dir)


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md"])
def test_links_lead_somewhere(page):
    folder = (ROOT / page).parent
    for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text()):
        assert (folder / target).exists(), target
