"""A fallback from outside: each of its runs, and all of them as one."""

import torch

import weightsync as ws
from tests.conftest import WAIT


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
