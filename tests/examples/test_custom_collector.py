"""The example of a loop of one's own learns, and ends."""

import os
import subprocess
import sys

from tests.docs import ROOT


def test_it_learns_from_what_is_fresh_enough():
    ran = subprocess.run(
        [sys.executable, str(ROOT / "examples/custom_collector.py")],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "after 100 steps" in ran.stdout
