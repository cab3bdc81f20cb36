"""Trainer and engine in processes of their own, with shared files in the place of a GPU's memory:
who reads when, who waits for whom, and what the late, the dead and the newcomers see."""

import os
import shutil
import time

import pytest
import torch

import weightsync as ws
from tests.conftest import assert_all_same
from tests.schemes.cuda_ipc import host
from tests.schemes.cuda_ipc.host import HostExchange, HostIPCScheme
from weightsync.deadline import Deadline
from weightsync.testing.processes import PeerError, eventually
from weightsync.testing.weights import constants


@pytest.fixture
def scheme(run_dir):
    yield HostIPCScheme(run_dir)
    HostExchange.made.clear()
    HostExchange.opened.clear()
    shutil.rmtree(run_dir + ".memory", ignore_errors=True)


@pytest.fixture
def trainer_and_engine(scheme, peers):
    trainer, engine = peers(2)
    trainer.call(host.send, scheme)
    engine.call(host.receive, scheme, "engine")
    return trainer, engine


def test_versions_arrive_and_the_trainer_goes_on_only_when_they_have(trainer_and_engine):
    trainer, engine = trainer_and_engine
    for number in range(1, 30):
        told, notes = trainer.call(host.update, number)  # and overwrites at once
        assert told == {"engine": "applied"}
        assert notes == (), "it was copied"
        assert engine.call(host.seen) == (number, number, [])


def test_r1_the_trainer_waits_for_a_slow_engine(scheme, peers):
    trainer, engine = peers(2)
    trainer.call(host.send, scheme)
    engine.call(host.receive, scheme, "engine", pause=0.3)
    began = time.monotonic()
    trainer.call(host.update, 1)
    assert time.monotonic() - began >= 0.3
    assert engine.call(host.seen) == (1, 1, [])


def test_what_cannot_be_shown_is_copied_and_said_in_the_report(scheme, peers):
    trainer, engine = peers(2)
    trainer.call(host.send, scheme, in_place=False)
    engine.call(host.receive, scheme, "engine")
    for number in (1, 2, 3):
        told, notes = trainer.call(host.update, number)
        assert told == {"engine": "applied"}
        assert "1,048,576 bytes of 4 tensors were copied" in notes[0]
        assert engine.call(host.seen) == (number, number, [])


def test_tensors_that_moved_are_found(trainer_and_engine):
    trainer, engine = trainer_and_engine
    for number in (1, 2, 3):
        trainer.call(host.update, number)
        assert engine.call(host.seen) == (number, number, [])
        trainer.call(host.move)
        assert engine.call(host.mapped) == 4


def test_late_engines_are_named_and_find_out(scheme, peers):
    """The trainer may change its weights after the deadline: what was read is not believed."""
    trainer, quick, slow = peers(3)
    trainer.call(host.send, scheme)
    quick.call(host.receive, scheme, "quick")
    slow.call(host.receive, scheme, "slow", pause=1.5)
    kind, words, states = trainer.call(host.update, 1, timeout=0.7)
    assert (kind, states) == ("ReceiverError", {"slow": "waiting"})
    assert "taken back" in words
    assert quick.call(host.seen) == (1, 1, [])
    version, _, errors = eventually(lambda: (found := slow.call(host.seen))[2] and found)
    assert version is None
    assert "took version" in errors[0]
    told, _ = trainer.call(host.update, 2)
    assert told == {"quick": "applied", "slow": "applied"}
    assert slow.call(host.seen)[:2] == (2, 2)


def test_a_late_engine_is_named_by_who_waits_for_it_too(scheme, peers):
    """Not taken for a reader that is no receiver; the lease is what tells that it still reads."""
    trainer, slow = peers(2)
    trainer.call(host.send, scheme)
    slow.call(host.receive, scheme, "slow", pause=1.5)
    kind, words, states = trainer.call(host.update, 1, timeout=0.7, wait="applied")
    assert (kind, states) == ("ReceiverError", {"slow": "waiting"})
    assert "'slow'" in words
    eventually(lambda: slow.call(host.seen)[2])  # has found out that it was taken back
    assert trainer.call(host.update, 2, wait="applied")[0] == {"slow": "applied"}
    assert slow.call(host.seen)[:2] == (2, 2)


def test_an_engine_that_fails_is_named_at_once(scheme, peers):
    trainer, good, bad = peers(3)
    trainer.call(host.send, scheme)
    good.call(host.receive, scheme, "good")
    bad.call(host.receive, scheme, "bad", fails=True)
    kind, words, states = trainer.call(host.update, 1)
    assert (kind, states) == ("ReceiverError", {"bad": "unusable"})
    assert "told to fail" in words
    assert good.call(host.seen) == (1, 1, [])


def test_an_engine_that_is_killed_while_it_reads_holds_nobody_up(scheme, peers):
    trainer, good, bad = peers(3)
    trainer.call(host.send, scheme)
    good.call(host.receive, scheme, "good")
    bad.call(host.receive, scheme, "bad", pause=15.0)
    trainer.start(host.update, 1)
    eventually(lambda: bad.call(host.reads))
    bad.kill()
    kind, _, states = trainer.result(10.0)
    assert (kind, states) == ("ReceiverError", {"bad": "dead"})
    told, _ = trainer.call(host.update, 2)
    assert told == {"good": "applied"}


def test_a_trainer_that_is_killed_leaves_the_engine_whole(scheme, peers):
    trainer, engine, after = peers(3)
    trainer.call(host.send, scheme)
    engine.call(host.receive, scheme, "engine")
    trainer.call(host.update, 1)
    trainer.kill()
    assert engine.call(host.seen) == (1, 1, [])
    eventually(lambda: engine.call(host.mapped) == 0)  # its memory is let go
    after.call(host.send, scheme)
    told, _ = after.call(host.update, 1)
    assert told == {"engine": "applied"}
    assert engine.call(host.seen)[:2] == (1, 1)


def test_a_trainer_that_is_killed_while_an_engine_reads(scheme, peers):
    """What it showed was final, and stays as it was."""
    trainer, engine = peers(2)
    trainer.call(host.send, scheme)
    engine.call(host.receive, scheme, "engine", pause=1.0)
    trainer.start(host.update, 1)
    eventually(lambda: engine.call(host.reads))
    trainer.kill()
    engine.call(host.wait_until_read, 1)
    assert engine.call(host.seen) == (1, 1, [])


def test_release_unmaps_after_every_update(run_dir, scheme, peers):
    trainer, keeping, releasing = peers(3)
    trainer.call(host.send, scheme)
    keeping.call(host.receive, scheme, "keeping")
    releasing.call(host.receive, HostIPCScheme(run_dir, release=True), "releasing")
    for number in (1, 2):
        trainer.call(host.update, number)
        assert keeping.call(host.mapped) == 4
        assert releasing.call(host.mapped) == 0
        assert releasing.call(host.seen) == (number, number, [])


def test_a_reader_that_is_no_receiver_is_waited_for_too(scheme, peers):
    trainer, engine, reader = peers(3)
    trainer.call(host.send, scheme)
    engine.call(host.receive, scheme, "engine", pause=0.3)
    reader.start(host.lease, scheme)
    kind, words, _ = trainer.call(host.update, 1, timeout=1.0)
    assert reader.result() == 1
    assert kind == "DeadlineError"
    assert "no receiver" in words
    with pytest.raises(PeerError, match="took version"):
        reader.call(host.settle)


def test_a_newcomer_sees_the_next_version(trainer_and_engine, scheme, peers):
    trainer, _ = trainer_and_engine
    trainer.call(host.update, 1)
    (newcomer,) = peers(1)
    newcomer.call(host.receive, scheme, "newcomer")
    time.sleep(0.2)
    assert newcomer.call(host.seen) == (None, -1, [])
    told, _ = trainer.call(host.update, 2)
    assert told == {"engine": "applied", "newcomer": "applied"}


def test_a_version_for_some_is_not_waited_for_by_the_others(trainer_and_engine, scheme, peers):
    trainer, first = trainer_and_engine
    (second,) = peers(1)
    second.call(host.receive, scheme, "second")
    told, _ = trainer.call(host.update, 1, receivers=["second"])
    assert told == {"second": "applied"}
    assert first.call(host.seen) == (None, -1, [])


# -------------------------------------------------------------------- in one process


@pytest.fixture
def pair(scheme):
    """An attached receiver, and what it writes into."""
    weights, rooms = host.shown(scheme, constants(0))
    target = constants(-1)
    with scheme.create_sender(weights) as sender, scheme.create_receiver(target) as receiver:
        sender.connect()
        receiver.connect()
        sender.attach(receiver)
        yield sender, receiver, weights, target
    rooms.clear()


def test_in_one_process_the_attached_receiver_reads_the_tensors_themselves(pair):
    sender, receiver, weights, target = pair
    for number in (1, 2, 3):
        host.fill(weights, number)
        report = sender.update_weights(version=number, timeout=10.0)
        assert [r.state for r in report.receivers] == ["applied"]
        assert host.value_of(target) == number
    assert not HostExchange.opened
    with pytest.raises(ws.VersionGoneError, match="keeps no copy"):
        receiver.verify_weights()


def test_the_same_number_again_is_refused(pair):
    sender, *_ = pair
    sender.update_weights(version=1)
    with pytest.raises(ws.VersionError, match="newer number"):
        sender.update_weights(version=1)


def test_all_kinds_of_tensors_in_one_update(scheme):
    weights = {
        "bfloat16": torch.randn(33, 17).bfloat16(),
        "float8": torch.randn(64, 3).to(torch.float8_e4m3fn),
        "strided": torch.randn(30, 70).t(),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3.5),
        "complex": torch.randn(5, dtype=torch.complex64).conj(),
        "integers": torch.arange(7),
    }
    there, rooms = host.shown(scheme, {"shown": torch.randn(1000), "bias": torch.randn(9)})
    weights.update(there)
    target = {name: torch.zeros_like(t).contiguous() for name, t in weights.items()}
    with scheme.create_sender(weights) as sender, scheme.create_receiver(target) as receiver:
        sender.connect()
        receiver.connect()
        sender.attach(receiver)
        for number in (1, 2):
            weights["strided"].mul_(number)
            weights["shown"].mul_(number)
            sender.update_weights(version=number, timeout=10.0)
            assert_all_same(target, weights)
    rooms.clear()


def test_a_cast_and_a_stream_are_copied(scheme):
    def stream():
        yield "w", torch.full((4, 4), 1.5)

    target = {"w": torch.zeros(4, 4, dtype=torch.bfloat16)}
    with (
        scheme.create_sender(stream, dtype=torch.bfloat16) as sender,
        scheme.create_receiver(target) as receiver,
    ):
        sender.connect()
        receiver.connect()
        sender.attach(receiver)
        report = sender.update_weights(version=1, timeout=10.0)
        assert "32 bytes of 1 tensors" in report.notes[0]
        assert target["w"].eq(1.5).all()


def test_a_lease_that_is_over_gives_nothing_to_read(pair, scheme):
    sender, receiver, weights, _ = pair
    sender.detach(receiver)
    publisher = sender._publisher
    version = ws.Version(sender._epoch, 1)
    publisher.publish(version, sender._source, Deadline(5.0))
    reader = scheme.create_subscriber()
    snapshot = reader.snapshot(version, Deadline(5.0))
    assert host.value_of(dict(snapshot)) == host.value_of(weights)
    snapshot.settle()
    snapshot.close()
    with pytest.raises(ws.VersionGoneError):
        snapshot.tensor("layer0")
    receiver.apply_weights()
    assert [r.receiver for r in publisher.conclude(version, Deadline(5.0))] == [receiver.id]
    assert publisher.conclude(version, Deadline(5.0)) == []
    with pytest.raises(ws.VersionGoneError):
        reader.snapshot(version, Deadline(5.0))
    reader.close()


def test_another_gpu_is_refused_with_advice(pair, monkeypatch):
    sender, receiver, *_ = pair
    monkeypatch.setattr(HostExchange, "identities", {})
    with pytest.raises(ws.ReceiverError, match="DoubleBufferScheme"):
        sender.update_weights(version=1, timeout=10.0)
    assert receiver.version is None


def test_memory_that_cannot_be_mapped_is_told_with_the_usual_causes(pair, monkeypatch):
    def refuse(self, place, handle):
        raise ws.WeightSyncError("invalid resource handle")

    sender, _, *_ = pair
    monkeypatch.setattr("weightsync.schemes.cuda_ipc.mapped.this_process", lambda: "another")
    monkeypatch.setattr(HostExchange, "open", refuse)
    words = r"invalid resource handle.*--ipc=host.*expandable_segments.*MIG.*DoubleBufferScheme"
    with pytest.raises(ws.ReceiverError, match=words):
        sender.update_weights(version=1, timeout=10.0)


def test_an_interrupted_update_takes_the_version_back(pair, run_dir):
    """Whoever catches a Ctrl-C and trains on has nobody reading."""
    sender, receiver, *_ = pair

    def interrupted(version, timeout):
        assert os.path.exists(f"{run_dir}/head.json")
        raise KeyboardInterrupt

    receiver.apply_weights = interrupted
    with pytest.raises(KeyboardInterrupt):
        sender.update_weights(version=1)
    assert not os.path.exists(f"{run_dir}/head.json")


def test_behind_a_fallback_the_trainer_waits_too(scheme, run_dir):
    other = ws.DoubleBufferScheme(run_dir + "-other")
    scheme = ws.FallbackScheme([scheme, other])
    weights, target = constants(1), constants(0)
    with scheme.create_sender(weights) as sender, scheme.create_receiver(target) as receiver:
        sender.connect()
        receiver.connect()
        sender.attach(receiver)
        report = sender.update_weights(version=1)
        assert report.scheme == "fallback:host-ipc"
        assert host.value_of(target) == 1
        assert not os.path.exists(f"{run_dir}/head.json")


def test_workers_read_for_a_receiver_that_maps_nothing_itself(scheme, peers):
    trainer, first, second = peers(3)
    trainer.call(host.send, scheme)
    subscriber = scheme.create_subscriber("driver")
    subscriber.delegate(2)
    subscriber.open(Deadline(10.0))
    subscriber.acknowledge(ws.ReceiverReport("driver", "connected"))
    url = scheme.for_workers("driver").to_url()
    for rank, peer in enumerate((first, second)):
        peer.call(host.be_worker, url, rank, 2)
    for number in (1, 2):
        trainer.start(host.update, number)
        version = subscriber.wait(None, Deadline(10.0))
        snapshot = subscriber.snapshot(version, Deadline(10.0))
        assert len(snapshot.manifest.tensors) == 4
        for peer in (first, second):
            assert peer.call(host.read_as_worker, version) == number
        assert not trainer.answered(0.1)
        snapshot.settle()
        subscriber.acknowledge(
            ws.ReceiverReport("driver", "applied", version=version, attempted=version)
        )
        assert trainer.result()[0] == {"driver": "applied"}
    assert not HostExchange.opened
    subscriber.close()


def test_a_worker_lets_go_of_a_dead_trainers_memory(scheme, peers):
    """Nobody asks it for anything then."""
    trainer, engine, worker = peers(3)
    trainer.call(host.send, scheme)
    engine.call(host.receive, scheme, "engine", pause=1.0)
    worker.call(host.be_worker, scheme.to_url(), 0, 1)
    trainer.start(host.update, 1)
    reader = scheme.create_subscriber()
    reader.open(Deadline(10.0))
    version = reader.wait(None, Deadline(10.0))
    assert worker.call(host.read_as_worker, version) == 1
    assert worker.call(host.mapped) == 4
    trainer.kill()
    eventually(lambda: worker.call(host.mapped) == 0)
    reader.close()


def test_a_run_leaves_nothing_behind(scheme, run_dir):
    with scheme.create_sender(constants(1)) as sender:
        sender.connect()
        sender.update_weights(version=1)
        assert os.listdir(run_dir)
    assert not os.path.exists(run_dir)
    assert not HostExchange.made
    assert os.listdir(run_dir + ".memory") == []


def test_no_room_for_what_must_be_copied_leaves_all_as_it_was(scheme):
    class Huge(ws.WeightSource):
        def manifest(self):
            return ws.Manifest.build([("w", torch.int8, (1 << 33,))])

        def tensors(self):
            raise AssertionError("nothing is asked of it")

    target = constants(-1)
    with scheme.create_sender() as sender, scheme.create_receiver(target) as receiver:
        sender.connect()
        receiver.connect()
        sender.attach(receiver)
        with pytest.raises(ws.NoRoomError):
            sender.update_weights(Huge(), version=1)
        sender.update_weights(constants(2), version=2)
        assert host.value_of(target) == 2
