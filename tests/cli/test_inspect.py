"""``weightsync inspect``: people and scripts see the same run."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

import weightsync as ws
from tests.conftest import WAIT
from weightsync.cli.inspect import _GONE, _last_seen
from weightsync.inspection import RunStatus
from weightsync.testing import faults, roles
from weightsync.testing.processes import eventually


def test_a_run_is_shown_with_its_sender_slots_and_receivers(weightsync, shm, run_dir, weights):
    engine = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    with ws.DoubleBufferScheme(run_dir).create_receiver(engine, id="engine-7") as receiver:
        receiver.connect(WAIT)
        receiver.poll_and_apply(WAIT)
        shm.update_weights(version=4)
        answer = weightsync("inspect", run_dir)
        document = weightsync("inspect", run_dir, "--json").json
    assert answer.code == 0
    assert f"{run_dir} (shm)" in answer.words
    assert "4 of epoch" in answer.words
    assert f"alive: pid {os.getpid()}" in answer.words
    assert "generation-0001/slot0" in answer.words
    assert "engine-7 applied 1 3, " in answer.words  # holds 1, three behind, for so long
    (entry,) = document["receivers"]
    assert entry["lag"]["versions"] == 3
    assert 0 <= entry["lag"]["seconds"] < 60
    assert document["version"][1] == 4


@pytest.mark.parametrize("columns", [40, 80])
def test_long_names_fit_a_narrow_terminal(weightsync, peers, run_dir, columns):
    long = "engine-of-a-host-with-a-long-name." * 2 + "example.org"
    (peer,) = peers(1)
    scheme = ws.DoubleBufferScheme(run_dir)
    peer.call(roles.send_from, scheme)
    with scheme.create_receiver(roles.constants(0), id=long) as receiver:
        receiver.connect(WAIT)
        peer.call(roles.publish, 1)
        answer = weightsync("inspect", run_dir, columns=columns)
    assert max(map(len, answer.out.splitlines())) <= columns
    assert "connected" in answer.out  # columns of few characters stay whole
    lines = [line.split("  ")[0].strip() for line in answer.out.splitlines()]
    assert long in "".join(lines)


def test_the_dead_are_shown_and_are_an_exit_code(weightsync, peers, run_dir):
    scheme = ws.DoubleBufferScheme(run_dir)
    sender, receiver = peers(2)
    sender.call(roles.send_from, scheme)
    receiver.call(roles.receive_in, scheme, "engine")
    sender.call(roles.publish, 1)
    receiver.kill()
    sender.kill()
    answer = weightsync("inspect", run_dir)
    assert answer.code == 1
    assert f"dead, and has not ended by itself: pid {sender.pid}" in answer.words
    assert "engine: its process is gone" in answer.words


@pytest.mark.parametrize("kind", ["shm", "disk"])
def test_a_killed_sender_is_an_exit_code(weightsync, peers, run_dir, kind):
    scheme = ws.DoubleBufferScheme(run_dir) if kind == "shm" else ws.DiskScheme(run_dir)
    (sender,) = peers(1)
    sender.call(roles.send_from, scheme)
    sender.call(roles.publish, 1)
    assert weightsync("inspect", run_dir).code == 0
    sender.kill()
    answer = weightsync("inspect", run_dir)
    assert answer.code == 1
    assert "dead, and has not ended by itself: pid" in answer.words
    fallback = f"fallback://nccl://127.0.0.1:29598?backend=gloo,{kind}://{run_dir}"
    assert weightsync("inspect", fallback).code == 1


@pytest.mark.parametrize("kind", ["shm", "disk"])
def test_a_run_that_its_sender_has_left_is_well(weightsync, weights, run_dir, kind):
    left = f"{kind}://{run_dir}?keep_files=true"
    with ws.scheme_from_url(left).create_sender(weights, timeout=WAIT) as sender:
        sender.connect(WAIT)
        sender.update_weights(version=1)
        assert not weightsync("inspect", run_dir, "--json").json["sender_ended"]
    answer = weightsync("inspect", run_dir)
    assert (answer.code, "has ended: pid" in answer.words) == (0, True)
    assert weightsync("inspect", run_dir, "--json").json["sender_ended"]
    fallback = f"fallback://nccl://127.0.0.1:29598?backend=gloo,{kind}://{run_dir}"
    assert weightsync("inspect", fallback).code == 0


def test_a_sender_that_comes_after_one_that_ended_and_is_killed(weightsync, peers, disk):
    (sender,) = peers(1)
    sender.call(roles.send_from, ws.DiskScheme(str(disk)))
    assert weightsync("inspect", disk).code == 0
    sender.kill()
    assert weightsync("inspect", disk).code == 1


def test_nobody_who_answers_is_an_exit_code(weightsync):
    answer = weightsync("inspect", "nccl://127.0.0.1:29598?backend=gloo")
    assert (answer.code, answer.err) == (1, "")


def test_a_receiver_s_total_is_as_long_as_it_took_to_apply(weightsync, shm, run_dir, weights):
    engine = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    with ws.DoubleBufferScheme(run_dir).create_receiver(engine, id="engine") as receiver:
        receiver.connect(WAIT)
        receiver.poll_and_apply(WAIT)
        document = weightsync("inspect", run_dir, "--json").json
    (entry,) = document["receivers"]
    assert entry["seconds"]["total"] == entry["seconds"]["apply"] > 0
    assert [e["seconds"]["total"] for e in entry["engines"]] == [
        e["seconds"]["apply"] for e in entry["engines"]
    ]


@pytest.mark.parametrize("kind", ["shm", "disk"])
def test_a_version_has_one_size_whoever_says_it(weightsync, run_dir, kind):
    weights = {f"layer.{number}": torch.ones(3) for number in range(5)}  # 12 bytes, padded to 64
    scheme = ws.DoubleBufferScheme(run_dir) if kind == "shm" else ws.DiskScheme(run_dir)
    with scheme.create_sender(weights, timeout=WAIT) as sender:
        sender.connect(WAIT)
        report = sender.update_weights(version=1)
        said = [weightsync(c, run_dir, "--json").json["nbytes"] for c in ("inspect", "verify")]
    assert said == [report.nbytes] * 2 == [60, 60]


def test_a_path_that_fits_on_a_line_is_not_broken(weightsync, tmp_path):
    path = str(tmp_path / "run")
    columns = len(path) + 2  # not enough for the word before it
    with ws.DiskScheme(path).create_sender({"w": torch.ones(3)}, timeout=WAIT) as sender:
        sender.connect(WAIT)
        answer = weightsync("inspect", path, columns=columns)
    assert path in answer.out
    assert max(map(len, answer.out.splitlines())) <= columns


def test_what_cannot_be_read_is_said_and_the_rest_is_shown(weightsync, shm, run_dir):
    with open(f"{run_dir}/head.json", "w") as file:
        file.write("garbage")
    os.makedirs(f"{run_dir}/receivers", exist_ok=True)
    with open(f"{run_dir}/receivers/x.json", "wb") as file:
        file.write(b"\xff\x00")
    answer = weightsync("inspect", run_dir, columns=200)
    assert answer.code == 1
    assert "head.json is malformed" in answer.words
    assert "x: " in answer.words
    assert "alive" in answer.words


def test_words_of_others_do_nothing_to_the_terminal(weightsync, run_dir, weights):
    """Which come from other processes, or a sender on another host."""
    with ws.DoubleBufferScheme(run_dir).create_sender(weights, timeout=WAIT) as sender:
        sender.connect(WAIT)
        sender.update_weights(version=1)
        host = "\x1b]0;mine\x07\x1b[2J"
        pathlib.Path(run_dir, "sender.lock").write_text(json.dumps({"pid": 1, "host": host}))
        answer = weightsync("inspect", run_dir)
        listed = weightsync("clean", run_dir)
    assert "mine" in answer.words
    assert "mine" in listed.words
    assert "\x1b" not in answer.out + listed.out


def test_a_record_that_may_not_be_read(weightsync, shm, run_dir, weights):
    """Whoever runs it has everything imported before: an environment may be root's alone."""
    assert weightsync("inspect", run_dir).code == 0
    shm.shutdown()
    with (
        faults.unprivileged(),
        ws.DoubleBufferScheme(run_dir).create_sender(weights, timeout=WAIT) as sender,
    ):
        sender.connect(WAIT)
        sender.update_weights(version=1)
        with faults.refused(f"{run_dir}/head.json"):
            answer = weightsync("inspect", run_dir, columns=200)
    assert answer.code == 1
    assert "head.json: Permission denied" in answer.words
    assert f"alive: pid {os.getpid()}" in answer.words


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away takes privileges")
def test_somebody_else_s_directory_is_refused(weightsync, shm, run_dir):
    os.chown(run_dir, 54321, 54321)
    answer = weightsync("inspect", run_dir)
    os.chown(run_dir, 0, 0)
    assert answer.code == 2
    assert "belongs to user 54321" in answer.err


def test_a_run_in_which_nothing_was_published_yet(weightsync, run_dir):
    with ws.DoubleBufferScheme(run_dir).create_sender() as sender:
        sender.connect(WAIT)
        answer = weightsync("inspect", run_dir)
        assert answer.code == 0
        assert "none yet" in answer.words
        assert weightsync("inspect", run_dir, "--json").json["scheme"] == "unknown"


def test_a_path_is_recognised_and_a_url_names_its_scheme(weightsync, disk):
    for target in (disk, f"disk://{disk}", f"file://{disk}"):
        document = weightsync("inspect", target, "--json").json
        assert (document["scheme"], document["version"][1]) == ("disk", 2)


@pytest.mark.parametrize("kind", ["nothing", "a file", "a symlink", "a directory", "everybody's"])
def test_what_is_no_run_is_refused(weightsync, tmp_path, disk, kind):
    path = tmp_path / "it"
    if kind == "a file":
        path.write_text("x")
    elif kind == "a symlink":
        path.symlink_to(disk)
    elif kind == "a directory":
        path.mkdir()
        (path / "notes.txt").write_text("x")
    elif kind == "everybody's":
        path.mkdir()
        path.chmod(0o777)
    answer = weightsync("inspect", path)
    assert (answer.code, answer.out) == (2, "")
    assert str(path) in answer.err
    assert str(path) in weightsync("inspect", path, "--json").json["error"]


def test_what_is_no_scheme_is_refused(weightsync):
    answer = weightsync("inspect", "nothing://here")
    assert answer.code == 2
    assert re.search(r"there are: .*cuda-ipc, disk, .*nccl.*, shm", answer.err)


def test_many_tensors(weightsync, run_dir):
    weights = {f"layer.{number}": torch.ones(1) for number in range(20_000)}
    with ws.DoubleBufferScheme(run_dir).create_sender(weights, timeout=WAIT) as sender:
        sender.connect(WAIT)
        sender.update_weights(version=1)
        assert "in 20,000 tensors" in weightsync("inspect", run_dir).words


# -------------------------------------------------------------------- while it is watched


@pytest.fixture
def watch(run_dir):
    """Starts the command in a process of its own, and ends it after the test."""
    started = []

    def start(*arguments, **how):
        command = [sys.executable, "-m", "weightsync", "inspect", run_dir, "--watch", *arguments]
        started.append(subprocess.Popen(command, text=True, stdout=subprocess.PIPE, **how))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_watching_prints_a_line_for_each_change(watch, shm, run_dir):
    process = watch("--json")
    assert json.loads(process.stdout.readline())["version"][1] == 1
    shm.update_weights(version=2)
    assert json.loads(process.stdout.readline())["version"][1] == 2
    time.sleep(1.2)  # two looks that see nothing new
    shm.shutdown()
    assert "gone" in json.loads(process.stdout.readline())["error"]
    process.send_signal(signal.SIGINT)
    assert process.wait(WAIT) == 0
    assert process.stdout.read() == ""


@pytest.mark.slow
def test_watching_where_there_is_no_terminal_shows_one_state_after_the_other(watch, shm):
    process = watch()
    lines = iter(process.stdout.readline, "")
    assert any("1 of epoch" in line for line in lines)
    shm.update_weights(version=2)
    assert any("2 of epoch" in line for line in lines)


@pytest.mark.slow
def test_watching_ends_when_nobody_listens_any_more(watch, shm):
    process = watch("--json", stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    shm.update_weights(version=2)
    assert process.wait(WAIT) in (0, 1)
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()
    process.stdout = open(os.devnull)  # noqa: SIM115  the fixture closes it


def test_watching_in_a_terminal(shm, run_dir):
    """What a person sees, in a terminal of 80 columns; Ctrl-C ends it without a word."""
    import pty

    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(COLUMNS="80", LINES="24", TERM="xterm")
        os.execv(
            sys.executable, [sys.executable, "-m", "weightsync", "inspect", run_dir, "--watch"]
        )
    os.set_blocking(terminal, False)
    seen = bytearray()

    def shows(words):
        with contextlib.suppress(OSError):  # nothing new, or it has ended
            seen.extend(os.read(terminal, 65536))
        return words in bytes(seen)

    try:
        eventually(lambda: shows(b"1 of epoch"))
        shm.update_weights(version=2)
        eventually(lambda: shows(b"2 of epoch"))
        shutil.rmtree(run_dir)
        eventually(lambda: shows(b"the run is gone"))
        assert b"has ended: pid" in bytes(seen).rpartition(b"the run is gone")[2] or eventually(
            lambda: shows(b"has ended: pid")
        )
        os.write(terminal, b"\x03")
        ended = eventually(lambda: os.waitpid(pid, os.WNOHANG)[0] and (0,))
        assert ended
        shows(b"")
        assert b"Traceback" not in seen
        assert b"Abort" not in seen
        _, closed, after = bytes(seen).rpartition(b"\x1b[?1049l")  # the screen of its own
        assert closed
        assert b"2 of epoch" in after
        assert b"alive: pid" not in after
    finally:
        os.close(terminal)


@pytest.mark.parametrize("killed", [True, False])
def test_of_a_run_that_is_gone_it_stays_known_that_its_sender_was_killed(killed):
    last = RunStatus("shm", "/dev/shm/run", sender_alive=not killed, sender="pid 7 on host")
    seen = _last_seen(_GONE, last)
    assert (seen.sender_alive, seen.sender_ended) == (False, not killed)
