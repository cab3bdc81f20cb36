"""The trainer's raw end: slots, generations, ownership, leftovers."""

import json
import os

import pytest
import torch

import weightsync as ws
from tests.conftest import WAIT, assert_all_same, copy_of
from weightsync.deadline import Deadline
from weightsync.errors import (
    DeadlineError,
    SenderBusyError,
    VersionError,
    VersionGoneError,
    WeightSyncError,
)
from weightsync.manifest import Manifest
from weightsync.report import ReceiverReport
from weightsync.source import as_source
from weightsync.version import Version


@pytest.fixture
def open_ends(run_dir):
    """Opens publishers and subscribers of ``run_dir``, and closes them in reverse."""
    opened = []

    def publisher(**options):
        opened.append(ws.DoubleBufferScheme(run_dir, **options).create_publisher())
        return opened[-1], opened[-1].open(Deadline(WAIT))

    def subscriber(id=None, **options):
        opened.append(ws.DoubleBufferScheme(run_dir, **options).create_subscriber(id))
        opened[-1].open(Deadline(WAIT))
        return opened[-1]

    yield publisher, subscriber
    for end in reversed(opened):
        end.close()


def publish(publisher, version, value, receivers=None, timeout=0.05, size=100):
    weights = as_source({"w": torch.full((size,), float(value)), "v": torch.tensor(value)})
    return publisher.publish(version, weights, Deadline(timeout), receivers)


def value_of(snapshot):
    snapshot.verify()
    weights = {name: copy_of(tensor) for name, tensor in snapshot}
    value = weights["v"].item()
    assert weights["w"].eq(value).all()
    return value


def test_the_files_of_a_run(open_ends, run_dir):
    """The format of the design page."""
    publisher, epoch = open_ends[0]()
    publish(publisher, Version(epoch, 3), 1)
    assert sorted(os.listdir(run_dir)) == [
        "generation-0001",
        "head.json",
        "receivers",
        "sender.lock",
    ]
    files = {"manifest.json", "slot0.bin", "slot0.lock", "slot1.bin", "slot1.lock"}
    assert files <= set(os.listdir(f"{run_dir}/generation-0001"))
    with open(f"{run_dir}/head.json") as file:
        head = json.load(file)
    assert (head["epoch"], head["number"]) == (epoch, 3)
    assert head["generation"] == "generation-0001"
    with open(f"{run_dir}/generation-0001/slot{head['slot']}.json") as file:
        assert json.load(file) == head
    with open(f"{run_dir}/generation-0001/manifest.json", "rb") as file:
        assert Manifest.from_json(file.read()).names() == ["w", "v"]


def test_slots_take_turns(open_ends, run_dir):
    publisher, epoch = open_ends[0](slots=3)
    slots = []
    for number in range(6):
        publish(publisher, Version(epoch, number), number)
        with open(f"{run_dir}/head.json") as file:
            slots.append(json.load(file)["slot"])
    assert slots == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("slots", [2, 3, 5])
def test_leased_slots_are_never_written(open_ends, slots):
    """Every version that somebody reads stays as it is; the sender waits, and says for whom."""
    publisher, epoch = open_ends[0](slots=slots)
    subscriber = open_ends[1]()
    leases = []
    for number in range(slots):
        publish(publisher, Version(epoch, number), number)
        leases.append(subscriber.snapshot(Version(epoch, number), Deadline(WAIT)))
    with pytest.raises(DeadlineError, match=r"no free slot.*slots="):
        publish(publisher, Version(epoch, slots), slots)
    assert [value_of(lease) for lease in leases] == list(range(slots))
    assert subscriber.wait(None, Deadline(0)) == (epoch, slots - 1)
    leases[0].close()
    publish(publisher, Version(epoch, slots), slots)
    assert [value_of(lease) for lease in leases[1:]] == list(range(1, slots))
    with pytest.raises(VersionGoneError):
        subscriber.snapshot(Version(epoch, 0), Deadline(0))
    for lease in leases:
        lease.close()


def test_busy_is_skipped(open_ends):
    publisher, epoch = open_ends[0](on_busy="skip")
    subscriber = open_ends[1]()
    for number in range(2):
        assert not publish(publisher, Version(epoch, number), number).skipped
        subscriber.snapshot(Version(epoch, number), Deadline(WAIT)) if number else None
    held = subscriber.snapshot(Version(epoch, 0), Deadline(WAIT))
    skipped = publish(publisher, Version(epoch, 2), 2)
    assert skipped.skipped
    assert skipped.changed is None
    assert subscriber.wait(None, Deadline(0)) == (epoch, 1)
    assert value_of(held) == 0
    held.close()
    assert not publish(publisher, Version(epoch, 3), 3).skipped


def test_a_slot_is_waited_for(open_ends):
    import threading

    publisher, epoch = open_ends[0]()
    subscriber = open_ends[1]()
    publish(publisher, Version(epoch, 0), 0)
    held = subscriber.snapshot(Version(epoch, 0), Deadline(WAIT))
    publish(publisher, Version(epoch, 1), 1)
    timer = threading.Timer(0.05, held.close)
    timer.start()
    publish(publisher, Version(epoch, 2), 2, timeout=WAIT)
    timer.join()
    with subscriber.snapshot(Version(epoch, 2), Deadline(WAIT)) as snapshot:
        assert value_of(snapshot) == 2


def test_what_changed_is_counted(open_ends):
    publisher, epoch = open_ends[0]()
    assert publish(publisher, Version(epoch, 0), 0).changed is None
    assert publish(publisher, Version(epoch, 1), 0).changed == 0
    assert publish(publisher, Version(epoch, 2), 5).changed == 2
    assert publish(publisher, Version(epoch, 3), 5, size=7).changed is None


class TestGenerations:
    def test_another_manifest(self, open_ends, run_dir):
        publisher, epoch = open_ends[0]()
        subscriber = open_ends[1]()
        publish(publisher, Version(epoch, 0), 0)
        held = subscriber.snapshot(Version(epoch, 0), Deadline(WAIT))
        publish(publisher, Version(epoch, 1), 1, size=10)
        assert value_of(held) == 0  # its generation stays as long as it is read
        assert len(held.tensor("w")) == 100
        with subscriber.snapshot(Version(epoch, 1), Deadline(WAIT)) as new:
            assert len(new.tensor("w")) == 10
            assert value_of(new) == 1
        held.close()
        publish(publisher, Version(epoch, 2), 2, size=10)
        names = [name for name in os.listdir(run_dir) if name.startswith("generation")]
        assert names == ["generation-0002"]

    def test_back_and_forth(self, open_ends):
        publisher, epoch = open_ends[0]()
        subscriber = open_ends[1]()
        for number in range(6):
            publish(publisher, Version(epoch, number), number, size=10 + number % 2)
            with subscriber.snapshot(Version(epoch, number), Deadline(WAIT)) as snapshot:
                assert value_of(snapshot) == number

    def test_renamed_tensors_are_another_generation(self, open_ends):
        """Same bytes, same shapes: never read under the old names."""
        publisher, epoch = open_ends[0]()
        subscriber = open_ends[1]()
        for number, name in enumerate(["a", "b"]):
            weights = as_source({name: torch.ones(3)})
            publisher.publish(Version(epoch, number), weights, Deadline(WAIT))
            with subscriber.snapshot(Version(epoch, number), Deadline(WAIT)) as snapshot:
                assert snapshot.manifest.names() == [name]

    def test_prepared_ahead(self, open_ends, run_dir):
        publisher, epoch = open_ends[0]()
        source = as_source({"w": torch.ones(3)})
        publisher.prepare(source.manifest(), Deadline(WAIT))
        publisher.prepare(source.manifest(), Deadline(WAIT))
        assert "generation-0001" in os.listdir(run_dir)
        assert not os.path.exists(f"{run_dir}/head.json")
        publisher.publish(Version(epoch, 0), source, Deadline(WAIT))
        assert "generation-0002" not in os.listdir(run_dir)


class TestOwnership:
    def test_one_at_a_time(self, open_ends, run_dir):
        publisher, epoch = open_ends[0]()
        other = ws.DoubleBufferScheme(run_dir).create_publisher()
        with pytest.raises(SenderBusyError, match=f"pid {os.getpid()}"):
            other.open(Deadline(0.05))
        publish(publisher, Version(epoch, 0), 0)
        publisher.close()
        assert other.open(Deadline(WAIT)) > epoch
        other.close()

    def test_opened_twice(self, open_ends):
        publisher, epoch = open_ends[0]()
        assert publisher.open(Deadline(0)) == epoch

    def test_not_open(self, run_dir):
        publisher = ws.DoubleBufferScheme(run_dir).create_publisher()
        with pytest.raises(WeightSyncError, match="not open"):
            publisher.receivers()
        publisher.close()
        publisher.close()
        assert not os.path.exists(run_dir)

    def test_another_epoch(self, open_ends):
        publisher, epoch = open_ends[0]()
        for other in (epoch - 1, epoch + 1, 0):
            with pytest.raises(VersionError, match="epoch"):
                publish(publisher, Version(other, 0), 0)

    def test_epochs_grow(self, open_ends, run_dir):
        """Also over a directory that was removed, and within one second."""
        publisher = ws.DoubleBufferScheme(run_dir).create_publisher()
        epochs = []
        for _ in range(4):
            epochs.append(publisher.open(Deadline(WAIT)))
            publisher.close()
        for _ in range(4):
            other = ws.DoubleBufferScheme(run_dir).create_publisher()
            epochs.append(other.open(Deadline(WAIT)))
            other.close()
        assert epochs == sorted(set(epochs))

    def test_a_forked_child_is_no_owner(self, open_ends, run_dir):
        """It can neither publish nor, by ending, take the run from its parent."""
        publisher, epoch = open_ends[0]()
        publish(publisher, Version(epoch, 0), 0)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                publisher.receivers()
            except WeightSyncError as error:
                code = 0 if "another process" in str(error) else 2
            finally:
                publisher.close()
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        publish(publisher, Version(epoch, 1), 1)
        with open_ends[1]().snapshot(Version(epoch, 1), Deadline(WAIT)) as snapshot:
            assert value_of(snapshot) == 1


class TestKeptFiles:
    def test_the_last_version_is_readable_without_a_sender(self, open_ends, run_dir):
        publisher, epoch = open_ends[0](keep_files=True)
        publish(publisher, Version(epoch, 4), 4)
        publisher.close()
        subscriber = ws.DoubleBufferScheme(run_dir).create_subscriber()
        with subscriber.snapshot(Version(epoch, 4), Deadline(WAIT)) as snapshot:
            assert value_of(snapshot) == 4
        subscriber.close()

    def test_the_next_sender_of_the_same_model(self, open_ends, run_dir):
        """Its slots are used again, and the last version stays readable until the next."""
        publisher, epoch = open_ends[0](keep_files=True)
        publish(publisher, Version(epoch, 4), 4)
        inode = os.stat(f"{run_dir}/generation-0001/slot0.bin").st_ino
        publisher.close()
        again, later = open_ends[0]()
        assert later > epoch
        subscriber = open_ends[1]()
        assert subscriber.wait(None, Deadline(0)) == (epoch, 4)
        with subscriber.snapshot(Version(epoch, 4), Deadline(WAIT)) as snapshot:
            publish(again, Version(later, 0), 7, timeout=WAIT)
            assert value_of(snapshot) == 4
        assert os.stat(f"{run_dir}/generation-0001/slot0.bin").st_ino == inode
        with subscriber.snapshot(Version(later, 0), Deadline(WAIT)) as snapshot:
            assert value_of(snapshot) == 7

    @pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
    def test_the_next_sender_with_other_slots(self, open_ends, before, after):
        publisher, epoch = open_ends[0](keep_files=True, slots=before)
        publish(publisher, Version(epoch, 4), 4)
        publisher.close()
        again, later = open_ends[0](slots=after)
        for number in range(4):
            publish(again, Version(later, number), number)
            with open_ends[1]().snapshot(Version(later, number), Deadline(WAIT)) as snapshot:
                assert value_of(snapshot) == number

    def test_the_next_sender_of_another_model(self, open_ends, run_dir):
        publisher, epoch = open_ends[0](keep_files=True)
        publish(publisher, Version(epoch, 4), 4)
        publisher.close()
        again, later = open_ends[0]()
        publish(again, Version(later, 0), 7, size=10)
        assert [n for n in os.listdir(run_dir) if n.startswith("gen")] == ["generation-0002"]

    def test_half_written_leftovers(self, open_ends, run_dir):
        """What a killed sender leaves: temporaries, an unfinished generation."""
        publisher, epoch = open_ends[0](keep_files=True)
        publish(publisher, Version(epoch, 4), 4)
        publisher.close()
        for name in (".head.json.12.34.tmp", "receivers/.r1.json.5.6.tmp"):
            with open(f"{run_dir}/{name}", "w"):
                pass
        os.mkdir(f"{run_dir}/generation-0005")
        with open(f"{run_dir}/generation-0005/slot0.bin", "wb") as file:
            file.write(b"x" * 100)
        open_ends[0]()
        assert sorted(os.listdir(run_dir)) == [
            "generation-0001", "head.json", "receivers", "sender.lock",
        ]  # fmt: skip
        assert os.listdir(f"{run_dir}/receivers") == []


class TestReceivers:
    def report(self, id, version, state="applied", attempted=None):
        return ReceiverReport(id, state, version, attempted or version, pid=os.getpid(), host="h")

    def test_known(self, open_ends):
        publisher, epoch = open_ends[0]()
        assert publisher.receivers() == []
        for id in ("r2", "r1"):
            open_ends[1](id).acknowledge(self.report(id, Version(epoch, 0)))
        assert [r.receiver for r in publisher.receivers()] == ["r1", "r2"]
        assert {r.state for r in publisher.receivers()} == {"applied"}

    def test_waited_for(self, open_ends):
        publisher, epoch = open_ends[0]()
        one, other = open_ends[1]("r1"), open_ends[1]("r2")
        version = Version(epoch, 1)
        publish(publisher, version, 1)
        one.acknowledge(self.report("r1", version))
        other.acknowledge(self.report("r2", Version(epoch, 0)))
        states = {r.receiver: r.state for r in publisher.wait_applied(version, Deadline(0.02))}
        assert states == {"r1": "applied", "r2": "waiting"}
        other.acknowledge(self.report("r2", Version(epoch, 0), "rolled back", version))
        states = {r.receiver: r.state for r in publisher.wait_applied(version, Deadline(WAIT))}
        assert states == {"r1": "applied", "r2": "rolled back"}
        other.acknowledge(self.report("r2", Version(epoch, 2)))  # newer is applied, too
        found = publisher.wait_applied(version, Deadline(WAIT), ["r2"])
        assert [r.receiver for r in found] == ["r2"]

    def test_one_that_never_came(self, open_ends):
        publisher, epoch = open_ends[0]()
        publish(publisher, Version(epoch, 1), 1)
        (late,) = publisher.wait_applied(Version(epoch, 1), Deadline(0.02), ["nobody"])
        assert (late.receiver, late.state) == ("nobody", "waiting")
        assert "never connected" in late.error

    def test_one_that_died(self, open_ends):
        """H1: said once, and the next update does not count on it."""
        publisher, epoch = open_ends[0]()
        dead, alive = open_ends[1]("dead"), open_ends[1]("alive")
        for subscriber, id in ((dead, "dead"), (alive, "alive")):
            subscriber.acknowledge(self.report(id, Version(epoch, 0)))
        dead._member._mine.release()  # as the kernel does when its process ends
        assert {r.receiver: r.state for r in publisher.receivers()}["dead"] == "dead"
        version = Version(epoch, 1)
        publish(publisher, version, 1)
        alive.acknowledge(self.report("alive", version))
        states = {r.receiver: r.state for r in publisher.wait_applied(version, Deadline(WAIT))}
        assert states == {"dead": "dead", "alive": "applied"}
        states = {r.receiver: r.state for r in publisher.wait_applied(version, Deadline(WAIT))}
        assert states == {"alive": "applied"}

    def test_one_that_left(self, open_ends):
        publisher, epoch = open_ends[0]()
        subscriber = open_ends[1]("r1")
        subscriber.acknowledge(self.report("r1", Version(epoch, 0)))
        subscriber.close()
        assert publisher.receivers() == []


def test_a_failed_publish_leaves_everything(open_ends):
    """Promise 4: the version before is read whole, whatever happened to the other slot."""
    publisher, epoch = open_ends[0]()
    subscriber = open_ends[1]()
    publish(publisher, Version(epoch, 0), 0)

    def broken():
        yield "w", torch.full((100,), 9.0)
        raise ZeroDivisionError

    manifest = Manifest.build([("w", torch.float32, (100,)), ("v", torch.int64, ())])
    from weightsync.source import SourceOptions

    for number in range(1, 4):
        source = as_source(broken(), SourceOptions(manifest=manifest))
        with pytest.raises(ZeroDivisionError):
            publisher.publish(Version(epoch, number), source, Deadline(WAIT))
        assert subscriber.wait(None, Deadline(0)) == (epoch, 0)
        with subscriber.snapshot(Version(epoch, 0), Deadline(WAIT)) as snapshot:
            assert value_of(snapshot) == 0
    publish(publisher, Version(epoch, 4), 4)
    with subscriber.snapshot(Version(epoch, 4), Deadline(WAIT)) as snapshot:
        assert value_of(snapshot) == 4
        assert_all_same({"v": copy_of(snapshot.tensor("v"))}, {"v": torch.tensor(4)})
