"""What importing the package brings along, and that it does so without a warning."""

import json
import subprocess
import sys

import pytest

OPTIONAL = [
    *("accelerate", "bitsandbytes", "fsspec", "httpx", "matplotlib", "opentelemetry", "peft"),
    *("prometheus_client", "psutil", "pytest", "ray", "torchrl", "transformers", "triton", "trl"),
    *("verl", "vllm"),
]

NEED_THEM = {
    "weightsync.device.kernels",
    "weightsync.engines.vllm.http",
    "weightsync.integrations.torchrl",
    "weightsync.integrations.torchrl.names",
    "weightsync.integrations.torchrl.policy",
    "weightsync.integrations.torchrl.scheme",
    "weightsync.integrations.torchrl.trainer",
    "weightsync.integrations.torchrl.vllm",
    "weightsync.integrations.torchrl.worker",
    "weightsync.integrations.trl",
    "weightsync.integrations.verl",
    "weightsync.sources.peft",
    "weightsync.vllm_worker.transfer_engine",
}
"""Modules that are of no use without an optional package."""

WITH_EXTRAS = ("weightsync.testing", "weightsync.bench")
"""Packages that need pytest, and the extra ``bench``."""

PRINT_MODULES = """
import json, sys
ours = {name.split(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)
print(json.dumps(sorted(name for name in ours if not name.startswith(("_", "sitecustomize")))))
"""


def run(code):
    """The JSON that a fresh interpreter prints in which a warning is an error."""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def brought_by(code):
    """The packages that code imports, the standard library's aside."""
    return set(run(code + PRINT_MODULES))


def test_importing_weightsync_imports_nothing_else():
    assert brought_by("import weightsync") == {"weightsync"}


def test_what_a_trainer_and_an_engine_use_brings_torch_and_digests_only():
    common = "import weightsync as ws; ws.DoubleBufferScheme, ws.Sender, ws.Receiver, ws.SyncReport"
    assert brought_by(common) - brought_by("import torch") <= {"weightsync", "xxhash", "numpy"}


def test_public_names_need_no_optional_package():
    code = "import weightsync\nfor name in dir(weightsync): getattr(weightsync, name)\n"
    brought = brought_by(code)
    assert brought.isdisjoint({*OPTIONAL, "tensordict", "typer", "rich"})


def test_every_module_but_those_for_optional_packages_imports_without_them():
    code = f"""
import importlib, json, pkgutil, sys
sys.modules.update(dict.fromkeys({OPTIONAL}))  # None: importing it fails
import weightsync
failed = []
for found in pkgutil.walk_packages(weightsync.__path__, "weightsync.", onerror=lambda name: None):
    if found.name.rpartition(".")[2] == "__main__":
        continue
    try:
        importlib.import_module(found.name)
    except ImportError:
        failed.append(found.name)
print(json.dumps(failed))
"""
    failed = run(code)
    assert {name for name in failed if not name.startswith(WITH_EXTRAS)} <= NEED_THEM


@pytest.mark.parametrize("name", ["__version__", "metrics", "Sender"])
def test_public_names_are_listed(name):
    import weightsync

    assert name in dir(weightsync)
