"""A fallback across processes: schemes that break, ends that die, stop, restart or come late."""

import os
import shutil
import signal
import socket
import threading
import time
from dataclasses import replace

import pytest

import weightsync as ws
from tests.conftest import assert_all_same, copy_of
from tests.live import trainers
from tests.live.processes import (
    WAIT,
    PeerError,
    constants,
    end_receiver,
    end_sender,
    eventually,
    fill,
    follow,
    held,
    held_while_following,
    poll,
    publish,
    receive_in,
    send_from,
    value_of,
)
from tests.schemes.fallback import toy
from weightsync.deadline import Deadline
from weightsync.engines.module import ModuleEngine

NAMES = ("one", "two")


@pytest.fixture
def two(run_dir):
    """A fallback of two runs that can be made to fail; nothing of them is left afterwards."""
    os.mkdir(run_dir, 0o700)
    return made(run_dir)


def made(path):
    return ws.FallbackScheme(
        [toy.ToyScheme(f"{path}/{name}", slots=4) for name in NAMES], retry_after=0.2
    )


def break_down(state, *names):
    """From now on these schemes of this sender fail."""
    toy.FAULTS.clear()
    toy.FAULTS.update({name: toy.raising(OSError("a cable")) for name in names})


def is_due(state):
    """Whether this sender's first scheme works, or is to be tried again."""
    return state.sender._publisher._routes[0].is_due(state.sender.scheme.retry_after)


def publish_and_tell(state, number, **options):
    """Publish a constant. Returns the scheme that was used, the notes, and what receivers said."""
    fill(state.weights, number)
    report = state.sender.update_weights(version=number, wait="applied", **options)
    said = {r.receiver: (r.state, r.version and r.version.number) for r in report.receivers}
    return report.scheme, report.notes, said


class Counting(ModuleEngine):
    """Knows what was loaded into it."""

    def __init__(self, target):
        super().__init__(target)
        self.applied = []

    def apply(self, update, deadline):
        super().apply(update, deadline)
        self.applied.append((update.version.number, value_of(self.target)))


class Stuck(Counting):
    """Copies one tensor of its second update, and never comes back."""

    def apply(self, update, deadline):
        if self.applied:
            name = next(iter(self.target))
            self.target[name].copy_(update.snapshot.tensor(name))
            threading.Event().wait()
        super().apply(update, deadline)


def applied(state):
    return state.engine.applied


def followers(peer, scheme, *ids, engine=Counting):
    readers = []
    for id in ids:
        readers.append(peer())
        readers[-1].call(receive_in, scheme, id, engine=engine)
        readers[-1].call(follow)
    return readers


def test_one_that_is_reached_by_the_second_scheme_only_and_dies_is_named_once(peer, two):
    """Also where it dies between two updates, so that nothing is sent to it any more."""
    scheme = ws.FallbackScheme([two.schemes[0], ws.NCCLScheme(backend="gloo")])
    writer = peer()
    writer.call(send_from, scheme)
    (near,) = followers(peer, scheme.schemes[0], "near")
    (far,) = followers(peer, scheme.schemes[1], "far")
    way, _, said = writer.call(publish_and_tell, 1)
    assert (way, said) == ("fallback:toy+nccl", {"near": ("applied", 1), "far": ("applied", 1)})
    far.kill()
    with pytest.raises(PeerError, match=r"ReceiverError: version 2: receiver 'far' .*: dead"):
        writer.call(publish_and_tell, 2)
    assert writer.call(publish_and_tell, 3)[2] == {"near": ("applied", 3)}
    near.call(end_receiver)
    writer.call(end_sender)


def test_schemes_that_break_and_recover(peer, two):
    """Every version reaches every engine, once, whichever way it went."""
    writer = peer()
    writer.call(send_from, two)
    readers = followers(peer, two, "a", "b")
    ways = []
    for number in range(1, 13):
        writer.call(break_down, *[(), ("one",), ("two",)][number // 2 % 3])
        way, _, said = writer.call(publish_and_tell, number)
        assert said == {"a": ("applied", number), "b": ("applied", number)}
        ways.append(way)
        time.sleep(0.05)
    assert set(ways) == {"fallback:toy", "fallback:toy#2"}
    for reader in readers:
        assert reader.call(applied) == [(number, number) for number in range(1, 13)]
        reader.call(end_receiver)
    writer.call(end_sender)
    assert os.listdir(os.path.dirname(two.schemes[0].path)) == []


def test_a_run_that_is_removed_behind_everybodys_back(peer, two):
    writer = peer()
    writer.call(send_from, two)
    (reader,) = followers(peer, two, "r")
    writer.call(publish_and_tell, 1)
    shutil.rmtree(two.schemes[0].path)
    way, notes, said = writer.call(publish_and_tell, 2)
    assert (way, said) == ("fallback:toy#2", {"r": ("applied", 2)})
    assert "removed while the sender was using it" in notes[0]
    eventually(lambda: writer.call(is_due))
    way, notes, said = writer.call(publish_and_tell, 3)
    assert way.startswith("fallback:toy")
    assert (notes, said) == ((), {"r": ("applied", 3)})
    assert writer.call(publish_and_tell, 4) == ("fallback:toy", (), {"r": ("applied", 4)})
    assert reader.call(applied) == [(n, n) for n in (1, 2, 3, 4)]


@pytest.mark.parametrize("broken", [[], ["one"]])
def test_a_receiver_dies_while_it_applies(peer, two, broken):
    """H1: said by its name, once; nothing is sent to it another way, and the others go on."""
    writer = peer()
    writer.call(send_from, two)
    (victim,) = followers(peer, two, "victim", engine=Stuck)
    (other,) = followers(peer, two, "other")
    writer.call(break_down, *broken)
    writer.call(publish_and_tell, 1)
    writer.start(publish_and_tell, 2)
    eventually(lambda: other.call(held) == (2, 2))
    victim.kill()
    with pytest.raises(PeerError, match=rf"'victim' \(pid {victim.pid} .*dead"):
        writer.result(10)
    way, _, said = writer.call(publish_and_tell, 3)
    assert said == {"other": ("applied", 3)}
    assert way == ("fallback:toy#2" if broken else "fallback:toy")


def test_a_receiver_dies_that_only_a_broken_scheme_led_to(peer, two):
    """It is told of once, though nothing was sent to it."""
    writer, victim = peer(), peer()
    writer.call(send_from, two)
    followers(peer, two, "other")
    victim.call(receive_in, two.schemes[0], "victim")
    writer.call(break_down, "one")
    victim.kill()
    with pytest.raises(PeerError, match=rf"'victim' \(pid {victim.pid} .*dead"):
        writer.call(publish_and_tell, 1)
    assert writer.call(publish_and_tell, 2)[2] == {"other": ("applied", 2)}


def lose_and_kill(state, id, pid):
    """The first scheme loses a receiver because its process is gone; not all schemes know why."""

    def fault(publish, version, deadline, receivers):
        published = publish(["other"])
        os.kill(pid, signal.SIGKILL)
        dead = {id: "dead"}
        eventually(lambda: dead.items() <= {r.receiver: r.state for r in known()}.items())
        lost = ws.ReceiverReport(id, "waiting", error="no answer")
        return replace(published, failures=(lost,))

    def known():
        return state.sender._publisher._routes[1].publisher.receivers()

    toy.FAULTS["one"] = fault


def test_a_receiver_that_died_is_not_sent_anything_another_way(peer, two):
    writer, victim = peer(), peer()
    writer.call(send_from, two)
    followers(peer, two, "other")
    victim.call(receive_in, two, "victim")
    writer.call(lose_and_kill, "victim", victim.pid)
    with pytest.raises(PeerError, match=r"'victim'.*no answer"):
        writer.call(publish_and_tell, 1)
    assert writer.call(attempts) == ["one"]
    victim.process.join(WAIT)


def attempts(state):
    return toy.ASKED


def publish_and_hang(state, number):
    """Write half of a version, and stay there."""
    weights = constants(number)
    passes = iter([1, 2])

    def stream():
        describing = next(passes) == 1
        for name, tensor in weights.items():
            yield name, tensor
            if not describing and name == "layer1":
                open(f"{state.sender.scheme.schemes[0].path}.half", "w").close()
                threading.Event().wait()

    state.sender.update_weights(stream, version=number)


def test_a_sender_dies_and_the_next_one_cannot_use_the_first_scheme(peer, two):
    """It is newer all the same, and followed the other way; its step may be a lower one."""
    first, second = peer(), peer()
    epoch = first.call(send_from, two)
    (reader,) = followers(peer, two, "r")
    first.call(publish_and_tell, 5)
    first.start(publish_and_hang, 6)
    mark = f"{two.schemes[0].path}.half"
    eventually(lambda: os.path.exists(mark))
    first.kill()
    os.unlink(mark)
    assert reader.call(held) == (5, 5)
    with two.schemes[0].create_sender() as squatter:
        squatter.connect()
        assert second.call(send_from, two) > epoch
        way, notes, said = second.call(publish_and_tell, 1)
        assert (way, said) == ("fallback:toy#2", {"r": ("applied", 1)})
        assert "SenderBusyError" in notes[0]
    assert reader.call(applied) == [(5, 5), (1, 1)]


def test_a_receiver_restarts_under_its_name(peer, two):
    writer = peer()
    writer.call(send_from, two)
    (former,) = followers(peer, two, "r")
    writer.call(publish_and_tell, 1)
    former.kill()
    writer.call(break_down, "one")
    writer.call(publish, 2)
    (reader,) = followers(peer, two, "r")
    assert reader.call(held_while_following, 2) == (2, 2)
    assert writer.call(publish_and_tell, 3)[2] == {"r": ("applied", 3)}
    assert reader.call(applied) == [(2, 2), (3, 3)]


def test_a_receiver_that_comes_when_the_first_scheme_is_broken(peer, two):
    writer, late = peer(), peer()
    writer.call(send_from, two)
    writer.call(break_down, "one")
    writer.call(publish, 1)
    late.call(receive_in, two, "late")
    assert late.call(poll) == (1, 1)
    writer.call(break_down)
    eventually(lambda: writer.call(is_due))
    writer.call(publish, 2)
    assert late.call(poll) == (2, 2)


def stand_aside(state, scheme, id):
    """Be a receiver that one of the schemes does not lead to."""
    receive_in(state, scheme.schemes[1], id, engine=Counting)
    follow(state)


def test_receivers_of_two_hosts(peer, two):
    """One is on the trainer's host, the other one shares only a mount with it."""
    writer, apart = peer(), peer()
    writer.call(send_from, two)
    (near,) = followers(peer, two, "near")
    apart.call(stand_aside, two, "apart")
    everybody = ["near", "apart"]
    for number in range(1, 7):
        writer.call(break_down, *(["one"] if number in (3, 4) else []))
        way, _, said = writer.call(publish_and_tell, number)
        assert said == dict.fromkeys(everybody, ("applied", number))
        time.sleep(0.1)
    assert way == "fallback:toy+toy#2"
    for one in near, apart:
        assert one.call(applied) == [(n, n) for n in range(1, 7)]


class TestBroadcastFirst:
    """A transport that hands versions out, and one that leaves them somewhere."""

    @pytest.fixture
    def scheme(self, run_dir):
        nccl = ws.NCCLScheme(backend="gloo", bucket_mb=1, peer_timeout=2.0)
        return ws.FallbackScheme(
            [nccl, ws.DoubleBufferScheme(run_dir, slots=4)], retry_after=1.0, attempt_timeout=5.0
        )

    def test_it_is_used_while_it_works(self, peer, scheme):
        writer = peer()
        writer.call(send_from, scheme)
        readers = followers(peer, scheme, "a", "b")
        for number in 1, 2, 3:
            way, _, said = writer.call(publish_and_tell, number)
            assert said == {"a": ("applied", number), "b": ("applied", number)}
        assert way == "fallback:nccl"
        for reader in readers:
            assert reader.call(applied) == [(n, n) for n in (1, 2, 3)]

    @pytest.mark.slow
    def test_a_receiver_that_stands_still_finds_it_when_it_goes_on(self, peer, scheme):
        """It was not there for the broadcast; the others were not held up by more than that."""
        writer = peer()
        writer.call(send_from, scheme)
        readers = followers(peer, scheme, "still", "other")
        still, other = readers
        writer.call(publish_and_tell, 1)
        still.pause()
        with pytest.raises(PeerError, match=r"'still'.*waiting"):
            writer.call(publish_and_tell, 2, timeout=5)
        assert other.call(held) == (2, 2)
        still.go_on()
        assert still.call(held_while_following, 2) == (2, 2)
        assert writer.call(publish_and_tell, 3)[2] == {
            "still": ("applied", 3),
            "other": ("applied", 3),
        }
        for reader in readers:
            assert reader.call(applied) == [(n, n) for n in (1, 2, 3)]

    def test_a_receiver_that_it_cannot_reach(self, peer, scheme):
        writer, apart = peer(), peer()
        writer.call(send_from, scheme)
        (near,) = followers(peer, scheme, "near")
        apart.call(stand_aside, scheme, "apart")
        for number in 1, 2:
            way, _, said = writer.call(publish_and_tell, number)
            assert way == "fallback:nccl+shm"
            assert said == {"near": ("applied", number), "apart": ("applied", number)}
        for one in near, apart:
            assert one.call(applied) == [(1, 1), (2, 2)]

    def test_its_port_is_taken(self, peer, scheme):
        """P3: nothing is waited for that another program could answer."""
        where = (scheme.schemes[0].master_address, scheme.schemes[0].port)
        writer = peer()
        with socket.socket() as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(where)
            taken.listen()
            writer.call(send_from, scheme)
            (reader,) = followers(peer, scheme, "r")
            way, notes, said = writer.call(publish_and_tell, 1)
            assert (way, said) == ("fallback:shm", {"r": ("applied", 1)})
            assert str(where[1]) in notes[0]
        eventually(lambda: writer.call(is_due))
        assert writer.call(publish_and_tell, 2)[2] == {"r": ("applied", 2)}
        eventually(lambda: writer.call(is_due))
        eventually(lambda: writer.call(next_way) == "fallback:nccl")
        assert reader.call(applied)[:2] == [(1, 1), (2, 2)]


def next_way(state):
    eventually(lambda: is_due(state))
    return publish_and_tell(state, state.sender.version.number + 1)[0]


def read(scheme):
    """The newest version as a reader sees it: its number, and its tensors."""
    subscriber = scheme.create_subscriber()
    try:
        subscriber.open(Deadline(WAIT))
        version = subscriber.wait(None, Deadline(WAIT))
        with subscriber.snapshot(version, Deadline(WAIT)) as snapshot:
            snapshot.verify()
            return version.number, {name: copy_of(tensor) for name, tensor in snapshot}
    finally:
        subscriber.close()


def fail_to_contribute(state, rank):
    """One rank cannot write where the first scheme keeps its bytes."""

    def contribute(ticket, inventory, deadline):
        raise ws.WeightSyncError("no such mount here")

    if state.rank == rank:
        state.sender._publisher._routes[0].publisher.contribute = contribute


def break_in_the_middle(state):
    """The first scheme fails when it has read one tensor of the stream."""

    def publish(version, weights, deadline, receivers=None, crew=None):
        next(weights.inventory().stream())
        raise OSError("a cable")

    if state.rank == 0:
        state.sender._publisher._routes[0].publisher.publish = publish


class TestShardedTrainers:
    @pytest.mark.parametrize("gather", [True, False], ids=["gathered", "direct"])
    def test_an_update_goes_the_second_way(self, world, two, gather):
        ranks = world(2)
        ranks(trainers.build, "fsdp2")
        ranks(trainers.connect, None, scheme=two, gather=gather)
        ways = []
        for number in 1, 2, 3:
            ranks(break_down, *(["one"] if number == 2 else []))
            ways.append([report["scheme"] for report in ranks(trainers.update, number)])
            assert read(two)[0] == number
            assert_all_same(read(two)[1], ranks(trainers.whole)[0])
            ranks(trainers.train, number)
            eventually(lambda: ranks.peers[0].call(is_due))
        assert ways == [[way] * 2 for way in ("fallback:toy", "fallback:toy#2", "fallback:toy")]

    def test_a_stream_that_is_gathered_is_gathered_again(self, world, two):
        """H6: the ranks stay in step."""
        ranks = world(2)
        ranks(trainers.build, "fsdp2")
        ranks(trainers.connect, None, scheme=two, gather=True)
        ranks(break_in_the_middle)
        for number in 1, 2:
            reports = ranks(trainers.update, number)
            assert [report["scheme"] for report in reports] == ["fallback:toy#2"] * 2
            assert_all_same(read(two)[1], ranks(trainers.whole)[0])
            ranks(trainers.train, number)

    def test_a_rank_that_cannot_write_where_the_others_can(self, world, two):
        """All hear of it; the next update goes the other way."""
        ranks = world(2)
        ranks(trainers.build, "fsdp2")
        ranks(trainers.connect, None, scheme=two, gather=False)
        ranks(fail_to_contribute, 1)
        errors = ranks.outcomes(trainers.update, 1)
        assert all("no such mount here" in str(error) for error in errors)
        assert "the next update goes another way" in str(errors[0])
        reports = ranks(trainers.update, 2)
        assert [report["scheme"] for report in reports] == ["fallback:toy#2"] * 2
        assert_all_same(read(two)[1], ranks(trainers.whole)[0])
