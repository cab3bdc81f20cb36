"""The command line as a whole: help, version, and what is not a command."""

import os
import subprocess
import sys

import pytest
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


@pytest.mark.parametrize("command", ["verify", "clean", "inspect", "inspect shm://"])
def test_what_is_not_there_is_said_in_the_same_words(tmp_path, command):
    words = (command if "://" in command else f"{command} ").split(" ")
    path = f"{tmp_path}/gone"
    result = CliRunner().invoke(app, [words[0], words[1] + path])
    assert (result.exit_code, result.stderr) == (2, f"weightsync: {path}: there is nothing\n")


@pytest.mark.parametrize("module", ["typer", "torch"])
def test_an_interrupt_while_modules_are_imported_ends_without_a_word(tmp_path, module):
    code = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}: raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        f"sys.argv = ['weightsync', 'inspect', {str(tmp_path)!r}]\n"
        "from weightsync.cli import main\n"
        "main()\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "")


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
