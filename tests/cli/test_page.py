"""Every command on docs/command-line.md runs, as a reader would give it."""

import shlex

import pytest
from typer.testing import CliRunner

import weightsync as ws
from tests.docs import blocks
from tests.vllm.conftest import llama_config, make_model
from weightsync.cli.app import app

PAGE = "docs/command-line.md"
COMMANDS = ["inspect", "doctor", "verify", "export", "clean"]


def lines(name):
    """The arguments of each command in a block, as a shell splits them."""
    found = [shlex.split(line) for line in blocks(PAGE, "bash")[name].splitlines()]
    assert all(line[:2] == ["weightsync", name] for line in found)
    return [line[1:] for line in found]


@pytest.fixture
def places(run_dir, tmp_path):
    """What the page's commands are pointed at, by the texts that stand for it there."""
    model = make_model(llama_config(), 1)
    model.config.save_pretrained(tmp_path / "model")
    disk = ws.DiskScheme(str(tmp_path / "run42"))
    with (
        ws.DoubleBufferScheme(run_dir).create_sender(model) as sender,
        disk.create_sender(model) as other,
    ):
        for each in (sender, other):
            each.connect()
            each.update_weights(version=1)
        model.save_pretrained(tmp_path / "checkpoint")
        yield {"/dev/shm/run42": run_dir, "/mnt/shared": str(tmp_path)}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands(places, name):
    for arguments in lines(name):
        for text, place in places.items():
            arguments = [argument.replace(text, place) for argument in arguments]
        result = CliRunner().invoke(app, arguments)
        # A host on which a test runs may have ailments.
        assert result.exit_code in ((0, 1) if name == "doctor" else (0,)), result.output


def test_all_of_them_are_there():
    assert list(blocks(PAGE, "bash")) == [*COMMANDS, "bench"]  # test_bench.py runs that one
    named = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert named >= set(COMMANDS)
