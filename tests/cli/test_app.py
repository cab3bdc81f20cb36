"""The command line as a whole: help, version, and what is not a command."""

import os
import subprocess
import sys

import torch
from typer.testing import CliRunner

import weightsync as ws
from tests.conftest import WAIT
from weightsync.cli.app import app


def test_version():
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"weightsync {ws.__version__}\n")


def test_python_m_weightsync_is_the_same_and_imports_no_torch_for_it():
    code = (
        "import sys, runpy\n"
        "sys.argv = ['weightsync', '--version']\n"
        "try: runpy.run_module('weightsync', run_name='__main__')\n"
        "except SystemExit as end: print('torch' in sys.modules, end.code)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.stdout == f"weightsync {ws.__version__}\nFalse 0\n"


def test_a_path_that_is_no_text_is_shown(tmp_path):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/run-\xff")
    with ws.DiskScheme(path).create_sender({"w": torch.ones(3)}, timeout=WAIT) as sender:
        sender.connect(WAIT)
        sender.update_weights(version=1)
    command = [sys.executable, "-m", "weightsync", "clean", str(tmp_path), "--kept"]
    strict = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT, env=strict)
    assert (done.returncode, done.stderr) == (0, "")
    assert "run-\\udcff" in done.stdout
