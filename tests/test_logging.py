"""What the log says: nothing of a healthy run, unless asked; then one line for each update."""

import logging
import re
import socket
import subprocess
import sys
import threading

import pytest

import weightsync as ws
from tests.conftest import WAIT
from tests.fakes import fake, weights


@pytest.fixture
def healthy(ends):
    """A run of two updates, begun and ended."""

    def run(scheme=None):
        sender, receiver = ends.pair(weights(1), fake(), scheme=scheme, receiver={"id": "r"})
        reports = []
        for step in (1, 2):
            reports.append(sender.update_weights(version=step))
            receiver.poll_and_apply()
        ends.shutdown()
        return reports

    return run


def test_a_healthy_run_warns_of_nothing(healthy, caplog):
    with caplog.at_level(logging.WARNING, "weightsync"):
        healthy()
    assert caplog.messages == []


def test_at_info_each_side_says_one_line_of_each_update(healthy, caplog, run_dir):
    with caplog.at_level(logging.INFO, "weightsync"):
        reports = healthy()
    assert {record.levelname for record in caplog.records} == {"INFO"}
    assert len(caplog.messages) == 4
    for number, report in enumerate(reports):
        sent, applied = caplog.messages[2 * number : 2 * number + 2]
        assert re.fullmatch(
            rf"sender to shm://{run_dir}: version {report.version} by shm, "
            r"\d+\.\d\d kB in \d+\.\d{3} s",
            sent,
        )
        assert re.fullmatch(
            rf"receiver r: version {report.version} by shm, \d+\.\d\d kB in \d+\.\d{{3}} s, "
            r"requests stopped for \d+\.\d{3} s",
            applied,
        )


def test_a_skipped_version_says_so(ends, caplog):
    scheme = ends.scheme(on_busy="skip")
    sender, receiver = ends.pair(weights(1), fake(), scheme=scheme)
    sender.update_weights(version=1)
    receiver.poll_and_apply()
    sender.update_weights(version=2)
    with caplog.at_level(logging.INFO, "weightsync"):
        assert sender.update_weights(version=3).skipped
    (line,) = caplog.messages
    assert ":3 by shm was skipped" in line


def test_a_follower_warns_of_what_it_cannot_apply_in_one_line_with_the_version(ends, caplog):
    engine = fake()
    sender, receiver = ends.pair(weights(1), engine, receiver={"id": "r"})
    engine.fail["stage"] = RuntimeError("no room:\n  of 80 GB\n  none")
    failed = threading.Event()
    receiver.follow(on_error=lambda error: failed.set())
    version = sender.update_weights(version=1).version
    assert failed.wait(WAIT)
    (line,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert line.startswith(f"receiver r: version {version} by shm failed after")
    assert line.endswith("RuntimeError: no room: of 80 GB none")


def test_nothing_is_printed_by_a_program_that_sets_up_no_logging():
    program = "import logging, weightsync; logging.getLogger('weightsync').error('unheard')"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout + done.stderr == ""


def test_what_is_raised_is_left_to_the_caller_to_log(ends, caplog):
    engine = fake()
    sender, receiver = ends.pair(weights(1), engine)
    sender.update_weights(version=1)
    engine.fail["stage"] = RuntimeError("no room")
    with pytest.raises(RuntimeError), caplog.at_level(logging.INFO, "weightsync"):
        receiver.poll_and_apply()
    assert caplog.messages == []


def test_a_token_is_in_no_message(ends, caplog):
    """Neither in the log nor in the words that a sender and a receiver are given."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    elsewhere = ws.NCCLScheme(
        master_address="127.0.0.1", master_port=port, backend="gloo", token="hush"
    )
    sender, receiver = ends.pair(weights(1), fake())
    sender.update_weights(version=1)
    receiver.poll_and_apply()
    said = []
    with caplog.at_level(logging.DEBUG, "weightsync"):
        with pytest.raises(ws.WeightSyncError) as raised:
            receiver.switch(elsewhere, timeout=0.2)
        said.append(raised.value)
        with elsewhere.create_sender(weights(2)) as other:
            other.connect(WAIT)
            with pytest.raises(
                ws.WeightSyncError, match=f"127.0.0.1:{port}.*: no version"
            ) as raised:
                receiver.switch(elsewhere, timeout=0.5)
            said.append(raised.value)
            with pytest.raises(ws.WeightSyncError) as raised:
                other.attach(receiver)
            said.append(raised.value)
    assert "hush" not in f"{said} {caplog.text}"
