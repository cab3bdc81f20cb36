"""Security: cases X. Nothing received is believed, unpickled or followed."""

import contextlib
import json
import os
import pickle
import random
import stat

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import weightsync as ws
from tests.conftest import WAIT, Ends, assert_all_same, copy_of, read
from weightsync.deadline import Deadline

WEIGHTS = {"a": torch.arange(100.0), "b": torch.arange(7)}


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (self.marker, "w")


@pytest.fixture
def bomb(tmp_path):
    marker = tmp_path / "exploded"
    data = pickle.dumps(Bomb(str(marker)))
    yield data
    assert not marker.exists()
    pickle.loads(data).close()
    assert marker.exists()  # it would have worked


def published(ends, value=1, **scheme_options):
    """A run with one version, and the paths of its files by kind."""
    scheme = ends.scheme(**scheme_options)
    sender = ends.sender({n: t * value for n, t in WEIGHTS.items()}, scheme=scheme)
    version = sender.update_weights(version=1).version
    slot = next(s for s in scheme.inspect().slots if s.version == version)
    base = f"{ends.path}/{slot.generation}"
    return sender, {
        "head": f"{ends.path}/head.json",
        "manifest": f"{base}/manifest.json",
        "record": f"{base}/slot{slot.slot}.json",
        "digests": f"{base}/slot{slot.slot}.digests",
        "bytes": f"{base}/slot{slot.slot}.bin",
        "lock": f"{base}/slot{slot.slot}.lock",
        "sender": f"{ends.path}/sender.lock",
        "receivers": f"{ends.path}/receivers",
        "generation": base,
        "run": ends.path,
    }


def replace(path, data):
    with open(path + ".new", "wb") as file:
        file.write(data)
    os.rename(path + ".new", path)


def outcome(ends):
    """What a fresh receiver makes of the run: an error of ours, or exactly the right weights."""
    target = {name: torch.zeros_like(tensor) for name, tensor in WEIGHTS.items()}
    receiver = ends.scheme().create_receiver(target)
    try:
        receiver.connect(timeout=0.05)
        if receiver.apply_weights(timeout=0.01) is not None:
            assert_all_same(target, WEIGHTS)
            return None
    except ws.WeightSyncError as error:
        for tensor in target.values():
            assert not tensor.count_nonzero()
        return error
    finally:
        receiver.shutdown()


class TestPickles:
    """X1."""

    @pytest.mark.parametrize("file", ["head", "manifest", "record", "digests"])
    def test_read_by_a_receiver(self, ends, bomb, file):
        _, files = published(ends)
        replace(files[file], bomb)
        error = outcome(ends)
        assert isinstance(error, ws.WeightSyncError)
        assert os.path.basename(files[file])[:4] in str(error)

    def test_read_by_a_sender(self, ends, bomb):
        sender = ends.sender(WEIGHTS)
        receiver = ends.receiver({n: torch.zeros_like(t) for n, t in WEIGHTS.items()}, id="r1")
        replace(f"{ends.path}/receivers/x.json", bomb)
        replace(f"{ends.path}/receivers/r1.json", bomb)
        reports = {report.receiver: report for report in sender.receivers()}
        assert {name: report.state for name, report in reports.items()} == {
            "x": "failed",
            "r1": "failed",
        }
        assert "x.json" in reports["x"].error
        with pytest.raises(ws.ReceiverError, match=r"x\.json"):
            sender.update_weights(version=1, wait="applied", timeout=0.05)
        assert receiver.poll_and_apply().version.number == 1
        assert next(r for r in sender.receivers() if r.receiver == "r1").state == "applied"

    @pytest.mark.parametrize("file", ["head", "manifest", "record", "digests", "sender"])
    def test_left_for_the_next_sender(self, ends, bomb, file):
        sender, files = published(ends, keep_files=True)
        sender.shutdown()
        replace(files[file], bomb)
        again = ends.sender(WEIGHTS)
        again.update_weights(version=1)
        assert_all_same(read(ends)[1], WEIGHTS)

    def test_inspected(self, ends, bomb):
        _, files = published(ends)
        for file in ("head", "manifest", "record"):
            replace(files[file], bomb)
        replace(f"{ends.path}/receivers/x.json", bomb)
        status = ends.scheme().inspect()
        assert len(status.problems) >= 2
        assert status.sender_alive

    def test_as_the_weights(self, ends, bomb):
        """Bytes are bytes."""
        sender = ends.sender({"w": torch.frombuffer(bytearray(bomb), dtype=torch.uint8)})
        sender.update_weights(version=1)
        assert bytes(read(ends)[1]["w"].numpy()) == bomb


HOSTILE_NAMES = [
    "a/b", "../x", "../../../x", "/etc/x", "n" * 300, "n" * 100_000, "a\0b", "CON", "größe 日本",
    "\ud800", "\udcff", ".", "..", " ", "\n", "generation-0001", "head.json", "slot0.bin", "*", "~",
    "%s%n", "${HOME}", "a\\b", "\x1b[31m", "__class__", "tensors",
]  # fmt: skip


class TestNames:
    """X4: names are data and never paths: an exact round trip, and nothing outside."""

    def test_round_trip(self, ends, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        sent = {name: torch.full((3,), float(n)) for n, name in enumerate(HOSTILE_NAMES)}
        tied = dict(sent, **{"../tied": sent["a/b"]})
        before = set(os.listdir("/dev/shm"))
        target = {name: torch.zeros(3) for name in tied}
        sender, receiver = ends.pair(tied, target)
        sender.update_weights(version=1)
        receiver.poll_and_apply()
        assert_all_same(target, tied)
        _, received = read(ends)
        assert list(received) == list(sent)
        ours = {os.path.basename(ends.path)}
        assert {n for n in set(os.listdir("/dev/shm")) - before if n.startswith("weights")} <= ours
        assert list(tmp_path.iterdir()) == []
        allowed = ("slot", "manifest.json", "head.json", "sender.lock", receiver.id)
        for _, _, names in os.walk(ends.path):
            assert all(name.startswith(allowed) for name in names)

    def test_empty(self, ends):
        sender = ends.sender()
        with pytest.raises(ws.SourceError, match="name"):
            sender.update_weights({"": torch.ones(1)}, version=1)

    @pytest.mark.parametrize("name", HOSTILE_NAMES, ids=ascii)
    def test_in_messages(self, ends, name):
        """An error names it, printably and in bounds."""
        sender, receiver = ends.pair(
            {name: torch.ones(2)}, {"here": torch.ones(2)}, receiver={"id": "r"}
        )
        sender.update_weights(version=1)
        with pytest.raises(ws.MismatchError) as caught:
            receiver.poll_and_apply()
        assert str(caught.value).isprintable()
        assert caught.value.unexpected == (name,)
        with pytest.raises(ws.SourceError) as refused:
            sender.update_weights({name: torch.ones(2, device="meta")}, version=2)
        assert str(refused.value).isprintable()
        assert sender.receivers()[0].error is not None


class TestDamage:
    """X1's kind: whatever the bytes, an error of ours or the right weights, never a crash."""

    @pytest.fixture
    def run(self, run_dir):
        ends = Ends(run_dir)
        _, files = published(ends)
        contents = {}
        for file in ("head", "manifest", "record", "digests"):
            with open(files[file], "rb") as opened:
                contents[file] = opened.read()
        yield ends, files, contents
        for file, content in contents.items():
            replace(files[file], content)
        ends.shutdown()

    @pytest.mark.parametrize("file", ["head", "manifest", "record", "digests"])
    @settings(
        deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
    @given(st.integers(0, 10_000), st.sampled_from(["cut", "flip", "insert", "empty", "twice"]))
    def test_bytes(self, run, file, at, kind):
        ends, files, contents = run
        data = bytearray(contents[file])
        at %= len(data)
        if kind == "cut":
            del data[at:]
        elif kind == "flip":
            data[at] ^= 1 << at % 8
        elif kind == "insert":
            data[at:at] = b"\0"
        elif kind == "empty":
            data.clear()
        else:
            data = data * 2
        replace(files[file], bytes(data))
        outcome(ends)
        replace(files[file], contents[file])
        assert outcome(ends) is None

    @pytest.mark.parametrize("file", ["head", "manifest", "record"])
    @pytest.mark.parametrize(
        "value",
        [None, True, -1, 0, 1, 63, 64, 10**400, 1.5, float("nan"), float("inf"), "", "x",
         "9" * 5000, "../..",
         "generation-9999", "generation-0001/../..", [], [1], ["a"], {}, {"a": 1}],
        ids=lambda value: repr(value)[:12],
    )  # fmt: skip
    def test_any_field_any_value(self, run, file, value):
        ends, files, contents = run
        document = json.loads(contents[file])
        for field in document:
            changed = {**document, field: value}
            replace(files[file], json.dumps(changed).encode())
            outcome(ends)
            with contextlib.suppress(ws.WeightSyncError):
                ends.scheme().inspect()
            del changed[field]
            replace(files[file], json.dumps(changed).encode())
            assert outcome(ends) is not None
        replace(files[file], contents[file])

    @pytest.mark.parametrize("file", ["head", "manifest", "record"])
    @pytest.mark.parametrize("data", [b"[" * 100_000, b"null", b"[]", b"\xff", b'"' * 9, b" " * 9])
    def test_other_documents(self, run, file, data):
        ends, files, _ = run
        replace(files[file], data)
        assert outcome(ends) is not None

    @pytest.mark.parametrize("size", [0, 1, 4095])
    def test_a_slot_shorter_than_its_manifest_says(self, run, size):
        """An error, not a bus error."""
        ends, files, _ = run
        with open(files["bytes"], "rb") as file:
            content = file.read()
        replace(files["bytes"], content[:size])
        assert isinstance(outcome(ends), ws.ProtocolError)

    def test_a_manifest_that_promises_more_than_the_slot_holds(self, run):
        ends, files, _ = run
        forged = ws.Manifest.build([("a", torch.uint8, (1 << 40,))])
        replace(files["manifest"], forged.to_json())
        assert isinstance(outcome(ends), ws.WeightSyncError)

    def test_another_manifest_over_the_same_bytes(self, run):
        """The digest covers what the bytes are called: swapped names are found."""
        ends, files, _ = run
        forged = ws.Manifest.build([("b", torch.float32, (100,)), ("a", torch.int64, (7,))])
        replace(files["manifest"], forged.to_json())
        target = {"b": torch.zeros(100), "a": torch.zeros(7, dtype=torch.int64)}
        receiver = ends.receiver(target)
        with pytest.raises(ws.WeightSyncError):
            receiver.apply_weights(timeout=0.1)

    def test_every_flipped_bit_of_the_weights_is_found(self, run):
        ends, files, _ = run
        for at in random.Random(0).sample(range(456), 20):
            with open(files["bytes"], "r+b") as file:
                file.seek(at)
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes([byte ^ 1 << at % 8]))
            assert isinstance(outcome(ends), ws.CorruptError)
            with open(files["bytes"], "r+b") as file:
                file.seek(at)
                file.write(bytes([byte]))
        assert outcome(ends) is None

    @pytest.mark.parametrize(
        "record",
        [
            b"[" * 100_000, b"null", b"5", b"[]", b"{}", b'{"epoch": null}', b'{"epoch": 1e400}',
            b'{"epoch": true}', b'{"epoch": -5}', b'{"epoch": "9"}', b"\xff" * 9,
            b'{"epoch": 99999999999999999999999999}',
        ],
        ids=lambda record: repr(record[:20]),
    )  # fmt: skip
    def test_what_a_former_sender_left(self, ends, record):
        """sender.lock and head.json of anything: the next sender starts, and owns the run."""
        os.mkdir(ends.path, 0o700)
        for name in ("sender.lock", "head.json"):
            with open(f"{ends.path}/{name}", "wb") as file:
                file.write(record)
        sender = ends.sender(WEIGHTS)
        sender.update_weights(version=0)
        assert_all_same(read(ends)[1], WEIGHTS)
        with pytest.raises(ws.SenderBusyError, match=f"pid {os.getpid()}"):
            ends.sender(WEIGHTS, connect=False).connect(timeout=0.05)

    @pytest.mark.parametrize("file", ["head", "record"])
    def test_a_huge_epoch_does_not_end_the_run(self, ends, file):
        """A number that only Python can hold."""
        sender, files = published(ends, keep_files=True)
        sender.shutdown()
        with open(files[file], "rb") as opened:
            document = json.load(opened)
        document["epoch"] = 10**4000
        replace(files[file], json.dumps(document).encode())
        again = ends.sender(WEIGHTS)
        again.update_weights(version=1)
        assert_all_same(read(ends)[1], WEIGHTS)

    def test_what_a_receiver_says(self, ends):
        """A receiver that lies, or is broken: it is failed, and the others go on."""
        sender, receiver = ends.pair(
            WEIGHTS, {n: torch.zeros_like(t) for n, t in WEIGHTS.items()}, receiver={"id": "good"}
        )
        with open(f"{ends.path}/receivers/good.json", "rb") as file:
            good = json.load(file)
        values = [None, True, -1, 10**400, float("nan"), float("inf"), "x", [], {}, ["x"], "../x"]
        for field in good:
            for value in values:
                document = json.dumps({**good, "id": "bad", field: value}).encode()
                replace(f"{ends.path}/receivers/bad.json", document)
                reports = {report.receiver: report for report in sender.receivers()}
                assert set(reports) == {"good", "bad"}
                assert reports["bad"].state in ("failed", "dead")
                assert reports["good"].state == "connected"
        for data in (b"", b"[]", b"null", b"[" * 100_000, b"\xff", b"x" * (2 << 20)):
            replace(f"{ends.path}/receivers/bad.json", data)
            assert {r.receiver: r.state for r in sender.receivers()}["bad"] == "failed"
        sender.update_weights(version=1, timeout=WAIT)
        assert receiver.poll_and_apply().version.number == 1


class TestPlanted:
    """X4: symlinks, FIFOs, directories and files where others belong."""

    KINDS = ("symlink", "dangling", "fifo", "directory")

    @staticmethod
    def plant(path, kind, outside):
        if os.path.isdir(path) and not os.path.islink(path):
            os.rename(path, path + ".away")
        elif os.path.lexists(path):
            os.unlink(path)
        if kind == "symlink":
            os.symlink(outside, path)
        elif kind == "dangling":
            os.symlink(str(outside) + ".new", path)
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind == "directory":
            os.mkdir(path)
        else:
            with open(path, "wb") as file:
                file.write(b"text")

    @pytest.fixture
    def outside(self, tmp_path):
        path = tmp_path / "outside"
        path.write_bytes(b"precious")
        path.chmod(0o644)
        yield path
        assert path.read_bytes() == b"precious"
        assert stat.S_IMODE(path.stat().st_mode) == 0o644
        assert os.listdir(tmp_path) == ["outside"]

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(
        "file", ["head", "manifest", "record", "digests", "bytes", "lock", "sender"]
    )
    def test_read_by_a_receiver(self, run_dir, outside, file, kind):
        ends = Ends(run_dir)
        sender, files = published(ends)
        self.plant(files[file], kind, outside)
        assert outcome(ends) is not None
        with contextlib.suppress(ws.WeightSyncError):
            ends.scheme().inspect()
        sender.shutdown()  # whatever it finds

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(
        "file", ["head", "manifest", "record", "digests", "bytes", "lock", "sender"]
    )
    def test_left_for_the_next_sender(self, run_dir, outside, file, kind):
        """It starts and publishes, or refuses with an error of ours; nothing is followed."""
        ends = Ends(run_dir)
        sender, files = published(ends, keep_files=True)
        sender.shutdown()
        self.plant(files[file], kind, outside)
        again = ends.sender(WEIGHTS, connect=False)
        refused = None
        try:
            again.connect(timeout=0.1)
            again.update_weights(version=1, timeout=0.5)
            again.update_weights({n: t + 1 for n, t in WEIGHTS.items()}, version=2, timeout=0.5)
            assert_all_same(read(ends)[1], {n: t + 1 for n, t in WEIGHTS.items()})
        except ws.WeightSyncError as error:
            refused = str(error)
        assert refused is None or os.path.basename(files[file]) in refused
        again.shutdown()

    @pytest.mark.parametrize("kind", ["symlink", "dangling", "fifo", "file"])
    @pytest.mark.parametrize("name", ["receivers", "generation-0001", "generation-0007"])
    def test_in_place_of_a_directory(self, run_dir, outside, name, kind):
        ends = Ends(run_dir)
        os.mkdir(run_dir, 0o700)
        self.plant(f"{run_dir}/{name}", kind, outside)
        sender = ends.sender(WEIGHTS, connect=False)
        refused = None
        try:
            sender.connect(timeout=0.1)
            sender.update_weights(version=1)
            assert outcome(ends) is None
        except ws.WeightSyncError as error:
            refused = str(error)
        assert refused is None or name in refused
        with contextlib.suppress(ws.WeightSyncError):
            ends.scheme().inspect()
        sender.shutdown()
        assert os.listdir(run_dir) == [name]

    @pytest.mark.parametrize("kind", ["symlink", "dangling", "fifo", "file"])
    def test_in_place_of_the_run(self, run_dir, outside, kind):
        self.plant(run_dir, kind, outside.parent if kind == "symlink" else outside)
        ends = Ends(run_dir)
        with pytest.raises(ws.WeightSyncError, match=run_dir):
            ends.sender(WEIGHTS)
        with pytest.raises(ws.WeightSyncError):
            ends.receiver({}, connect=False).connect(timeout=0.05)

    def test_the_run_becomes_a_symlink(self, run_dir, tmp_path):
        """While it is used: nothing is written to, or removed from, where it leads."""
        ends = Ends(run_dir)
        sender, _ = published(ends)
        (tmp_path / "head.json").write_bytes(b"precious")
        os.rename(run_dir, run_dir + "-moved")
        os.symlink(tmp_path, run_dir)
        try:
            with pytest.raises(ws.WeightSyncError, match="removed"):
                sender.update_weights(version=2)
            sender.shutdown()
            assert (tmp_path / "head.json").read_bytes() == b"precious"
            assert os.listdir(tmp_path) == ["head.json"]
        finally:
            import shutil

            shutil.rmtree(run_dir + "-moved")

    @pytest.mark.parametrize("file", ["x.json", "x.lock", "r1.json", "r1.lock"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_among_the_receivers(self, run_dir, outside, file, kind):
        ends = Ends(run_dir)
        sender = ends.sender(WEIGHTS)
        self.plant(f"{run_dir}/receivers/{file}", kind, outside)
        receiver = ends.receiver(
            {n: torch.zeros_like(t) for n, t in WEIGHTS.items()}, id="r1", connect=False
        )
        with contextlib.suppress(ws.WeightSyncError):
            receiver.connect(timeout=0.3)
        with contextlib.suppress(ws.WeightSyncError):
            sender.receivers()
        sender.update_weights(version=1)
        assert_all_same(read(ends)[1], WEIGHTS)
        receiver.shutdown()
        sender.shutdown()


def test_a_directory_that_everybody_may_write_to(run_dir):
    ends = Ends(run_dir)
    os.mkdir(run_dir)
    os.chmod(run_dir, 0o777)
    with pytest.raises(ws.WeightSyncError, match="everybody"):
        ends.sender(WEIGHTS)
    assert os.listdir(run_dir) == []
    with pytest.raises(ws.WeightSyncError, match="everybody"):
        ends.receiver({}, connect=False).connect(timeout=0.05)


def test_files_are_this_users_alone(ends):
    published(ends)
    ends.receiver({n: torch.zeros_like(t) for n, t in WEIGHTS.items()})
    for root, directories, names in os.walk(ends.path):
        for name in [*directories, *names]:
            assert stat.S_IMODE(os.stat(os.path.join(root, name)).st_mode) & 0o077 == 0
    assert stat.S_IMODE(os.stat(ends.path).st_mode) == 0o700


FOREIGN = [
    "notes.txt",
    "head.json.bak",
    ".hidden",
    "generation-1",
    "generation-0001x",
    "receivers/notes.txt",
    "receivers/my notes.json",
    "receivers/.hidden.json",
    "receivers/.lock",
    "generation-0001/notes.txt",
    "generation-0001/slot0.bin.bak",
    "generation-0001/slot.bin",
    "generation-0001/deep/file",
    "generation-0099/foreign",
]


@pytest.mark.parametrize("when", ["before", "while"])
def test_foreign_files_are_left_alone(run_dir, when):
    """Promise 6: whatever is not ours stays, at the start of a sender and at its end."""

    def plant():
        for name in FOREIGN:
            path = os.path.join(run_dir, name)
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            with open(path, "w") as file:
                file.write(name)

    ends = Ends(run_dir)
    if when == "before":
        plant()
    sender, receiver = ends.pair(WEIGHTS, {n: torch.zeros_like(t) for n, t in WEIGHTS.items()})
    if when == "while":
        sender.update_weights(version=1)
        plant()
    for number in (2, 3):
        sender.update_weights(version=number)
        receiver.poll_and_apply()
    ends.shutdown()
    left = {
        os.path.relpath(os.path.join(root, name), run_dir)
        for root, _, names in os.walk(run_dir)
        for name in names
    }
    assert left == set(FOREIGN)
    for name in FOREIGN:
        with open(os.path.join(run_dir, name)) as file:
            assert file.read() == name


def test_the_end_does_not_need_everything_to_be_there(ends):
    """Parts of the run were removed by hand: the rest is given back all the same."""
    import shutil

    sender, _ = published(ends)
    shutil.rmtree(f"{ends.path}/receivers")
    os.unlink(f"{ends.path}/head.json")
    sender.shutdown()
    assert not os.path.exists(ends.path)


def test_a_snapshot_outlives_the_files(ends):
    """A reader in the middle of a copy: removed names take nothing from it."""
    sender, _ = published(ends)
    subscriber = ends.scheme().create_subscriber()
    subscriber.open(Deadline(WAIT))
    version = subscriber.wait(None, Deadline(0))
    with subscriber.snapshot(version, Deadline(WAIT)) as snapshot:
        sender.shutdown()
        snapshot.verify()
        assert_all_same({name: copy_of(tensor) for name, tensor in snapshot}, WEIGHTS)
    subscriber.close()
