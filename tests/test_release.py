"""What is released: a source distribution, the wheel made from it, and what both are installed as.

Nothing is downloaded: installations see the packages of this environment behind their own.
"""

import email
import json
import os
import shutil
import site
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from pathlib import Path

import pytest

import weightsync
from tests.docs import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SOURCE = [
    *("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md"),
    *("weightsync", "tests"),
]


def run(*command, cwd, accepted=(0,), **environment):
    """What a command prints, run as somebody who has no checkout."""
    inherited = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode in accepted, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def wheel_of(sdist, folder, **environment):
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-cache-dir", "--no-index"]
    folder.mkdir()
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        *options,
        "-w",
        folder,
        sdist,
        cwd=folder,
        **environment,
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


class Installation:
    """A virtual environment with a wheel in it, in front of the packages that are here."""

    def __init__(self, wheel, folder):
        self.folder = folder
        self.python = folder / "bin" / "python"
        run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
        (packages,) = folder.glob("lib/python*/site-packages")
        # Not as an installation of its own: what is there in editable form is not to be found.
        (packages / "others.pth").write_text("\n".join(site.getsitepackages()))
        pip = [sys.executable, "-m", "pip", "--python", self.python]
        run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=folder)

    def __call__(self, *command, **options):
        program, *arguments = command
        return run(self.folder / "bin" / program, *arguments, cwd=self.folder, **options)

    def run(self, code):
        return self("python", "-c", textwrap.dedent(code))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    unwanted = shutil.ignore_patterns("*.so", "__pycache__")
    for name in SOURCE:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=unwanted)
        else:
            shutil.copy(ROOT / name, source / name)
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(made)!r})"
    run(sys.executable, "-c", build, cwd=source)
    (found,) = made.glob("*.tar.gz")
    return found


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    return wheel_of(sdist, tmp_path_factory.mktemp("compiled") / "dist")


@pytest.fixture(scope="module")
def pure_wheel(sdist, tmp_path_factory):
    """As it is made where there is no compiler."""
    return wheel_of(sdist, tmp_path_factory.mktemp("pure") / "dist", CC="/bin/false")


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    return Installation(wheel, tmp_path_factory.mktemp("installed") / "venv")


@pytest.fixture(scope="module")
def installed_pure(pure_wheel, tmp_path_factory):
    return Installation(pure_wheel, tmp_path_factory.mktemp("installed-pure") / "venv")


@pytest.fixture(scope="module")
def types(tmp_path_factory):
    """What mypy remembers from one test to the next."""
    return tmp_path_factory.mktemp("types")


def in_checkout(*suffixes):
    found = (ROOT / "weightsync").rglob("*")
    return {str(path.relative_to(ROOT)) for path in found if path.suffix in suffixes}


def test_the_source_distribution_is_the_package_and_what_builds_it(sdist):
    with tarfile.open(sdist) as archive:
        files = [member.name for member in archive.getmembers() if member.isfile()]
    names = {name.partition("/")[2] for name in files}
    assert {name for name in names if name.startswith("weightsync/")} == in_checkout(
        ".py", ".pyi", ".c", ".typed"
    )
    assert {"pyproject.toml", "setup.py", "LICENSE", "README.md", "CHANGELOG.md"} <= names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "docs/"))]


def test_the_wheel_is_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    package = {name for name in names if name.startswith("weightsync/")}
    (compiled,) = [name for name in package if name.endswith(".so")]
    assert package - {compiled} == in_checkout(".py", ".pyi", ".typed")
    assert {name.split("/")[0].split("-")[0] for name in names} == {"weightsync"}


def test_the_wheel_says_what_it_is(wheel):
    with zipfile.ZipFile(wheel) as archive:
        information = f"weightsync-{weightsync.__version__}.dist-info"
        metadata = email.message_from_bytes(archive.read(f"{information}/METADATA"))
        points = archive.read(f"{information}/entry_points.txt").decode()
        assert archive.read(f"{information}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert metadata["Version"] == weightsync.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    assert "weightsync = weightsync.cli:main" in points
    assert "[vllm.general_plugins]" in points


def test_an_installation_says_one_version_everywhere(installed):
    said = installed("weightsync", "--version")
    code = """
        import importlib.metadata, weightsync
        print(weightsync.__version__, importlib.metadata.version("weightsync"), weightsync.__file__)
    """
    own, of_package, file = installed.run(code).split()
    assert own == of_package == weightsync.__version__
    assert said == f"weightsync {own}\n"
    assert Path(file).is_relative_to(installed.folder)


def test_the_plug_in_of_vllm_can_be_loaded(installed):
    code = """
        from importlib.metadata import entry_points
        (point,) = entry_points(group="vllm.general_plugins", name="weightsync")
        print(point.load().__module__)
    """
    assert installed.run(code) == "weightsync.vllm_worker.plugin\n"


def test_doctor_finds_an_installation_in_order(installed):
    # A host may well have a problem (exit code 1); the command itself must have none.
    findings = installed("weightsync", "doctor", "--json", accepted=(0, 1))
    assert json.loads(findings)["findings"]


SYNC = """
    import json, os, tempfile, torch, weightsync as ws
    from weightsync import chunks
    torch.manual_seed(0)
    sizes = [1, 7, 300, 4097, 262_144, 262_145, 1_000_003, 0]
    weights = {f"w{n}": torch.randn(size) for n, size in enumerate(sizes)}
    weights.update({f"small{n}": torch.randn(5) for n in range(500)})
    engine = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    run = tempfile.mkdtemp(dir="/dev/shm") + "/run"
    digests = []
    for scheme in (ws.DoubleBufferScheme(run), ws.DiskScheme(run + "-disk")):
        with scheme.create_sender(weights) as sender, scheme.create_receiver(engine) as receiver:
            sender.connect(); receiver.connect()
            sender.update_weights(version=1)
            receiver.poll_and_apply(10)
            same = all(torch.equal(engine[n], weights[n]) for n in weights)
            assert same and receiver.verify_weights().ok
            for name in sorted(os.listdir(scheme.path)):
                if name in ("head.json", "HEAD"):
                    digests.append(json.load(open(f"{scheme.path}/{name}"))["digest"])
        for tensor in engine.values():
            tensor.zero_()
    import shutil; shutil.rmtree(os.path.dirname(run))
    print(json.dumps([chunks.move is chunks._move_slowly, digests]))
"""


def test_without_a_compiler_the_wheel_has_no_extension_and_gives_the_same_bytes(
    pure_wheel, installed, installed_pure
):
    with zipfile.ZipFile(pure_wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]
    compiled, pure = json.loads(installed.run(SYNC)), json.loads(installed_pure.run(SYNC))
    assert (compiled[0], pure[0]) == (False, True)
    assert compiled[1] == pure[1]
    assert len(pure[1]) == 2


USER = """
    import torch

    import weightsync as ws
    from weightsync.metrics import Outcome

    def heard(outcome: Outcome) -> None:
        print(outcome.version, outcome.error)

    def train(model: torch.nn.Module, run: str) -> dict[str, int | float]:
        scheme = ws.DoubleBufferScheme(run, slots=3)
        with scheme.create_sender(model, dtype=torch.bfloat16, listeners=[heard]) as sender:
            sender.connect(timeout=60, receivers=1)
            report: ws.SyncReport = sender.update_weights(version=1, wait="applied")
            behind: int = sender.lag(report.version)
            return {**report.metrics(), "behind": behind}

    def serve(model: torch.nn.Module, url: str) -> ws.Version | None:
        receiver = ws.scheme_from_url(url).create_receiver(ws.Replicas([model]), id="engine")
        receiver.subscribe(ws.metrics.OpenTelemetry())
        try:
            receiver.connect()
            for report in receiver:
                print(report.seconds.pause, [each.state for each in report.receivers])
        except ws.DeadlineError as error:
            print(error)
        return receiver.version

    def schemes() -> list[ws.WeightSyncScheme]:
        nccl = ws.NCCLScheme(master_address="10.0.0.5", master_port=29500, num_replicas=2)
        return [ws.FallbackScheme([nccl, ws.DiskScheme("/mnt/run42", keep=3)])]
"""


def test_a_users_file_passes_strict_type_checks(installed, tmp_path, types):
    file = tmp_path / "user.py"
    file.write_text(textwrap.dedent(USER))
    options = ["--strict", "--python-executable", installed.python, "--cache-dir", types]
    said = run(sys.executable, "-m", "mypy", *options, file, cwd=tmp_path)
    assert said.startswith("Success"), said


def test_a_users_mistake_does_not_pass_them(installed, tmp_path, types):
    """The types are really looked at."""
    file = tmp_path / "user.py"
    file.write_text("import weightsync as ws\n\nws.Version(1, 2).number.upper()\n")
    options = ["--strict", "--python-executable", installed.python, "--cache-dir", types]
    with pytest.raises(AssertionError, match='"int" has no attribute "upper"'):
        run(sys.executable, "-m", "mypy", *options, file, cwd=tmp_path)
