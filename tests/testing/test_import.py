"""Who wants the fake engine only, needs no pytest."""

import subprocess
import sys


def python(code):
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_fake_engine_needs_no_pytest():
    python(
        "import sys; sys.modules['pytest'] = None\n"
        "from weightsync.testing import FakeEngine, flip_bit, faults, processes, roles, weights"
    )


def test_every_part_can_be_imported():
    python("from weightsync.testing import *\nassert issubclass(SchemeConformance, Leases)")
