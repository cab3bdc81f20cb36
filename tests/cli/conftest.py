"""Commands as a user gives them, and runs for them to look at."""

import json

import pytest
import torch
from typer.testing import CliRunner

import weightsync as ws
from tests.conftest import WAIT
from weightsync.cli.app import app


class Answer:
    """What a command said.

    Attributes:
        code: the exit status. out, err: what it printed.
    """

    def __init__(self, result):
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        self.code, self.out, self.err = result.exit_code, result.stdout, result.stderr

    @property
    def json(self):
        return json.loads(self.out)

    @property
    def words(self):
        """What it printed, with single spaces: lines are folded for a terminal."""
        return " ".join(self.out.split())


@pytest.fixture
def weightsync():
    """Runs a command in this process, as in a terminal of 80 columns that is none."""

    def run(*arguments, columns=80):
        given = list(map(str, arguments))
        return Answer(CliRunner().invoke(app, given, env={"COLUMNS": str(columns)}))

    return run


@pytest.fixture
def weights():
    return {"model.a": torch.arange(300.0), "model.b": torch.ones(7, 3, dtype=torch.bfloat16)}


@pytest.fixture
def shm(run_dir, weights):
    """A run with a sender and version 1; gives the sender."""
    with ws.DoubleBufferScheme(run_dir).create_sender(weights, timeout=WAIT) as sender:
        sender.connect(WAIT)
        sender.update_weights(version=1)
        yield sender


@pytest.fixture
def disk(tmp_path, weights):
    """The directory of a run on disk with versions 1 and 2, whose sender has ended."""
    path = tmp_path / "run"
    with ws.DiskScheme(str(path)).create_sender(weights, timeout=WAIT) as sender:
        sender.connect(WAIT)
        for number in (1, 2):
            weights["model.a"].fill_(number)
            sender.update_weights(version=number)
    return path
