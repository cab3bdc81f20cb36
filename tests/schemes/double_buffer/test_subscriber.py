"""The inference end's raw end: waiting, leases, verification."""

import os

import pytest
import torch

import weightsync as ws
from tests.conftest import WAIT, Ends, as_bytes, assert_all_same, assert_same, copy_of, newest_slot
from weightsync.deadline import Deadline
from weightsync.errors import (
    CorruptError,
    DeadlineError,
    ProtocolError,
    VersionGoneError,
    WeightSyncError,
)
from weightsync.report import ReceiverReport
from weightsync.testing.faults import corrupt
from weightsync.transport import Targets

WEIGHTS = {"a": torch.arange(10.0), "b": torch.tensor(5), "c": torch.rand(700_000)}


@pytest.fixture
def sender(ends):
    return ends.sender({**WEIGHTS, "tied": WEIGHTS["a"]})


@pytest.fixture
def subscriber(ends, sender):
    subscriber = ends.scheme().create_subscriber()
    subscriber.open(Deadline(WAIT))
    yield subscriber
    subscriber.close()


@pytest.fixture
def snapshot(sender, subscriber):
    version = sender.update_weights(version=1).version
    with subscriber.snapshot(version, Deadline(WAIT)) as snapshot:
        yield snapshot


class TestWaiting:
    def test_newer_than(self, sender, subscriber):
        assert subscriber.wait(None, Deadline(0)) is None
        first = sender.update_weights(version=1).version
        assert subscriber.wait(None, Deadline(0)) == first
        assert subscriber.wait(first, Deadline(0)) is None
        second = sender.update_weights(version=2).version
        assert subscriber.wait(first, Deadline(0)) == second
        assert subscriber.wait(ws.Version(first.epoch, 9), Deadline(0)) is None

    def test_an_epoch_from_the_future(self, sender, subscriber):
        """A sender whose clock was set back is not waited for in silence."""
        epoch = sender.update_weights(version=1).version.epoch
        with pytest.raises(ProtocolError, match="clock"):
            subscriber.wait(ws.Version(epoch + 1, 0), Deadline(0))

    def test_the_newest_of_many(self, sender, subscriber):
        for number in range(5):
            last = sender.update_weights(version=number).version
        assert subscriber.wait(None, Deadline(0)) == last

    def test_meant_for_others(self, ends, sender):
        mine = ends.scheme().create_subscriber("r1")
        mine.open(Deadline(WAIT))
        version = sender.update_weights(version=1, receivers=["r2"]).version
        assert mine.wait(None, Deadline(0)) is None
        sender.update_weights(version=1, receivers=["r1"])
        assert mine.wait(None, Deadline(0)) == version
        mine.close()

    def test_no_sender(self, run_dir):
        subscriber = ws.DoubleBufferScheme(run_dir).create_subscriber("r1")
        with pytest.raises(DeadlineError, match="no live sender"):
            subscriber.open(Deadline(0.02))
        subscriber.close()
        subscriber.close()
        assert not os.path.exists(run_dir)

    def test_a_dead_senders_directory(self, run_dir):
        """It is there, and complete, but nobody owns it: that is no sender."""
        ends = Ends(run_dir)
        ends.sender(WEIGHTS, scheme=ends.scheme(keep_files=True)).update_weights(version=1)
        ends.shutdown()
        assert os.path.exists(f"{run_dir}/head.json")
        subscriber = ends.scheme().create_subscriber("r1")
        with pytest.raises(DeadlineError):
            subscriber.open(Deadline(0.02))
        assert os.listdir(f"{run_dir}/receivers") == []

    def test_the_sender_ends_and_another_one_comes(self, ends, sender, subscriber):
        first = sender.update_weights(version=9).version
        assert subscriber.wait(None, Deadline(0)) == first
        sender.shutdown()
        assert subscriber.wait(first, Deadline(0.02)) is None
        second = ends.sender(WEIGHTS).update_weights(version=0).version
        assert subscriber.wait(first, Deadline(WAIT)) == second


class TestAnotherMountPoint:
    def test_reader_path(self, ends, run_dir, tmp_path):
        """Several hosts: the directory has another name where the receivers are."""
        (tmp_path / "mount").symlink_to("/dev/shm")
        there = str(tmp_path / "mount" / os.path.basename(run_dir))
        scheme = ends.scheme(reader_path=there)
        target = {name: torch.zeros_like(tensor) for name, tensor in WEIGHTS.items()}
        sender, receiver = ends.pair(WEIGHTS, target, scheme=scheme)
        sender.update_weights(version=1)
        receiver.poll_and_apply()
        assert_all_same(target, WEIGHTS)
        assert [r.receiver for r in sender.receivers()] == [receiver.id]


class TestSnapshots:
    def test_tensors(self, snapshot):
        assert [name for name, _ in snapshot] == list(WEIGHTS)
        assert_all_same({name: copy_of(tensor) for name, tensor in snapshot}, WEIGHTS)
        assert_same(snapshot.tensor("tied"), WEIGHTS["a"])
        assert snapshot.manifest.aliases == {"tied": "a"}
        with pytest.raises(KeyError):
            snapshot.tensor("nobody")

    def test_closed(self, snapshot):
        snapshot.close()
        snapshot.close()
        for use in (
            lambda: snapshot.tensor("a"),
            lambda: snapshot.copy_into(Targets(snapshot.manifest, {"a": torch.zeros(10)})),
            snapshot.verify,
            lambda: list(snapshot),
        ):
            with pytest.raises(WeightSyncError, match="closed"):
                use()

    def test_copy_into(self, snapshot):
        target = {name: torch.zeros_like(tensor) for name, tensor in WEIGHTS.items()}
        target["tied"] = torch.zeros(20)[::2]
        snapshot.copy_into(Targets(snapshot.manifest, target))
        assert_all_same(target, {**WEIGHTS, "tied": WEIGHTS["a"]})

    def test_copy_some_into(self, snapshot):
        target = {"c": torch.zeros(700_000, dtype=torch.float64)}
        snapshot.copy_into(Targets(snapshot.manifest, target))
        assert_same(target["c"], WEIGHTS["c"].double())
        snapshot.copy_into(Targets(snapshot.manifest, {}))

    def test_any_number_of_leases(self, sender, subscriber):
        version = sender.update_weights(version=1).version
        leases = [subscriber.snapshot(version, Deadline(WAIT)) for _ in range(10)]
        sender.update_weights({n: t + 1 for n, t in WEIGHTS.items()}, version=2)
        for lease in leases:
            assert_same(lease.tensor("a"), WEIGHTS["a"])
            lease.close()

    def test_unknown_versions(self, sender, subscriber):
        version = sender.update_weights(version=1).version
        for other in (ws.Version(version.epoch, 2), ws.Version(0, 1), ws.Version(1 << 70, 0)):
            with pytest.raises(VersionGoneError, match=str(other)):
                subscriber.snapshot(other, Deadline(WAIT))

    def test_a_subscriber_that_is_not_open_finds_a_version(self, ends, sender):
        """vLLM's workers: the version asked for matters."""
        version = sender.update_weights(version=1).version
        subscriber = ends.scheme().create_subscriber()
        with subscriber.snapshot(version, Deadline(WAIT)) as snapshot:
            assert_same(snapshot.tensor("a"), WEIGHTS["a"])
        subscriber.close()

    def test_an_older_version_while_it_is_there(self, sender, subscriber):
        first = sender.update_weights(version=1).version
        other = {name: tensor + 1 for name, tensor in WEIGHTS.items()}
        sender.update_weights({**other, "tied": other["a"]}, version=2)
        with subscriber.snapshot(first, Deadline(WAIT)) as snapshot:
            assert_same(snapshot.tensor("a"), WEIGHTS["a"])


class TestVerification:
    def test_clean(self, snapshot):
        snapshot.verify()
        snapshot.verify(["a", "tied", "c"])

    @pytest.mark.parametrize(("at", "name"), [(0, "a"), (39, "a"), (64, "b"), (2_000_000, "c")])
    def test_one_bit(self, ends, snapshot, at, name):
        corrupt(newest_slot(ends.scheme()), at)
        with pytest.raises(CorruptError, match=f"'{name}'"):
            snapshot.verify()
        with pytest.raises(CorruptError):
            snapshot.verify([name])
        target = {name: torch.full_like(WEIGHTS[name], 7)}
        with pytest.raises(CorruptError, match=f"'{name}'"):
            snapshot.copy_into(Targets(snapshot.manifest, target))
        if name != "c":
            assert target[name].eq(7).all()

    def test_padding_counts(self, ends, snapshot):
        """Between tensors nobody looks, but a stray write there is a stray write."""
        corrupt(newest_slot(ends.scheme()), 50)
        with pytest.raises(CorruptError):
            snapshot.verify()

    def test_other_tensors_are_not_blamed(self, ends, snapshot):
        corrupt(newest_slot(ends.scheme()), 2_500_000)
        snapshot.verify(["a", "b"])

    def test_switched_off(self, ends, sender):
        version = sender.update_weights(version=1).version
        corrupt(newest_slot(ends.scheme()), 0)
        subscriber = ends.scheme(verify=False).create_subscriber()
        with subscriber.snapshot(version, Deadline(WAIT)) as snapshot:
            snapshot.verify()
            target = torch.zeros(10)
            snapshot.copy_into(Targets(snapshot.manifest, {"a": target}))
            assert (as_bytes(target) != as_bytes(WEIGHTS["a"])).sum() == 1
        subscriber.close()


class TestAcknowledging:
    def test_needs_an_id(self, subscriber):
        with pytest.raises(WeightSyncError, match="no id"):
            subscriber.acknowledge(ReceiverReport("r1", "connected"))

    def test_needs_to_be_open(self, ends):
        subscriber = ends.scheme().create_subscriber("r1")
        with pytest.raises(WeightSyncError, match="not open"):
            subscriber.acknowledge(ReceiverReport("r1", "connected"))
        subscriber.close()

    def test_said_again_to_the_next_sender(self, ends, sender):
        subscriber = ends.scheme().create_subscriber("r1")
        subscriber.open(Deadline(WAIT))
        subscriber.acknowledge(ReceiverReport("r1", "unusable", error="words"))
        sender.shutdown()
        subscriber.wait(None, Deadline(0.01))
        again = ends.sender(WEIGHTS)
        subscriber.wait(None, Deadline(0.01))
        assert [(r.receiver, r.state, r.error) for r in again.receivers()] == [
            ("r1", "unusable", "words")
        ]
        subscriber.close()

    def test_a_failure_stays_on_record(self, ends, sender):
        """H3: the sender is to read why nobody is there."""
        subscriber = ends.scheme().create_subscriber("r1")
        subscriber.open(Deadline(WAIT))
        subscriber.acknowledge(ReceiverReport("r1", "failed", error="no nccl"))
        subscriber.close()
        assert [r.error for r in sender.receivers()] == ["no nccl"]
        subscriber.open(Deadline(WAIT))
        subscriber.acknowledge(ReceiverReport("r1", "connected"))
        assert [r.state for r in sender.receivers()] == ["connected"]
        subscriber.close()
        assert sender.receivers() == []
