"""Each part of a program has its modules imported in the one fork server."""

import subprocess
import sys

PROGRAM = """
from weightsync.fork_server import CONTEXT, preload

preload(["colorsys", "there.is.none"])
preload(["pyclbr", "colorsys"])

with CONTEXT.Pool(1) as pool:
    imported = pool.apply(eval, ["set(__import__('sys').modules)"])
assert {"colorsys", "pyclbr"} <= imported, imported
assert "tabnanny" not in imported
"""


def test_no_part_takes_another_s_modules_away():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
