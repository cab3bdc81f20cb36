"""Looking at a run from outside: it changes nothing and needs no sender."""

import os
import shutil

import pytest
import torch

import weightsync as ws
from tests.conftest import WAIT
from weightsync.deadline import Deadline
from weightsync.files import is_locked
from weightsync.run import look as look_module


def look(path):
    """Everything under a path, and when it was changed."""
    return {
        os.path.join(root, name): os.stat(os.path.join(root, name)).st_mtime_ns
        for root, directories, names in os.walk(path)
        for name in [*directories, *names]
    }


def test_a_run(ends):
    sender, receiver = ends.pair(
        {"w": torch.ones(2000), "v": torch.ones(1)},
        {"w": torch.zeros(2000), "v": torch.zeros(1)},
        receiver={"id": "r1"},
    )
    empty = ends.scheme().inspect()
    assert (empty.version, empty.time, empty.tensors, empty.nbytes) == (None, None, 0, 0)
    assert empty.sender_alive
    assert [r.receiver for r in empty.receivers] == ["r1"]
    assert [(s.version, s.state) for s in empty.slots] == [(None, "free")] * 2

    first = sender.update_weights(version=1).version
    receiver.poll_and_apply()
    second = sender.update_weights(version=2).version
    before = look(ends.path)
    status = ends.scheme().inspect()
    assert look(ends.path) == before
    assert status.path == ends.path
    assert status.version == second
    assert status.tensors == 2
    assert status.nbytes == 2001 * 4  # without the padding between them
    assert {s.version: s.state for s in status.slots} == {first: "leased", second: "free"}
    assert all(s.nbytes >= status.nbytes for s in status.slots)
    assert status.receivers[0].version == first
    assert status.problems == ()
    receiver.poll_and_apply()
    status = ends.scheme().inspect()
    assert {s.version: s.state for s in status.slots} == {first: "free", second: "leased"}


def test_without_a_sender(run_dir):
    scheme = ws.DoubleBufferScheme(run_dir, keep_files=True)
    with pytest.raises(FileNotFoundError):
        scheme.inspect()
    with scheme.create_sender({"w": torch.ones(2)}) as sender:
        sender.connect()
        version = sender.update_weights(version=1).version
    status = scheme.inspect()
    assert (status.sender_alive, status.sender_ended) == (False, True)
    assert status.version == version


def test_looking_disturbs_nobody(ends):
    """No lock that a sender or a receiver could run into is taken while looking at slots."""
    scheme = ends.scheme(on_busy="skip")
    sender = ends.sender({"w": torch.ones(2)}, scheme=scheme)
    for number in range(20):
        assert not sender.update_weights(version=number).skipped
        scheme.inspect()


def test_problems_are_listed(ends):
    sender = ends.sender({"w": torch.ones(2)})
    sender.update_weights(version=1)
    kept = {}
    for name in ("head.json", "generation-0001/manifest.json", "generation-0001/slot0.json"):
        with open(f"{ends.path}/{name}", "r+b") as file:
            kept[name] = file.read()
            file.seek(0)
            file.write(b"x")
        status = ends.scheme().inspect()
        assert len(status.problems) == 1
        assert os.path.basename(name) in status.problems[0] or "manifest" in status.problems[0]
        assert status.sender_alive
        with open(f"{ends.path}/{name}", "r+b") as file:
            file.write(kept[name])
    assert ends.scheme().inspect().problems == ()


def test_two_generations(ends):
    sender = ends.sender({"w": torch.ones(2)})
    first = sender.update_weights(version=1).version
    subscriber = ends.scheme().create_subscriber()
    with subscriber.snapshot(first, Deadline(WAIT)):
        second = sender.update_weights({"w": torch.ones(3)}, version=2).version
        status = ends.scheme().inspect()
        assert status.version == second
        assert {s.generation for s in status.slots} == {"generation-0001", "generation-0002"}
        assert {s.version for s in status.slots} == {first, second, None}
    subscriber.close()


def test_a_sender_that_comes_just_when_it_is_looked_at(ends, monkeypatch):
    """After one that has ended: it is not taken for one that was killed."""

    def looked(run, name):
        found = is_locked(run, name)
        if not made:
            made.append(ends.sender(scheme=scheme))
        return found

    made, scheme = [], ends.scheme(keep_files=True)
    ends.sender({"w": torch.ones(2)}, scheme=scheme).shutdown()
    monkeypatch.setattr(look_module, "is_locked", looked)
    status = scheme.inspect()
    made[0].shutdown()
    assert (status.sender_alive, status.sender_ended) == (True, False)
    assert ends.scheme().inspect().sender_ended
    shutil.rmtree(ends.path)
