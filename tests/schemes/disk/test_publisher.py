"""What the sender leaves on the disk: whole versions, so many, and nothing else."""

import os
import weakref

import pytest
import torch

import weightsync as ws
from tests.conftest import assert_all_same, copy_of
from weightsync.errors import NoRoomError, SenderBusyError, SourceError, VersionError
from weightsync.schemes.disk import feed, names
from weightsync.schemes.disk import publisher as publisher_module
from weightsync.version import Version


def weights(value=1.0, count=3):
    return {f"w{n}": torch.full((1000 + n,), float(value)) for n in range(count)}


def content(run, version):
    with run.lease(version) as snapshot:
        snapshot.verify()
        return {name: copy_of(tensor) for name, tensor in snapshot}


# -------------------------------------------------------------------- how many stay


def test_the_newest_few_stay(run):
    sender = run.sender(keep=2)
    for number in range(5):
        report = sender.update_weights(weights(number), version=number)
        assert run.steps() == list(range(max(0, number - 1), number + 1))
    assert_all_same(content(run, report.version), weights(4))


def test_what_is_leased_stays_until_it_is_not(run):
    """R6: keep=1, and a reader of the second version."""
    sender = run.sender(keep=1)
    sender.update_weights(weights(0), version=0)
    held = run.lease(sender.update_weights(weights(1), version=1).version)
    for number in range(2, 5):
        sender.update_weights(weights(number), version=number)
    assert run.steps() == [1, 4]
    held.verify()
    assert_all_same({name: copy_of(tensor) for name, tensor in held}, weights(1))
    held.close()
    sender.update_weights(weights(5), version=5)
    assert run.steps() == [5]


def test_a_version_that_went_is_said_to_be_gone(run):
    sender = run.sender(keep=1)
    first = sender.update_weights(weights(1), version=1).version
    sender.update_weights(weights(2), version=2)
    with pytest.raises(ws.VersionGoneError, match="keep="):
        run.lease(first)


def test_older_versions_of_former_senders_go_too(run):
    for _ in range(3):
        sender = run.sender(keep=2)
        sender.update_weights(weights(), version=7)
        sender.shutdown()
    assert run.steps() == [7, 7]


def test_foreign_files_and_directories_stay(run):
    (run.path).mkdir(mode=0o700)
    foreign = [run.path / "checkpoint-1/model.safetensors", run.path / "notes.txt",
               run.path / "step-0000000001-x/model.safetensors"]  # fmt: skip
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"mine")
    sender = run.sender(keep=1)
    first = sender.update_weights(weights(), version=1).version
    (run.folder(first) / "tokenizer.json").write_text("{}")
    for number in (2, 3):
        sender.update_weights(weights(), version=number)
    assert (run.folder(first) / "tokenizer.json").exists()
    assert [p.name for p in run.folder(first).iterdir()] == ["tokenizer.json"]
    sender.shutdown()
    again = run.sender(keep=1, keep_files=False)
    again.update_weights(weights(), version=1)
    again.shutdown()
    for path in foreign:
        assert path.read_bytes() == b"mine"


# -------------------------------------------------------------------- the end, and the next one


def test_versions_stay_when_the_sender_ends(run):
    sender = run.sender()
    version = sender.update_weights(weights(5), version=1).version
    sender.shutdown()
    assert run.scheme().newest() == version
    assert run.scheme().create_subscriber().snapshot  # needs no sender
    again = run.sender()
    assert_all_same(content(run, version), weights(5))
    newer = again.update_weights(weights(6), version=0).version
    assert newer > version
    assert_all_same(content(run, newer), weights(6))


def test_or_go_with_it(run):
    sender = run.sender(keep_files=False)
    sender.update_weights(weights(), version=1)
    sender.shutdown()
    assert not run.path.exists()


def test_what_is_read_stays_when_the_sender_ends(run):
    sender = run.sender(keep_files=False)
    held = run.lease(sender.update_weights(weights(2), version=1).version)
    sender.update_weights(weights(3), version=2)
    sender.shutdown()
    held.verify()
    assert run.steps() == [1]


def test_newest_is_none_before_the_first(run):
    assert run.scheme().newest() is None
    run.sender()
    assert run.scheme().newest() is None


def test_a_second_sender_is_refused(run):
    run.sender()
    with pytest.raises(SenderBusyError, match=f"pid {os.getpid()}"):
        run.sender()


def test_an_epoch_that_was_seen_is_refused(run):
    """Also one of a version whose sender's record is gone."""
    sender = run.sender()
    version = sender.update_weights(weights(), version=1).version
    sender.shutdown()
    (run.path / "sender.lock").unlink()
    from weightsync.deadline import Deadline

    publisher = run.scheme().create_publisher()
    with pytest.raises(VersionError, match="not later"):
        publisher.open(Deadline(1), epoch=version.epoch)
    assert publisher.open(Deadline(1), epoch=version.epoch + 1) == version.epoch + 1
    publisher.close()


@pytest.mark.parametrize("left", ["unfinished", "half removed", "not announced"])
def test_a_crash_needs_no_cleaning(run, left):
    sender = run.sender()
    version = sender.update_weights(weights(1), version=1).version
    sender.shutdown()
    newer = Version(version.epoch, 2)
    if left == "unfinished":
        folder = run.path / names.unfinished_name(newer)
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"x" * 5000)
        (run.path / ".HEAD.1.2.tmp").write_bytes(b"{")
    elif left == "half removed":
        folder = run.path / names.version_name(Version(version.epoch, 0))
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"x" * 5000)
    else:
        folder = run.path / names.version_name(newer)
        os.rename(run.folder(version), folder)
        os.mkdir(run.folder(version))
        for name in os.listdir(folder):
            os.link(folder / name, run.folder(version) / name)
    again = run.sender()
    assert not folder.exists()
    assert run.steps() == [1]
    assert_all_same(content(run, version), weights(1))
    again.update_weights(weights(3), version=3)
    assert {path.name.split("-")[0] for path in run.path.iterdir()} == {
        "HEAD", "receivers", "sender.lock", "step"
    }  # fmt: skip


def test_a_head_that_nobody_understands_is_no_hindrance(run):
    sender = run.sender()
    sender.update_weights(weights(1), version=1)
    sender.shutdown()
    (run.path / "HEAD").write_bytes(b"\x80garbage")
    again = run.sender()
    assert run.steps() == [1]  # somebody may want it
    version = again.update_weights(weights(2), version=1).version
    assert_all_same(content(run, version), weights(2))


# -------------------------------------------------------------------- nothing half


def test_w10_what_cannot_be_sent_leaves_everything_as_it_was(run):
    sender = run.sender()
    version = sender.update_weights(weights(1), version=1).version
    before = sorted(run.path.rglob("*"))
    with pytest.raises(SourceError, match="offloaded"):
        sender.update_weights({**weights(2), "offloaded": torch.ones(3, device="meta")}, version=2)
    assert sorted(run.path.rglob("*")) == before
    assert_all_same(content(run, version), weights(1))


class Breaking:
    """A stream that ends early, with an error of its own or without."""

    def __init__(self, error=None):
        self.manifest = None
        self.error = error
        self.rounds = 0

    def __iter__(self):
        self.rounds += 1
        yield from list(weights(2).items())[: None if self.rounds == 1 else 2]
        if self.rounds > 1 and self.error:
            raise self.error


@pytest.mark.parametrize("error", [None, OSError("the disk of the trainer is gone"),
                                   KeyboardInterrupt()], ids=repr)  # fmt: skip
def test_a_stream_that_breaks_off_leaves_nothing(run, error):
    sender = run.sender()
    version = sender.update_weights(weights(1), version=1).version
    before = sorted(run.path.rglob("*"))
    with pytest.raises(type(error) if error else SourceError):
        sender.update_weights(Breaking(error), version=2)
    assert sorted(run.path.rglob("*")) == before
    assert_all_same(content(run, version), weights(1))
    sender.update_weights(weights(3), version=3)


@pytest.mark.parametrize("step", ["write", "sync", "rename", "head"])
def test_a_step_that_fails_leaves_the_former_version(run, step, monkeypatch):
    sender = run.sender()
    version = sender.update_weights(weights(1), version=1).version
    before = sorted(run.path.rglob("*"))
    with monkeypatch.context() as patch:
        broken = OSError(28, "No space left on device")
        target = {"write": "pwrite", "sync": "fsync", "rename": "rename", "head": "rename"}[step]
        real = getattr(os, target)

        def fail(*args, **options):
            if step == "head" and args[1] != "HEAD":
                return real(*args, **options)
            raise broken

        patch.setattr(os, target, fail)
        with pytest.raises((NoRoomError, OSError)):
            sender.update_weights(weights(2), version=2)
    assert sorted(run.path.rglob("*")) == before
    assert run.scheme().newest() == version
    assert sender.update_weights(weights(2), version=2).changed in (None, 3)
    assert run.steps() == [1, 2]


def test_too_little_room_is_an_error_before_the_first_byte(run, monkeypatch):
    sender = run.sender()
    sender.update_weights(weights(1), version=1)
    before = sorted(run.path.rglob("*"))
    monkeypatch.setattr(publisher_module.Directory, "free_bytes", lambda self: 5000)
    monkeypatch.setattr(publisher_module, "write_version", None)  # not even called
    with pytest.raises(NoRoomError, match="5,000 are free"):
        sender.update_weights(weights(2), version=2)
    assert sorted(run.path.rglob("*")) == before


def test_what_would_go_afterwards_goes_first_if_there_is_no_room(run, monkeypatch):
    sender = run.sender(keep=3)
    for number in range(3):
        sender.update_weights(weights(number), version=number)

    def free(directory):
        return 0 if len(run.steps()) > 2 else 1 << 40

    monkeypatch.setattr(publisher_module.Directory, "free_bytes", free)
    sender.update_weights(weights(3), version=3)
    assert run.steps() == [1, 2, 3]


def test_the_same_number_again_is_possible_with_the_same_weights_only(run):
    sender = run.sender()
    sender.update_weights(weights(1), version=1, receivers=["a"])
    kept = sorted((p, p.stat().st_ino) for p in run.path.glob("step-*/*"))
    sender.update_weights(weights(1), version=1, receivers=["b"])
    assert sorted((p, p.stat().st_ino) for p in run.path.glob("step-*/*")) == kept
    assert b'"receivers": ["b"]' in (run.path / "HEAD").read_bytes()
    with pytest.raises(VersionError, match="other weights"):
        sender.update_weights(weights(2), version=1)
    assert sorted((p, p.stat().st_ino) for p in run.path.glob("step-*/*")) == kept


def test_l6_what_changed_is_counted(run):
    made = {f"w{n}": torch.zeros(1 << 19) for n in range(4)}  # of 2 MiB
    sender = run.sender(made, shard_bytes=5 << 20)
    assert sender.update_weights(version=1).changed is None
    assert sender.update_weights(version=2).changed == 0
    made["w3"][-1] = 1
    assert sender.update_weights(version=3).changed == 1


# -------------------------------------------------------------------- how it is written


def test_the_head_is_on_the_disk_after_all_that_it_announces(run, monkeypatch):
    """fsync of files, of their directory, a rename, the run's directory, the head, and again."""
    sender = run.sender(shard_bytes=1 << 20)
    big = {f"w{n}": torch.ones(200_000) for n in range(3)}
    did = []
    fsync, rename = os.fsync, os.rename

    def name_of(fd):
        return os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))

    monkeypatch.setattr(os, "fsync", lambda fd: did.append(name_of(fd)) or fsync(fd))
    monkeypatch.setattr(os, "rename", lambda *a, **k: did.append(a[:2]) or rename(*a, **k))
    version = sender.update_weights(big, version=1).version
    folder, unfinished = names.version_name(version), names.unfinished_name(version)
    files = {p.name for p in run.folder(version).iterdir()} - {"weightsync.lock"}
    settled = did.index((unfinished, folder))
    assert set(did[: settled - 1]) == files
    assert did[settled - 1] == unfinished
    assert did[settled + 1] == "run"
    assert [d[1] for d in did[settled + 2 :] if isinstance(d, tuple)] == ["HEAD"]
    assert did[settled + 2].startswith(".HEAD")
    assert did[-1] == "run"


def test_nothing_is_waited_for_if_it_need_not_be_durable(run, monkeypatch):
    sender = run.sender(durable=False)
    monkeypatch.setattr(os, "fsync", lambda fd: pytest.fail("fsync"))
    version = sender.update_weights(weights(1), version=1).version
    assert_all_same(content(run, version), weights(1))


@pytest.mark.parametrize("direct", [True, False])
def test_w1_strided_cast_and_large_tensors(run, direct, monkeypatch):
    """W6: a tensor larger than the staging buffer is cut, along whatever dimension it takes."""
    monkeypatch.setattr(feed, "STAGING", 10_000)
    torch.manual_seed(0)
    sent = {
        "transposed": torch.randn(300, 200).t(),
        "every second": torch.randn(7, 501)[:, ::2],
        "permuted": torch.randn(3, 5, 40, 30).permute(3, 0, 2, 1),
        "one row": torch.randn(1, 1, 9000).expand(1, 2, 9000)[..., ::3],
        "expanded": torch.randn(1, 64).expand(500, 64),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 5),
        "plain": torch.randn(4000),
        "counted": torch.arange(5000),
    }
    sender = run.scheme(direct=direct).create_sender(sent, dtype=torch.bfloat16)
    with sender:
        sender.connect()
        version = sender.update_weights(version=1).version
        expected = {
            n: (t.to(torch.bfloat16) if t.is_floating_point() else t).contiguous()
            for n, t in sent.items()
        }
        assert_all_same(content(run, version), expected)


def test_g6_a_stream_is_not_held(run):
    """200 tensors of 1 MiB, of which two at most are alive."""
    alive, most = weakref.WeakSet(), []

    def stream():
        for n in range(100):
            tensor = torch.full((1 << 18,), float(n))
            alive.add(tensor)
            most.append(len(alive))
            yield f"w{n}", tensor
            del tensor

    class Stream:
        def __iter__(self):
            return stream()

    version = run.sender().update_weights(Stream(), version=1).version
    assert max(most[100:]) <= 2
    assert content(run, version)["w77"][0] == 77


def test_w7_resident_and_streamed_tensors_together_in_any_order(run):
    """A shuffled second pass, tensors of equal size."""
    base = {f"w{n}": torch.full((70_000,), float(n)) for n in range(20)}

    class Shuffled:
        rounds = 0

        def __iter__(self):
            self.rounds += 1
            items = list(base.items())
            return iter(items if self.rounds == 1 else items[::-2] + items[-2::-2])

    version = run.sender().update_weights(Shuffled(), version=1).version
    assert_all_same(content(run, version), base)
