"""Looking at versions on disk, and in an object store, from outside."""

import os
import secrets

import pytest
import torch

import weightsync as ws
from tests.conftest import WAIT
from weightsync.deadline import Deadline
from weightsync.inspection import SlotStatus
from weightsync.schemes.disk import remote_inspection

WEIGHTS = {"w": torch.ones(2000), "v": torch.ones(1)}


def test_a_run(tmp_path):
    scheme = ws.DiskScheme(str(tmp_path / "run"), keep=2)
    engine = {name: torch.zeros_like(tensor) for name, tensor in WEIGHTS.items()}
    with (
        scheme.create_sender(WEIGHTS, timeout=WAIT) as sender,
        scheme.create_receiver(engine, id="r1") as receiver,
    ):
        sender.connect(WAIT)
        receiver.connect(WAIT)
        first, second = (sender.update_weights(version=number).version for number in (1, 2))
        receiver.poll_and_apply(WAIT)
        third = sender.update_weights(version=3).version
        status = scheme.inspect()
        assert (status.scheme, status.version, status.tensors) == ("disk", third, 2)
        assert (status.sender_alive, status.sender_ended) == (True, False)
        assert str(os.getpid()) in status.sender
        held = {slot.version: slot.state for slot in status.slots}
        assert first not in held
        assert set(held) == {second, third}
        assert status.receivers[0].version == second
        subscriber = scheme.create_subscriber()
        with subscriber.snapshot(third, Deadline(WAIT)):
            states = {slot.version: slot.state for slot in scheme.inspect().slots}
        subscriber.close()
        assert states[third] == "leased"
    status = scheme.inspect()
    assert (status.sender_alive, status.sender_ended) == (False, True)
    assert status.version == third


def test_what_was_left_unfinished_and_what_is_damaged_is_said(tmp_path):
    scheme = ws.DiskScheme(str(tmp_path / "run"))
    with scheme.create_sender(WEIGHTS, timeout=WAIT) as sender:
        sender.connect(WAIT)
        version = sender.update_weights(version=1).version
    folder = tmp_path / "run" / f"step-{1:010d}-{version.epoch}"
    half = tmp_path / "run" / f".step-{2:010d}-{version.epoch}.unfinished"
    half.mkdir(mode=0o700)
    (folder / "weightsync.json").write_text("{")
    status = scheme.inspect()
    assert SlotStatus(half.name, None, None, "written", None) in status.slots
    assert status.problems
    assert "weightsync.json" in status.problems[0]


def test_there_is_no_run(tmp_path):
    with pytest.raises(FileNotFoundError):
        ws.DiskScheme(str(tmp_path / "run")).inspect()
    with pytest.raises(FileNotFoundError):
        ws.DiskScheme(f"memory://{secrets.token_hex(4)}/run", patience=0.3).inspect()


def test_a_store(tmp_path):
    """Who is alive is known by beats: until one was seen, or missed."""
    scheme = ws.DiskScheme(
        f"memory://{secrets.token_hex(4)}/run", cache=str(tmp_path / "cache"), patience=0.5
    )
    with scheme.create_sender(WEIGHTS, timeout=WAIT) as sender:
        sender.connect(WAIT)
        version = sender.update_weights(version=4).version
        status = scheme.inspect()
        assert (status.sender_alive, status.sender_ended) == (True, False)
        assert (status.version, status.tensors, status.problems) == (version, 2, ())
        assert [slot.version for slot in status.slots] == [version]
        assert status.unseen
    status = scheme.inspect()
    assert (status.sender_alive, status.sender_ended) == (False, True)
    assert status.version == version


def test_a_sender_that_ends_while_its_beat_is_waited_for(tmp_path, monkeypatch):
    scheme = ws.DiskScheme(
        f"memory://{secrets.token_hex(4)}/run", cache=str(tmp_path / "cache"), patience=5.0
    )
    with scheme.create_sender(WEIGHTS, timeout=WAIT) as sender:
        sender.connect(WAIT)
        monkeypatch.setattr(remote_inspection.time, "sleep", lambda seconds: sender.shutdown())
        status = scheme.inspect()
    assert (status.sender_alive, status.sender_ended) == (False, True)
