"""``weightsync clean``: what the dead left goes, and nothing else."""

import os
import shutil
import subprocess
import sys

import pytest
import torch

import weightsync as ws
from tests.conftest import WAIT
from weightsync.deadline import Deadline
from weightsync.testing import roles
from weightsync.testing.processes import eventually


@pytest.fixture
def left(run_dir, peers):
    """What a killed sender has left in memory; gives its scheme."""
    scheme = ws.DoubleBufferScheme(run_dir)
    (sender,) = peers(1)
    sender.call(roles.send_from, scheme)
    sender.call(roles.publish, 1)
    sender.kill()
    return scheme


def entry_of(answer, path):
    """What is said of a path; None: nothing."""
    found = [entry for entry in answer.json["leftovers"] if entry["path"] == str(path)]
    return found[0] if found else None


def test_what_would_be_removed_is_listed_with_its_size_and_age(weightsync, left):
    answer = weightsync("clean", left.path)
    assert answer.code == 0
    assert "would be removed (--yes removes):" in answer.words
    assert left.path in answer.out
    assert "run (shm), last sender pid" in answer.words
    entry = entry_of(weightsync("clean", left.path, "--json"), left.path)
    assert entry["nbytes"] >= 4096
    assert 0 <= entry["seconds"] < 600
    assert (entry["kept"], entry["removed"]) == (None, False)
    assert os.path.exists(f"{left.path}/head.json")


def test_what_a_killed_sender_left_is_removed(weightsync, left):
    answer = weightsync("clean", left.path, "--yes")
    assert answer.code == 0
    assert answer.words.startswith("removed:")
    assert not os.path.exists(left.path)


def test_it_is_found_in_shared_memory_among_other_things(weightsync, left):
    assert entry_of(weightsync("clean", "--json"), left.path)["kept"] is None
    assert os.path.exists(left.path)


def test_a_run_with_a_live_sender_stays(weightsync, shm, run_dir, weights):
    answer = weightsync("clean", run_dir, "--yes", "--json")
    assert answer.code == 0
    entry = entry_of(answer, run_dir)
    assert "its sender is alive" in entry["kept"]
    assert not entry["removed"]
    shm.update_weights(version=2, timeout=WAIT)


def test_a_run_with_a_live_receiver_stays(weightsync, run_dir, peers):
    sender, receiver = peers(2)
    scheme = ws.DoubleBufferScheme(run_dir)
    sender.call(roles.send_from, scheme)
    receiver.call(roles.receive_in, scheme, "engine")
    sender.call(roles.publish, 1)
    sender.kill()
    entry = entry_of(weightsync("clean", run_dir, "--yes", "--json"), run_dir)
    assert entry["kept"] == "receiver 'engine' is alive"
    assert receiver.call(roles.poll) == (1, 1)
    receiver.kill()
    assert weightsync("clean", run_dir, "--yes").code == 0
    assert not os.path.exists(run_dir)


def test_a_version_that_somebody_reads_stays(weightsync, left):
    """A reader without an id has nothing but its lease."""
    subscriber = left.create_subscriber()
    version = left.inspect().version
    with subscriber.snapshot(version, Deadline(WAIT)) as snapshot:
        entry = entry_of(weightsync("clean", left.path, "--yes", "--json"), left.path)
        assert entry["kept"] == "somebody reads it"
        snapshot.verify()
    subscriber.close()
    weightsync("clean", left.path, "--yes")
    assert not os.path.exists(left.path)


def test_a_lease_that_the_kernel_s_list_does_not_show_counts_too(weightsync, left, monkeypatch):
    """Locks of other containers are not listed; they are there all the same."""
    monkeypatch.setattr("weightsync.run.look.lock_kinds", lambda inode: set())
    subscriber = left.create_subscriber()
    with subscriber.snapshot(left.inspect().version, Deadline(WAIT)) as snapshot:
        answer = weightsync("clean", left.path, "--yes", "--json")
        assert answer.code == 1
        assert "is locked: somebody uses it" in entry_of(answer, left.path)["kept"]
        snapshot.verify()
    subscriber.close()


def test_a_sender_that_came_after_the_last_look_keeps_its_run(
    weightsync, shm, run_dir, monkeypatch
):
    monkeypatch.setattr("weightsync.leftovers.runs._in_use", lambda run, kind: None)
    answer = weightsync("clean", run_dir, "--yes", "--json")
    assert answer.code == 1
    assert entry_of(answer, run_dir)["kept"] == "its sender is alive"
    shm.update_weights(version=2, timeout=WAIT)


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away takes privileges")
def test_what_belongs_to_somebody_else_is_not_even_listed(weightsync, left):
    os.chown(left.path, 54321, 54321)
    assert weightsync("clean", left.path, "--yes").words == "nothing of ours is there"
    assert os.path.exists(f"{left.path}/head.json")


def test_a_new_sender_finds_a_clean_place(weightsync, left):
    weightsync("clean", left.path, "--yes")
    with left.create_sender({"w": torch.ones(3)}, timeout=WAIT) as sender:
        sender.connect(WAIT)
        sender.update_weights(version=1)


def test_what_is_not_ours_stays(weightsync, left, tmp_path):
    with open(f"{left.path}/notes.txt", "w") as file:
        file.write("mine")
    answer = weightsync("clean", left.path, "--yes", "--json")
    assert answer.code == 1
    assert "not ours" in entry_of(answer, left.path)["kept"]
    assert os.listdir(left.path) == ["notes.txt"]


def test_directories_that_look_alike_are_left_alone(weightsync, tmp_path):
    """Names alone are not enough: there has to be the lock of a sender."""
    for name, inner in (("a", "generation-0001"), ("b", "receivers"), ("c", "step-0000000001-5")):
        (tmp_path / name / inner).mkdir(parents=True)
    (tmp_path / "d").mkdir()
    (tmp_path / "d/sender.lock").write_text("")
    (tmp_path / "d/thesis.txt").write_text("mine")
    answer = weightsync("clean", tmp_path, "--yes", "--kept")
    assert answer.words == "nothing of ours is there"
    assert len(list(tmp_path.rglob("*"))) == 9


def test_symlinks_are_not_followed(weightsync, left, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(left.path)
    answer = weightsync("clean", link, "--yes")
    assert answer.code == 2
    assert "symlink" in answer.err
    assert weightsync("clean", tmp_path, "--yes").words == "nothing of ours is there"
    assert os.path.exists(f"{left.path}/head.json")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "slot0.bin").write_text("mine")
    os.symlink(outside, f"{left.path}/generation-0007")
    weightsync("clean", left.path, "--yes")
    assert (outside / "slot0.bin").read_text() == "mine"


def test_versions_on_disk_are_kept_on_purpose(weightsync, disk):
    half = disk / ".step-0000000003-1.unfinished"
    half.mkdir(mode=0o700)
    (half / "model.safetensors").write_bytes(b"x" * 5000)
    entry = entry_of(weightsync("clean", disk.parent, "--yes", "--json"), disk)
    assert (entry["what"], entry["removed"]) == ("1 unfinished version", True)
    assert not half.exists()
    entry = entry_of(weightsync("clean", disk.parent, "--yes", "--json"), disk)
    assert "--kept" in entry["kept"]
    assert len(list(disk.glob("step-*"))) == 2
    assert weightsync("clean", disk, "--kept", "--yes").code == 0
    assert not disk.exists()


def test_unfinished_versions_of_a_live_sender_stay(weightsync, tmp_path, weights):
    path = tmp_path / "run"
    with ws.DiskScheme(str(path)).create_sender(weights, timeout=WAIT) as sender:
        sender.connect(WAIT)
        sender.update_weights(version=1)
        half = path / ".step-0000000002-1.unfinished"
        half.mkdir(mode=0o700)
        weightsync("clean", tmp_path, "--yes", "--kept")
        assert half.exists()
        assert len(list(path.glob("step-*"))) == 1


def test_a_run_that_others_hosts_have_used_stays_where_locks_may_not_be_seen(
    weightsync, left, monkeypatch
):
    monkeypatch.setattr("weightsync.leftovers.runs.is_in_memory", lambda path: False)
    assert entry_of(weightsync("clean", left.path, "--json"), left.path)["kept"] is None
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    entry = entry_of(weightsync("clean", left.path, "--yes", "--json"), left.path)
    assert "their locks may not be seen here" in entry["kept"]


def test_what_killed_drivers_of_adapters_left(weightsync, tmp_path):
    folder = tmp_path / "weightsync-adapter-abc_1234"
    folder.mkdir(mode=0o700)
    from weightsync.files import Directory, Lock
    from weightsync.vllm_worker.adapters import LOCK_NAME

    lock = Lock(Directory.open(str(folder)), LOCK_NAME, create=True)
    assert lock.try_shared()
    entry = entry_of(weightsync("clean", tmp_path, "--yes", "--json"), folder)
    assert entry["kept"] == "a living process uses it"
    lock.release()
    assert entry_of(weightsync("clean", tmp_path, "--yes", "--json"), folder)["removed"]
    assert not folder.exists()


def test_proofs_of_choose_are_removed_when_they_are_old(weightsync, tmp_path):
    old, young, other = (
        tmp_path / f"weightsync-proof-{name}" for name in ("a" * 16, "b" * 16, "notes")
    )
    for path in (old, young, other):
        path.write_text("x")
    os.utime(old, (1, 1))
    weightsync("clean", tmp_path, "--yes")
    assert [path.exists() for path in (old, young, other)] == [False, True, True]


def test_a_folder_of_doctor_s_is_removed_when_it_is_old(weightsync, tmp_path):
    old, young, other = (tmp_path / f"weightsync-doctor-{w}" for w in ("a" * 8, "b" * 8, "mine"))
    for path in (old, young, other):
        path.mkdir(mode=0o700)
        (path / "file").write_text("")
        os.utime(path, (1, 1) if path is not young else None)
    weightsync("clean", tmp_path, "--yes")
    assert [path.exists() for path in (old, young, other)] == [False, True, True]


@pytest.mark.parametrize(
    "arguments",
    [["--yes", "--dry-run"], ["nccl://127.0.0.1:29599"], ["/nothing/here"], ["memory://x/y"]],
)
def test_what_is_refused(weightsync, arguments):
    answer = weightsync("clean", *arguments)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["clean", "nccl://127.0.0.1:29599?token=hush"],
        ["clean", "memory://me:hush@x/y"],
        ["bench", "--scheme", "nccl://127.0.0.1:29599?token=hush"],
        ["inspect", "fallback://nccl://127.0.0.1:29599?token=hush,disk://memory://me:hush@x/y"],
    ],
)
def test_no_command_tells_what_is_secret_in_a_url(weightsync, arguments):
    answer = weightsync(*arguments)
    said = answer.out + answer.err
    assert "hush" not in said
    assert "127.0.0.1" in said or "***@x" in said


def test_the_runs_of_a_fallback(weightsync, left, disk):
    url = f"fallback://nccl://127.0.0.1:29599?backend=gloo,shm://{left.path},disk://{disk}"
    paths = [entry["path"] for entry in weightsync("clean", url, "--json").json["leftovers"]]
    assert paths == [left.path, str(disk)]


def test_while_others_start_and_stop(weightsync, run_dir):
    """It never takes a run from under a sender, and never fails for what goes meanwhile."""
    code = (
        "import sys, torch, weightsync as ws\n"
        "for n in range(15):\n"
        "    with ws.DoubleBufferScheme(sys.argv[1]).create_sender({'w': torch.ones(9)}) as s:\n"
        "        s.connect(20)\n"
        "        s.update_weights(version=1)\n"
        "        s.update_weights(version=2)\n"
        "print('done')\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, run_dir], stdout=subprocess.PIPE)
    try:
        eventually(lambda: os.path.exists(run_dir) or process.poll() is not None)
        while process.poll() is None:
            parent = os.path.dirname(run_dir)
            assert weightsync("clean", parent, "--json").code == 0
            with_run = [run_dir] if os.path.exists(run_dir) else []
            for path in with_run:
                assert weightsync("clean", path, "--yes").code in (0, 1, 2)
        assert process.stdout.read() == b"done\n"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        shutil.rmtree(run_dir, ignore_errors=True)
