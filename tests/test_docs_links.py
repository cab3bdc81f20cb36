"""Links of README and docs lead somewhere, in the repository and in the built pages."""

import re
from pathlib import PurePosixPath

import pytest
import yaml

import weightsync as ws
from tests.docs import PAGES, ROOT
from tools.pages import flow_chart

DOCUMENTS = [*PAGES, "CHANGELOG.md", "benchmarks/RESULTS.md"]
FROM_ELSEWHERE = {"index.md", "changelog.md", "benchmarks/results.md"}
"""Pages that tools/pages/hooks.py takes from outside of docs."""

_LINK = re.compile(r"\]\(([^)\s]*)\)")


def prose(page):
    """A document without what is quoted in it."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", lambda code: code[0].replace("](", "] ("), text)


def anchors(page):
    """What of a document can be linked to, by a source browser and in the built pages."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    objects = re.findall(r"^::: (\S+)", (ROOT / page).read_text(), re.MULTILINE)
    return {slug(heading) for heading in headings if slug(heading) == built_slug(heading)} | {
        *objects
    }


def words(heading):
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower().strip()


def slug(heading):
    return re.sub(r"[^\w\- ]", "", words(heading)).replace(" ", "-")


def built_slug(heading):
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", words(heading), flags=re.ASCII))


@pytest.mark.parametrize("page", DOCUMENTS)
def test_links_lead_somewhere(page):
    for target in _LINK.findall(prose(page)):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        found = (ROOT / page).parent / path if path else ROOT / page
        assert found.exists(), target
        assert found.resolve().is_relative_to(ROOT), target
        if anchor:
            assert anchor in anchors(found.resolve().relative_to(ROOT)), target


def navigation(entry):
    """The pages below an entry of mkdocs.yml."""
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [page for part in parts for page in navigation(part)]


def test_every_page_is_in_the_navigation_once():
    listed = navigation(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    there = {str(PurePosixPath(page).relative_to("docs")) for page in PAGES if page != "README.md"}
    assert len(listed) == len(set(listed))
    assert set(listed) == there | FROM_ELSEWHERE


def test_the_flow_chart_is_what_its_script_draws():
    assert flow_chart.TARGET.read_text() == flow_chart.chart()


def test_every_public_name_is_in_the_reference():
    shown = set()
    for page in ROOT.glob("docs/reference/*.md"):
        shown |= set(re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE))
    for name, module in ws._PUBLIC.items():
        assert f"{module}.{name}" in shown or module in shown, name


def test_every_case_of_a_migration_is_in_the_test_that_is_named():
    """The faults that are said to go away have tests that name them."""
    for page in ROOT.glob("docs/migrating/*.md"):
        rows = [line for line in page.read_text().splitlines() if "`tests/" in line and "|" in line]
        assert rows, page
        for row in rows:
            files = re.findall(r"`(tests/[\w/]+\.py)`", row)
            (case,) = re.findall(r"\(([A-Z]\d+)\)", row)
            text = [(ROOT / file).read_text() for file in files]
            assert all(re.search(rf"\b{case}\b", each) for each in text), row


def test_figures_of_the_page_on_performance_stand_in_the_results():
    """One place for each figure: who measures anew finds what else says it."""
    sources = ["benchmarks/RESULTS.md", "docs/integrations/torchrl.md"]
    measured = set(re.findall(r"\d+(?:\.\d+)?", " ".join(prose(page) for page in sources)))
    measured |= set(re.findall(r"\d+\.\d+", (ROOT / sources[0]).read_text()))  # its tables
    said = re.findall(r"(\d+\.\d+|\d{3,})(?= (?:GB|ms|of|to)\b)", prose("docs/performance.md"))
    rounded = {f"{float(figure):.0f}" for figure in measured}
    assert len(said) > 20
    assert set(said) <= measured | rounded
