"""The GPU's kernels without one: Triton's interpreter runs them, on the processor's memory.

In a process of their own, since Triton decides for good whether it interprets when it is imported.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton, which comes with torch's CUDA"
)


def test_in_the_interpreter():
    tests = str(Path(__file__).with_name("interpreted.py"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("name", ["_sum", "_finish", "_move"])
def test_no_number_has_a_kernel_compiled_again(name):
    """Triton does so for numbers that are 1 or multiples of 16, unless told otherwise."""
    from weightsync.device import kernels

    given = [each for each in getattr(kernels, name).params if not each.is_constexpr]
    assert [each.name for each in given if not each.do_not_specialize] == ["table"]
