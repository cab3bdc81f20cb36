"""The trainer's end: order of calls, versions, wrong use that loses nothing."""

import gc
import os
import threading

import pytest
import torch
from torch import nn

import weightsync as ws
from tests.conftest import WAIT, assert_all_same, read, send
from weightsync.engines.module import ModuleEngine
from weightsync.testing.processes import eventually
from weightsync.version import Version


def weights(value):
    return {"a": torch.full((3,), float(value)), "b": torch.full((2, 2), value)}


def holds(ends, value):
    """What is published is ``weights(value)``, whole."""
    assert_all_same(read(ends)[1], weights(value))


def test_the_report(ends):
    report = ends.sender(weights(1)).update_weights(version=7)
    assert report.version.number == 7
    assert report.scheme == "shm"
    assert report.nbytes == 3 * 4 + 4 * 8
    assert report.tensors == 2
    assert report.changed is None
    assert not report.skipped
    assert report.receivers == ()
    seconds = report.seconds
    assert 0 < seconds.transfer <= seconds.total
    assert seconds.extract + seconds.transfer <= seconds.total


class TestOrderOfCalls:
    def test_update_before_connect(self, ends):
        sender = ends.sender(weights(1), connect=False)
        with pytest.raises(ws.WeightSyncError, match=r"connect\(\)"):
            sender.update_weights(version=1)
        assert not os.path.exists(ends.path)
        sender.connect()
        sender.update_weights(version=1)
        holds(ends, 1)

    def test_update_without_weights(self, ends):
        sender = ends.sender()
        with pytest.raises(ws.SourceError, match="no weights"):
            sender.update_weights(version=1)
        sender.update_weights(weights(2), version=1)
        holds(ends, 2)

    def test_register_later_and_again(self, ends):
        sender = ends.sender()
        sender.register_model(weights(1))
        sender.update_weights(version=1)
        sender.register_model(weights(2))
        sender.update_weights(version=2)
        holds(ends, 2)

    def test_other_weights_for_one_update(self, ends):
        sender = ends.sender(weights(1))
        sender.update_weights(weights(5), version=1)
        holds(ends, 5)
        sender.update_weights(version=2)
        holds(ends, 1)

    def test_connect_twice(self, ends):
        sender = ends.sender(weights(1))
        first = sender.update_weights(version=1).version
        sender.connect()
        assert sender.update_weights(version=2).version == (first.epoch, 2)

    def test_update_after_shutdown(self, ends):
        sender = ends.sender(weights(1))
        sender.update_weights(version=1)
        sender.shutdown()
        sender.shutdown()
        assert not os.path.exists(ends.path)
        with pytest.raises(ws.WeightSyncError, match=r"connect\(\)"):
            sender.update_weights(version=2)

    def test_connect_after_shutdown(self, ends):
        sender = ends.sender(weights(1))
        first = sender.update_weights(version=5).version
        sender.shutdown()
        sender.connect()
        again = sender.update_weights(version=1).version
        assert again > first
        holds(ends, 1)

    def test_context_manager(self, ends):
        with pytest.raises(ZeroDivisionError), ends.sender(weights(1)):
            raise ZeroDivisionError
        assert not os.path.exists(ends.path)

    def test_a_sender_that_is_let_go_leaves_nothing(self, run_dir):
        sender = ws.DoubleBufferScheme(run_dir).create_sender(weights(1))
        sender.connect()
        sender.update_weights(version=1)
        del sender
        gc.collect()
        assert not os.path.exists(run_dir)

    def test_a_second_sender(self, ends):
        ends.sender(weights(1)).update_weights(version=1)
        with pytest.raises(ws.SenderBusyError, match=f"pid {os.getpid()}"):
            ends.scheme().create_sender(weights(2)).connect(timeout=0.1)
        holds(ends, 1)

    def test_the_parent_directory_is_missing(self, run_dir):
        scheme = ws.DoubleBufferScheme(f"{run_dir}/deep/run")
        with pytest.raises(ws.WeightSyncError, match=f"no directory {run_dir}/deep"):
            scheme.create_sender(weights(1)).connect()
        assert not os.path.exists(run_dir)

    def test_too_little_room(self, ends):
        """Promise 6: an error with a number, before the first byte; the last version stays."""
        sender = ends.sender(weights(1))
        sender.update_weights(version=1)
        huge = torch.ones(1).expand(1 << 44)
        with pytest.raises(ws.NoRoomError, match="more bytes"):
            sender.update_weights({"huge": huge}, version=2)
        holds(ends, 1)
        sender.update_weights(version=2)

    def test_too_little_room_at_connect(self, ends):
        sender = ends.sender({"huge": torch.ones(1).expand(1 << 44)}, connect=False)
        with pytest.raises(ws.NoRoomError):
            sender.connect()
        sender.register_model(weights(1))
        sender.connect()
        sender.update_weights(version=1)
        holds(ends, 1)

    def test_connect_that_failed_can_be_tried_again(self, ends):
        """A failure after the run was taken must not count as connected."""
        os.mkdir(ends.path, 0o700)
        planted = os.path.join(ends.path, "receivers")
        with open(planted, "w"):
            pass
        sender = ends.sender(weights(1), connect=False)
        with pytest.raises(ws.WeightSyncError, match="receivers"):
            sender.connect()
        with pytest.raises(ws.WeightSyncError):
            sender.update_weights(version=1)
        os.unlink(planted)
        sender.connect()
        report = sender.update_weights(version=1)
        target = {name: torch.zeros_like(tensor) for name, tensor in weights(0).items()}
        receiver = ends.receiver(target, connect=False)
        receiver.connect(timeout=0.5)
        assert receiver.poll_and_apply().version == report.version

    def test_the_directory_was_removed(self, ends):
        import shutil

        sender = ends.sender(weights(1))
        sender.update_weights(version=1)
        shutil.rmtree(ends.path)
        with pytest.raises(ws.WeightSyncError, match="removed"):
            sender.update_weights(version=2)
        sender.connect()
        sender.update_weights(version=2)
        holds(ends, 1)


class TestVersions:
    def test_counted_on(self, ends):
        sender = ends.sender(weights(1))
        assert sender.version is None
        numbers = [sender.update_weights().version.number for _ in range(3)]
        assert numbers == [0, 1, 2]
        sender.update_weights(version=10)
        assert sender.update_weights().version.number == 11
        assert sender.version.number == 11

    def test_decreasing(self, ends):
        sender = ends.sender(weights(1))
        sender.update_weights(version=5)
        with pytest.raises(ws.VersionError, match=r"4.*5"):
            sender.update_weights(weights(2), version=4)
        assert sender.version.number == 5
        holds(ends, 1)

    def test_the_same_number_with_the_same_weights(self, ends):
        sender = ends.sender(weights(1))
        first = sender.update_weights(version=5)
        again = sender.update_weights(version=5)
        assert again.version == first.version
        assert again.changed == 0
        holds(ends, 1)
        sender.update_weights(weights(2), version=6)
        holds(ends, 2)

    @pytest.mark.parametrize(
        "other",
        [
            {"a": torch.full((3,), 2.0), "b": torch.full((2, 2), 1)},
            {"b": torch.full((2, 2), 1), "a": torch.full((3,), 1.0)},
            {"a": torch.full((3,), 1.0)},
            {"a": torch.full((3,), 1.0), "b": torch.full((4,), 1)},
        ],
    )
    def test_the_same_number_with_other_weights(self, ends, other):
        sender = ends.sender(weights(1))
        sender.update_weights(version=5)
        with pytest.raises(ws.VersionError, match=r"5.*other weights"):
            sender.update_weights(other, version=5)
        holds(ends, 1)
        sender.update_weights(other, version=6)
        assert_all_same(read(ends)[1], other)

    @pytest.mark.parametrize("version", [-1, 1.0, "1", True, (1, 2), float("nan")])
    def test_what_is_no_number(self, ends, version):
        sender = ends.sender(weights(1))
        sender.update_weights(version=0)
        with pytest.raises((ValueError, ws.VersionError), match="version"):
            sender.update_weights(version=version)
        holds(ends, 1)
        assert sender.version.number == 0

    def test_big_numbers(self, ends):
        """A run that numbers by tokens or nanoseconds."""
        sender = ends.sender(weights(1))
        sender.update_weights(version=(1 << 62) + 1)
        assert read(ends)[0] is not None
        assert sender.update_weights().version.number == (1 << 62) + 2

    def test_a_first_version_of_any_number(self, ends):
        """C8: what comes first is sent, whatever the step."""
        sender = ends.sender(weights(1))
        assert sender.update_weights(version=40).version.number == 40
        holds(ends, 1)


class TestWrongUse:
    def test_wait(self, ends):
        sender = ends.sender(weights(1))
        with pytest.raises(ValueError, match="wait='both'"):
            sender.update_weights(wait="both")

    @pytest.mark.parametrize("timeout", [-1, float("nan")])
    def test_timeouts(self, ends, timeout):
        sender = ends.sender(weights(1))
        with pytest.raises(ValueError, match="timeout"):
            sender.update_weights(timeout=timeout)
        with pytest.raises(ValueError, match="timeout"):
            sender.connect(timeout=timeout)

    @pytest.mark.parametrize("timeout", [float("inf"), 10**12, 0])
    def test_unusual_timeouts(self, ends, timeout):
        sender = ends.sender(weights(1))
        sender.update_weights(version=1, timeout=timeout)
        holds(ends, 1)

    @pytest.mark.parametrize("thing", [5, "model.pt", torch.ones(3), nn.Linear, object()])
    def test_not_a_source(self, ends, thing):
        sender = ends.sender(weights(1))
        sender.update_weights(version=1)
        with pytest.raises(ws.SourceError):
            sender.update_weights(thing, version=2)
        with pytest.raises(ws.SourceError):
            sender.register_model(thing)
        with pytest.raises(ws.SourceError):
            ends.scheme().create_sender(thing)
        holds(ends, 1)

    @pytest.mark.parametrize("ids", [["../x"], ["a/b"], [""], ["x" * 101], [".hidden"]])
    def test_receiver_ids(self, ends, ids):
        """Ids are file names: X4."""
        sender = ends.sender(weights(1))
        sender.update_weights(version=1)
        with pytest.raises(ws.WeightSyncError, match="id"):
            sender.update_weights(weights(2), version=2, receivers=ids)
        holds(ends, 1)

    def test_one_id_is_no_sequence_of_letters(self, ends):
        sender = ends.sender(weights(1))
        with pytest.raises((TypeError, ValueError, ws.WeightSyncError), match="receivers"):
            sender.update_weights(version=1, receivers="r1")
        with pytest.raises((TypeError, ValueError, ws.WeightSyncError), match="receivers"):
            sender.connect(receivers="r1", timeout=0.2)

    @pytest.mark.parametrize("option", ["strict", "merge", "gather"])
    @pytest.mark.parametrize("value", ["no", 1, 0])
    def test_what_is_true_or_false_is_nothing_else(self, ends, option, value):
        with pytest.raises(ws.SourceError, match=f"{option}=.*: True"):
            ends.sender(weights(1), connect=False, **{option: value})

    def test_unknown_options(self, ends):
        with pytest.raises(TypeError, match="colour"):
            ends.scheme().create_sender(weights(1), colour="red")

    def test_a_receiver_of_another_run(self, ends):
        sender = ends.sender(weights(1))
        other = ws.DoubleBufferScheme(ends.path + "-other").create_receiver({})
        with pytest.raises(ws.WeightSyncError, match="-other"):
            sender.attach(other)

    def test_an_error_of_the_source_comes_through(self, ends):
        def broken():
            yield "a", torch.ones(2)
            raise ZeroDivisionError

        sender = ends.sender(weights(1))
        sender.update_weights(version=1)
        with pytest.raises(ZeroDivisionError):
            sender.update_weights(broken, version=2)
        holds(ends, 1)
        sender.update_weights(weights(3), version=2)
        holds(ends, 3)


class TestStreams:
    def test_a_callable(self, ends):
        _, sent = send(ends, lambda: iter(weights(3).items()))
        assert_all_same(sent, weights(3))

    def test_a_one_shot_iterator_with_its_manifest(self, ends):
        manifest = ws.Manifest.build([("a", torch.float32, (3,)), ("b", torch.int64, (2, 2))])
        sender = ends.sender(manifest=manifest)
        sender.update_weights(iter(weights(3).items()), version=1)
        holds(ends, 3)

    @pytest.mark.parametrize(
        ("stream", "words"),
        [
            ([("a", torch.ones(3))], "'b'"),
            ([], "'a', 'b'"),
            ([*weights(1).items(), ("c", torch.ones(1))], "'c'.*not in the manifest"),
            ([*weights(1).items(), ("a", torch.ones(3))], "'a'.*twice"),
            ([("a", torch.ones(4)), ("b", torch.ones(2, 2, dtype=torch.int64))], r"'a'.*\[4\]"),
            ([("a", torch.ones(3)), ("b", torch.empty(2, 2, device="meta"))], "'b'.*meta"),
        ],
    )
    def test_a_stream_that_is_not_what_its_manifest_says(self, ends, stream, words):
        """W7 and its kind: refused by name, and the last version stays."""
        manifest = ws.Manifest.build([("a", torch.float32, (3,)), ("b", torch.int64, (2, 2))])
        sender = ends.sender(weights(1), manifest=manifest)
        sender.update_weights(version=1)
        with pytest.raises(ws.SourceError, match=words):
            sender.update_weights(iter(stream), version=2)
        holds(ends, 1)

    @pytest.mark.parametrize(
        ("dtype", "other"),
        [(torch.int32, torch.float32), (torch.float32, torch.int32), (torch.int64, torch.int8)],
    )
    def test_a_stream_of_other_dtypes_than_its_manifest_says(self, ends, dtype, other):
        """Only what loses its meaning is meant: floating point may be cast, nothing else."""
        sender = ends.sender(manifest=ws.Manifest.build([("a", dtype, (3,))]))
        with pytest.raises(ws.SourceError, match="'a'"):
            sender.update_weights(iter([("a", torch.full((3,), 1.5).to(other))]), version=1)

    def test_a_callable_that_returns_the_same_iterator_twice(self, ends):
        once = iter(weights(1).items())
        sender = ends.sender()
        with pytest.raises(ws.SourceError, match="'a'"):
            sender.update_weights(lambda: once, version=1)

    @pytest.mark.parametrize("dtype", [None, torch.bfloat16])
    def test_a_stream_that_does_not_come_to_an_end(self, ends, dtype):
        """Promise 5: bounded by the deadline, and it says how far it had come."""
        import time

        def slow():
            for number in range(100):
                time.sleep(0.02)
                yield f"t{number}", torch.ones(10)

        entries = [(f"t{n}", dtype or torch.float32, (10,)) for n in range(100)]
        sender = ends.sender(scheme=ends.scheme(), manifest=ws.Manifest.build(entries))
        with pytest.raises(ws.DeadlineError, match=r"'t\d+'"):
            sender.update_weights(slow(), version=1, timeout=0.1)


class TestAttached:
    def test_one_process(self, ends):
        target = {name: torch.zeros_like(tensor) for name, tensor in weights(0).items()}
        sender = ends.sender(weights(1))
        receiver = ends.receiver(target, connect=False, id="colocated")
        sender.attach(receiver)
        assert receiver.connected
        report = sender.update_weights(version=1)
        assert [r.receiver for r in report.receivers] == ["colocated"]
        assert report.receivers[0].version == report.version
        assert report.seconds.apply > 0
        assert_all_same(target, weights(1))
        sender.update_weights(weights(2), version=2, wait="applied")
        assert_all_same(target, weights(2))
        sender.detach(receiver)
        sender.update_weights(weights(3), version=3)
        assert_all_same(target, weights(2))
        assert receiver.poll_and_apply().version.number == 3

    def test_attached_before_connect(self, ends):
        target = {name: torch.zeros_like(tensor) for name, tensor in weights(0).items()}
        sender = ends.sender(weights(1), connect=False)
        sender.attach(ends.receiver(target, connect=False))
        sender.connect()
        sender.update_weights(version=1)
        assert_all_same(target, weights(1))

    def test_a_failure_is_raised_with_its_words(self, ends):
        """C1: the others went on, and the error carries the report."""
        good = {name: torch.zeros_like(tensor) for name, tensor in weights(0).items()}
        sender = ends.sender(weights(1))
        sender.attach(ends.receiver({"a": torch.zeros(5)}, connect=False, id="bad"))
        sender.attach(ends.receiver(good, connect=False, id="good"))
        with pytest.raises(ws.ReceiverError, match=r"'bad'.*float32\[5\]") as caught:
            sender.update_weights(version=1)
        assert [r.receiver for r in caught.value.failures] == ["bad"]
        assert caught.value.report.version.number == 1
        assert {r.receiver for r in caught.value.report.receivers} == {"bad", "good"}
        assert_all_same(good, weights(1))

    def test_detach_of_a_stranger(self, ends):
        sender = ends.sender(weights(1))
        with pytest.raises((ValueError, ws.WeightSyncError)):
            sender.detach(ends.receiver({}, connect=False))


class TestWaiting:
    def test_for_receivers_that_do_not_come(self, ends):
        sender = ends.sender(weights(1), connect=False)
        with pytest.raises(ws.DeadlineError, match=r"receivers \(2\); connected: none"):
            sender.connect(timeout=0.05, receivers=2)
        with pytest.raises(ws.DeadlineError, match=r"r1, r2"):
            sender.connect(timeout=0.05, receivers=["r1", "r2"])
        sender.update_weights(version=1)

    def test_for_receivers_that_come(self, ends):
        import threading

        sender = ends.sender(weights(1))
        receiver = ends.receiver(weights(0), connect=False, id="r1")
        thread = threading.Thread(target=receiver.connect)
        thread.start()
        sender.connect(timeout=WAIT, receivers=["r1"])
        thread.join()
        assert [r.receiver for r in sender.receivers()] == ["r1"]

    def test_applied_by_nobody(self, ends):
        sender = ends.sender(weights(1))
        with pytest.raises(ws.DeadlineError, match=r"published.*no receiver"):
            sender.update_weights(version=1, wait="applied", timeout=0.05)
        holds(ends, 1)
        assert sender.version.number == 1

    def test_applied_too_late(self, ends):
        sender, receiver = ends.pair(weights(1), weights(0), receiver={"id": "slow"})
        with pytest.raises(ws.ReceiverError, match=r"'slow'.*waiting"):
            sender.update_weights(version=1, wait="applied", timeout=0.05)
        assert receiver.poll_and_apply().version.number == 1
        report = sender.update_weights(version=1, wait="applied", timeout=0.05)
        assert report.receivers[0].state == "applied"

    def test_seconds_of_a_late_one_are_not_those_of_its_last_version(self, ends):
        sender, receiver = ends.pair(weights(1), weights(0))
        sender.update_weights(version=1)
        receiver.poll_and_apply()
        assert sender.update_weights(version=1, wait="applied").seconds.apply > 0
        with pytest.raises(ws.ReceiverError) as caught:
            sender.update_weights(version=2, wait="applied", timeout=0.05)
        assert caught.value.report.receivers[0].seconds.apply > 0  # of version 1
        assert caught.value.report.seconds.apply == caught.value.report.seconds.pause == 0


@pytest.mark.parametrize("slots", [2, 3])
def test_a_version_for_nobody_makes_room_for_the_next(run_dir, slots):
    """H5: an id that nobody has, or whose receiver has left, costs no slot for good."""
    weights = {"w": torch.zeros(4)}
    held, other = {"w": torch.ones(4)}, {"w": torch.ones(4)}
    scheme = ws.DoubleBufferScheme(run_dir, slots=slots)
    with scheme.create_sender(weights, timeout=5) as sender:
        sender.connect()
        with scheme.create_receiver(held, id="one") as receiver:
            receiver.connect()
            with scheme.create_receiver(other, id="gone") as leaving:
                leaving.connect()
            sender.update_weights(version=1)
            receiver.poll_and_apply()
            for number, meant in (
                (2, ["typo"]),
                (3, ["gone"]),
                (4, ["typo"]),
                (5, ["typo", "gone"]),
            ):
                weights["w"].fill_(number)
                sender.update_weights(version=number, receivers=meant)
                assert receiver.poll_and_apply() is None
                assert held["w"].eq(0).all()
            weights["w"].fill_(6)
            sender.update_weights(version=6, receivers=["one"])
            assert receiver.poll_and_apply().version.number == 6
            assert held["w"].eq(6).all()


class Refusing(ModuleEngine):
    """Fails at some versions, and is as good as new at the next."""

    def __init__(self, target, *numbers):
        super().__init__(target)
        self.numbers = numbers

    def apply(self, update, deadline):
        super().apply(update, deadline)
        if update.version.number in self.numbers:
            raise RuntimeError("no such kernel")


class TestBoundedLag:
    def ends(self, ends, engine=None):
        return ends.pair(weights(1), engine or weights(0), scheme=ends.scheme(slots=4))

    def test_a_receiver_may_be_so_far_behind_and_no_further(self, ends):
        sender, receiver = self.ends(ends)
        sender.update_weights(version=10)
        receiver.poll_and_apply()
        for number in (20, 30):  # versions count, not the steps between them
            report = sender.update_weights(version=number, max_lag=2)
            assert report.receivers == () or report.receivers[0].version.number == 10
        with pytest.raises(ws.ReceiverError, match=rf"max_lag=2.*{receiver.id}.*:10: late") as late:
            sender.update_weights(version=40, max_lag=2, timeout=0.2)
        assert late.value.report.version.number == 40  # it is published all the same
        assert receiver.poll_and_apply().version.number == 40
        assert sender.update_weights(version=50, max_lag=2).receivers[0].version.number == 40

    def test_the_sender_waits_for_the_slowest(self, ends):
        sender, slow = self.ends(ends)
        fast = ends.receiver(weights(0), scheme=ends.scheme(slots=4))
        fast.follow()
        sender.update_weights(version=1)
        applying = threading.Timer(0.3, slow.poll_and_apply)
        applying.start()
        report = sender.update_weights(version=2, max_lag=1)
        assert {r.receiver for r in report.receivers} == {slow.id, fast.id}
        assert all(r.version.number >= 1 for r in report.receivers)
        applying.join()

    def test_no_lag_at_all_is_to_wait_until_it_is_applied(self, ends):
        sender, receiver = self.ends(ends)
        receiver.follow()
        report = sender.update_weights(version=1, max_lag=0)
        assert [r.version for r in report.receivers] == [report.version]

    def test_a_failure_is_heard_of_although_the_receiver_is_not_too_far_behind(self, ends):
        """C1: in its own words."""
        sender, receiver = self.ends(ends, Refusing(weights(0), 2, 3))
        errors = []
        sender.update_weights(version=1)
        receiver.poll_and_apply()
        receiver.follow(on_error=errors.append)
        sender.update_weights(version=2)
        eventually(lambda: errors or None, WAIT)
        with pytest.raises(ws.ReceiverError, match="no such kernel") as failed:
            sender.update_weights(version=3, max_lag=2)
        assert failed.value.failures[0].version.number == 1
        assert sender.update_weights(version=4, max_lag=1).receivers[0].version.number == 4

    def test_a_failure_that_the_newest_version_mends_is_none(self, ends):
        sender, receiver = self.ends(ends, Refusing(weights(0), 2))
        errors = []
        receiver.follow(on_error=errors.append)
        sender.update_weights(version=1, max_lag=0)
        sender.update_weights(version=2)
        eventually(lambda: errors or None, WAIT)
        report = sender.update_weights(version=3, max_lag=1)
        assert [r.version for r in report.receivers] == [report.version]

    def test_the_age_of_a_sample(self, ends):
        sender, receiver = self.ends(ends)
        sender.update_weights(version=10)
        receiver.poll_and_apply()
        with receiver.hold() as version:
            assert sender.lag(version) == 0
        for number in (20, 20, 30):
            sender.update_weights(version=number)
        assert sender.lag(version) == 2
        assert sender.lag(Version(0, 99)) == 3  # of another life

    @pytest.mark.parametrize("wrong", [-1, 1.0, True, 1 << 20])
    def test_a_lag_is_a_number_of_versions(self, ends, wrong):
        with pytest.raises(ValueError, match="max_lag"):
            ends.sender(weights(1)).update_weights(version=1, max_lag=wrong)

    def test_a_sample_is_tagged_by_version_number_or_label(self, ends):
        with ends.sender({"w": torch.zeros(2)}) as sender:
            first = sender.update_weights(version=1).version
            for number in (2, 3):
                sender.update_weights(version=number)
            assert [sender.lag(tag) for tag in (first, 1, str(first))] == [2, 2, 2]
            assert sender.lag(3) == 0
            assert sender.lag(None) > 10**9  # of an engine that held nothing yet
            for senseless in (1.0, True, b"1:1", [1, 1]):
                with pytest.raises(TypeError, match="its number, or the text"):
                    sender.lag(senseless)
            with pytest.raises(ValueError, match="not a version: 'step 3'"):
                sender.lag("step 3")

    def test_before_anything_is_published_a_sample_of_nothing_is_too_old(self, ends):
        with ends.sender({"w": torch.zeros(2)}) as sender:
            assert sender.lag(None) > 10**9

    def test_applied_leaves_no_lag(self, ends):
        with pytest.raises(ValueError, match="max_lag=1"):
            ends.sender(weights(1)).update_weights(version=1, wait="applied", max_lag=1)
