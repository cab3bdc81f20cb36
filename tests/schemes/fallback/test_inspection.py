"""A fallback from outside: each of its runs, and all of them as one."""

import pytest
import torch

import weightsync as ws
from tests.conftest import WAIT
from weightsync.testing import roles


def test_all_members_are_shown_and_the_newest_version_wherever_it_is(run_dir, tmp_path):
    fast, slow = ws.DoubleBufferScheme(run_dir), ws.DiskScheme(str(tmp_path / "run"))
    scheme = ws.FallbackScheme([fast, slow])
    assert [member.sender_alive for member in scheme.inspect().members] == [False, False]
    engine = {"w": torch.zeros(10)}
    with (
        scheme.create_sender({"w": torch.ones(10)}, timeout=WAIT) as sender,
        scheme.create_receiver(engine, id="r1") as receiver,
    ):
        sender.connect(WAIT)
        receiver.connect(WAIT)
        version = sender.update_weights(version=1).version
        receiver.poll_and_apply(WAIT)
        status = scheme.inspect()
        assert (status.version, status.sender_alive, status.tensors) == (version, True, 1)
        assert [member.scheme for member in status.members] == ["shm", "disk"]
        assert [member.version for member in status.members] == [version, None]
        assert [(r.receiver, r.version) for r in status.receivers] == [("r1", version)]


def test_a_member_that_cannot_be_looked_at_is_a_problem_of_its_own(run_dir, tmp_path):
    (tmp_path / "run").write_text("a file")
    scheme = ws.FallbackScheme(
        [ws.DoubleBufferScheme(run_dir), ws.DiskScheme(str(tmp_path / "run"))]
    )
    first, second = scheme.inspect().members
    assert first.problems == ()
    assert "not a directory" in second.problems[0]


@pytest.mark.parametrize("published", [True, False])
@pytest.mark.parametrize("killed", ["one before", "the last"])
def test_whether_the_last_sender_has_ended(run_dir, tmp_path, peers, killed, published):
    """The sender that went before it could use but one of the schemes."""
    shm = ws.DoubleBufferScheme(run_dir, keep_files=True)
    disk = ws.DiskScheme(str(tmp_path / "run"))

    def kill():
        (sender,) = peers(1)
        sender.call(roles.send_from, shm)
        if published:
            sender.call(roles.publish, 1)
        sender.kill()

    if killed == "one before":
        kill()
    with disk.create_sender({"w": torch.ones(2)}, timeout=WAIT) as last:
        last.connect(WAIT)
        if published:
            last.update_weights(version=9)
    if killed == "the last":
        kill()
    status = ws.FallbackScheme([shm, disk]).inspect()
    # Which one came last cannot be told before there are versions.
    ended = published and killed == "one before"
    assert (status.sender_alive, status.sender_ended) == (False, ended)
