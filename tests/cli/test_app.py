"""The command line as a whole: help, version, and what is not a command."""

import subprocess
import sys

from typer.testing import CliRunner

import weightsync
from weightsync.cli.app import app


def test_version():
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"weightsync {weightsync.__version__}\n")


def test_python_m_weightsync_is_the_same_and_imports_no_torch_for_it():
    code = (
        "import sys, runpy\n"
        "sys.argv = ['weightsync', '--version']\n"
        "try: runpy.run_module('weightsync', run_name='__main__')\n"
        "except SystemExit as end: print('torch' in sys.modules, end.code)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.stdout == f"weightsync {weightsync.__version__}\nFalse 0\n"
