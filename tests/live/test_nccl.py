"""Broadcast to receivers that die, stop, fail, come late or come back. On gloo."""

import gc
import itertools
import os
import pickle
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

import weightsync as ws
from tests.live import trainers
from tests.live.processes import (
    WAIT,
    PeerError,
    constants,
    end_receiver,
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
from tests.schemes.nccl.on_gpus import pretend
from weightsync.deadline import Deadline
from weightsync.engines.module import ModuleEngine
from weightsync.schemes.nccl import publisher, reader, topology, transfer
from weightsync.schemes.nccl.group import Group
from weightsync.schemes.nccl.staging import Staging

SHAPE = {"nbytes": 24 << 20, "tensors": 6}
"""More buckets of 1 MiB than are under way at a time."""


@pytest.fixture(autouse=True, params=["", pytest.param("on GPUs", marks=pytest.mark.slow)])
def place(request, monkeypatch):
    """Where buckets are: in host memory, or as if on GPUs."""
    for module in (publisher, reader):
        monkeypatch.setattr(module, "gpu_of", module.gpu_of)
    if request.param:
        pretend()
    return request.param


@pytest.fixture
def peer(peer, place):
    def make():
        made = peer()
        if place:
            made.call(pretend)
        return made

    return make


@pytest.fixture
def scheme():
    return ws.NCCLScheme(backend="gloo", bucket_mb=1, peer_timeout=2.0)


@pytest.fixture
def sender(scheme):
    weights = constants(0, **SHAPE)
    with scheme.create_sender(weights, timeout=WAIT) as made:
        made.connect()
        made.weights = weights
        yield made


def send(sender, number, **options):
    fill(sender.weights, number)
    return sender.update_weights(version=number, **options)


def receivers(peer, scheme, *ids, following=True, **options):
    made = [peer() for _ in ids]
    for one, id in zip(made, ids, strict=True):
        one.call(receive_in, scheme, id, **SHAPE, **options)
        if following:
            one.call(follow)
    return made


# -------------------------------------------------------------------- what goes wrong in a receiver


def do_at_bucket(state, number, action, update=1):
    """Do something when a bucket of the next update has arrived, before it is acknowledged."""
    take = reader.Reader._take

    def patched(self, arriving):
        if arriving.message["number"] == number and arriving.message["update"] >= update:
            reader.Reader._take = take
            action()
        take(self, arriving)

    reader.Reader._take = patched


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def hang():
    threading.Event().wait()


def die_at_bucket(state, number):
    do_at_bucket(state, number, die)


def stop_at_bucket(state, number):
    do_at_bucket(state, number, stop)


def hang_at_bucket(state, number):
    do_at_bucket(state, number, hang)


def fail_to_put(state, words):
    def broken(self, part, message):
        reader.Reader._put = put
        raise OSError(words)

    put, reader.Reader._put = reader.Reader._put, broken


def flip_on_arrival(state):
    """One bit of one bucket is not what was sent."""

    def flipped(self, part, message):
        reader.Reader._put = put
        part.payload[5] ^= 4
        put(self, part, message)

    put, reader.Reader._put = reader.Reader._put, flipped


def fail_to_join_in(state, after=0):
    """As of a group that torch has aborted by itself, because it heard of a member's death."""

    def broken(self, buffer):
        if next(calls) < after:
            return broadcast(self, buffer)
        Group.broadcast = broadcast
        raise ws.WeightSyncError("the communicator was aborted")

    calls = itertools.count()
    broadcast, Group.broadcast = Group.broadcast, broken


def die_at_begin(state, number):
    """When the sender has said so often that an update begins."""
    calls = itertools.count(1)
    begin = reader.Reader._begin

    def patched(self, connection, message):
        if next(calls) == number:
            die()
        begin(self, connection, message)

    reader.Reader._begin = patched


def hang_at_post(state):
    reader.Reader._post = lambda self, message: hang()


def forget_bytes(state):
    """What a slot held before is no help with the next version."""
    begin = Staging.begin

    def wiped(self, *arguments):
        found = begin(self, *arguments)
        if found is not None:
            found[0].bytes.zero_()
        return found

    Staging.begin = wiped


# -------------------------------------------------------------------- losing receivers


@pytest.mark.parametrize("bucket", [0, 11, 23])
def test_a_receiver_dies_in_the_middle_of_a_transfer(peer, scheme, sender, bucket):
    """H1: the others are served by the same call; what was read of the source is not read again."""
    other, victim, third = receivers(peer, scheme, "other", "victim", "third")
    send(sender, 1, wait="applied")
    victim.call(die_at_bucket, bucket)
    with pytest.raises(ws.ReceiverError, match="'victim'") as caught:
        send(sender, 2, wait="applied", timeout=10)
    assert [(f.receiver, f.state) for f in caught.value.failures] == [("victim", "dead")]
    assert f"pid {victim.pid}" in str(caught.value)
    told = {r.receiver: (r.state, r.version.number) for r in caught.value.report.receivers}
    assert told == {"other": ("applied", 2), "third": ("applied", 2), "victim": ("dead", 1)}
    assert other.call(held) == (2, 2)
    assert third.call(held) == (2, 2)
    # Said once; and one that comes back under its name has the next version.
    send(sender, 3, wait="applied")
    (again,) = receivers(peer, scheme, "victim")
    assert send(sender, 4, wait="applied").behind() == ()
    assert again.call(held) == (4, 4)
    assert other.call(held) == (4, 4)


def test_a_receiver_that_dies_is_said_also_to_one_who_does_not_wait(peer, scheme, sender):
    other, victim = receivers(peer, scheme, "other", "victim")
    send(sender, 1, wait="applied")
    victim.call(die_at_bucket, 7)
    with pytest.raises(ws.ReceiverError, match=r"'victim'.*gone"):
        send(sender, 2)
    assert other.call(held_while_following, 2) == (2, 2)


def test_a_receiver_that_stands_still_in_a_transfer(peer, scheme, sender):
    """H1: stopped, not dead. It is given up, and comes back when it can."""
    other, stopped = receivers(peer, scheme, "other", "stopped")
    send(sender, 1, wait="applied")
    stopped.call(stop_at_bucket, 7)
    with pytest.raises(ws.ReceiverError, match=r"'stopped'.*has not answered"):
        send(sender, 2, wait="applied", timeout=20)
    assert other.call(held) == (2, 2)
    send(sender, 3, wait="applied")  # without it
    stopped.go_on()
    eventually(
        lambda: any(r.receiver == "stopped" and r.state != "dead" for r in sender.receivers())
    )
    send(sender, 4, wait="applied")
    assert stopped.call(held) == (4, 4)
    assert other.call(held) == (4, 4)


@pytest.mark.slow
def test_a_receiver_whose_transfer_hangs_while_it_answers(peer, scheme, sender):
    other, hung = receivers(peer, scheme, "other", "hung")
    send(sender, 1, wait="applied")
    hung.call(hang_at_bucket, 7)
    with pytest.raises(ws.ReceiverError, match=r"'hung'.*stands still"):
        send(sender, 2, wait="applied", timeout=20)
    assert other.call(held) == (2, 2)
    send(sender, 3, wait="applied", receivers=["other"])


def test_a_receiver_that_cannot_join_in_for_anothers_death_is_not_lost(peer, scheme, sender):
    """H1: torch may know of a death before the sender does."""
    unlucky, other = receivers(peer, scheme, "unlucky", "other")
    send(sender, 1, wait="applied")
    unlucky.call(fail_to_join_in)
    assert send(sender, 2, wait="applied").behind() == ()
    assert unlucky.call(held) == (2, 2)
    assert other.call(held) == (2, 2)


def test_one_bucket_is_not_taken_for_another_once_a_collective_failed(
    peer, scheme, sender, monkeypatch
):
    """The sender hears of it late, together with what was said of the buckets behind it."""
    sender._publisher._scheme = replace(sender._publisher._scheme, verify=False)
    (unlucky,) = receivers(peer, replace(scheme, verify=False), "unlucky")
    send(sender, 1, wait="applied")
    unlucky.call(fail_to_join_in, 2)
    settle = transfer.Transfer._settle_oldest

    def late(self):
        time.sleep(0.1)
        settle(self)

    monkeypatch.setattr(transfer.Transfer, "_settle_oldest", late)
    assert send(sender, 2, wait="applied").behind() == ()
    assert unlucky.call(held) == (2, 2)


def test_a_bucket_that_has_no_place_is_not_followed_by_others(peer, scheme, sender):
    """They would get its bytes; gloo ends a process that gets more than it has room for."""
    other, full = receivers(peer, scheme, "other", "full")
    send(sender, 1, wait="applied")
    full.call(fail_to_check)
    with pytest.raises(ws.ReceiverError, match=r"'full'.*no room"):
        send(sender, 2, wait="applied", timeout=20)
    assert other.call(held) == (2, 2)
    assert full.call(joined_in) == 0


def fail_to_check(state):
    check, broadcast = reader.check, Group.broadcast
    state.calls = []

    def broken(part, manifest):
        reader.check = check
        Group.broadcast = counted
        raise ws.WeightSyncError("no room")

    def counted(self, buffer):
        state.calls.append(self)
        return broadcast(self, buffer)

    reader.check = broken


def joined_in(state):
    return len(state.calls)


def test_another_receiver_dies_before_what_was_under_way_is_sent_again(peer, scheme, sender):
    other, first, second = receivers(peer, scheme, "other", "first", "second")
    send(sender, 1, wait="applied")
    first.call(die_at_bucket, 7)
    second.call(die_at_begin, 2)
    with pytest.raises(ws.ReceiverError) as caught:
        send(sender, 2, wait="applied", timeout=20)
    assert {f.receiver: f.state for f in caught.value.failures} == {
        "first": "dead",
        "second": "dead",
    }
    assert other.call(held) == (2, 2)


@pytest.mark.parametrize("verify", [True, False])
def test_another_receiver_dies_while_the_next_group_is_built(peer, scheme, sender, verify):
    """Who cannot build it for that keeps what it has of the version."""
    scheme = replace(scheme, verify=verify)
    sender._publisher._scheme = scheme
    other, first, second = receivers(peer, scheme, "other", "first", "second")
    send(sender, 1, wait="applied")
    first.call(die_at_bucket, 7)
    second.call(die_at_join)
    other.call(fail_to_build)
    with pytest.raises(ws.ReceiverError) as caught:
        send(sender, 2, wait="applied", timeout=20)
    assert {f.receiver for f in caught.value.failures} == {"first", "second"}
    assert other.call(held) == (2, 2)
    assert other.call(rounds_that_are_over) == set()


def test_nobody_waits_for_one_of_receivers_that_was_lost(peer, scheme, sender, monkeypatch):
    other, victim = receivers(peer, scheme, "other", "victim")
    send(sender, 1, wait="applied")
    wait_applied = sender._publisher.wait_applied
    ends = []

    def watched(version, deadline, receivers=None):
        found = wait_applied(version, deadline, receivers)
        ends.append(deadline.expired)
        return found

    monkeypatch.setattr(sender._publisher, "wait_applied", watched)
    victim.call(die_at_bucket, 7)
    with pytest.raises(ws.ReceiverError, match="'victim'"):
        send(sender, 2, wait="applied", timeout=10, receivers=["other", "victim"])
    assert ends == [False]
    assert other.call(held) == (2, 2)


@pytest.mark.parametrize("how", [stop, hang])
def test_one_that_does_not_come_to_the_next_group_takes_nobody_along(peer, scheme, sender, how):
    """Stopped, or hanging while it answers: all the others say that they could not build it."""
    other, third, first, absent = receivers(peer, scheme, "other", "third", "first", "absent")
    send(sender, 1, wait="applied")
    first.call(die_at_bucket, 7)
    absent.call(stay_away, how)
    with pytest.raises(ws.ReceiverError) as caught:
        send(sender, 2, wait="applied", timeout=12)
    assert {f.receiver for f in caught.value.failures} == {"first", "absent"}
    assert other.call(held) == (2, 2)
    assert third.call(held) == (2, 2)


def stay_away(state, how):
    reader.Reader._join = lambda self, connection, message: how()


def rounds_that_are_over(state):
    known = state.receiver._subscriber._reader
    return known._left | known._broken


def die_at_join(state):
    reader.Reader._join = lambda self, connection, message: die()


def fail_to_build(state):
    """Once: as gloo does when a member closes its connection meanwhile."""

    def broken(*arguments):
        reader.Group = Group
        raise ws.WeightSyncError("connection closed by peer")

    reader.Group = broken


def test_one_that_went_away_and_came_back_is_not_sent_the_rest_alone(
    peer, scheme, sender, monkeypatch
):
    """Both while the sender is about to build a group without another."""
    sender._publisher._scheme = replace(sender._publisher._scheme, verify=False)
    back, victim = receivers(peer, replace(scheme, verify=False), "back", "victim")
    back.call(forget_bytes)
    send(sender, 1, wait="applied")
    victim.call(die_at_bucket, 7)
    drop = transfer.Transfer._drop_group

    def cut(self):
        drop(self)
        monkeypatch.setattr(transfer.Transfer, "_drop_group", drop)
        member = self._members.find("back")
        (former,) = member.peers.values()
        former.connection.close()
        eventually(lambda: former.gone and member.is_whole)

    monkeypatch.setattr(transfer.Transfer, "_drop_group", cut)
    with pytest.raises(ws.ReceiverError, match=r"'back'.*come back"):
        send(sender, 2, wait="applied", timeout=20)
    assert back.call(held) == (1, 1)
    send(sender, 3, wait="applied")
    assert back.call(held) == (3, 3)


@pytest.mark.slow
def test_who_stands_still_is_told_by_this_update_not_by_the_last(peer, scheme, sender):
    """It had taken more of the last one than the other has of this one."""
    other, hung = receivers(peer, scheme, "other", "hung")
    send(sender, 1, wait="applied")
    hung.call(hang_at_post)
    with pytest.raises(ws.ReceiverError, match=r"'hung'.*stands still") as caught:
        send(sender, 2, wait="applied", timeout=20)
    assert [f.receiver for f in caught.value.failures] == ["hung"]
    assert other.call(held) == (2, 2)


def test_empty_weights_reach_one_that_is_slow_when_another_dies(peer, scheme):
    with scheme.create_sender({}, timeout=WAIT) as sender:
        sender.connect()
        slow, victim = peer(), peer()
        for one, id in ((slow, "slow"), (victim, "victim")):
            one.call(receive_nothing, scheme, id)
        sender.update_weights(version=1)
        victim.call(die_at_begin, 1)
        slow.call(begin_late, 1.0)
        with pytest.raises(ws.ReceiverError) as caught:
            sender.update_weights(version=2, timeout=10)
        assert [f.receiver for f in caught.value.failures] == ["victim"]


def receive_nothing(state, scheme, id):
    state.receiver = scheme.create_receiver({}, id=id)
    state.receiver.connect(WAIT)


def begin_late(state, seconds):
    """As if all buffers were in use for so long."""
    begin = Staging.begin
    free = time.monotonic() + seconds

    def late(self, layout, keep, deadline, check):
        while time.monotonic() < free:
            check()
            time.sleep(0.01)
        return begin(self, layout, keep, deadline, check)

    Staging.begin = late


def test_all_receivers_die(peer, scheme, sender):
    (victim,) = receivers(peer, scheme, "victim")
    send(sender, 1, wait="applied")
    victim.call(die_at_bucket, 7)
    with pytest.raises(ws.ReceiverError, match=r"reached nobody.*'victim'") as caught:
        send(sender, 2, timeout=10)
    assert [f.receiver for f in caught.value.failures] == ["victim"]
    (new,) = receivers(peer, scheme, "new")
    send(sender, 2, wait="applied")  # the same step again: nobody has it
    assert new.call(held) == (2, 2)


def test_a_bit_that_flips_on_the_way_is_found(peer, scheme, sender):
    other, unlucky = receivers(peer, scheme, "other", "unlucky")
    send(sender, 1, wait="applied")
    unlucky.call(flip_on_arrival)
    with pytest.raises(ws.ReceiverError, match=r"'unlucky'.*CorruptError.*layer0"):
        send(sender, 2, wait="applied")
    assert other.call(held) == (2, 2)
    assert unlucky.call(held) == (1, 1)
    eventually(lambda: len(sender.receivers()) == 2)
    send(sender, 3, wait="applied")
    assert unlucky.call(held) == (3, 3)


def test_a_receivers_own_words_reach_the_sender(peer, scheme, sender):
    other, failing = receivers(peer, scheme, "other", "failing")
    failing.call(fail_to_put, "the memory is on fire")
    with pytest.raises(ws.ReceiverError, match=r"'failing'.*the memory is on fire"):
        send(sender, 1, wait="applied")
    assert other.call(held) == (1, 1)


class SlowEngine(ModuleEngine):
    def apply(self, update, deadline):
        time.sleep(1.0)
        super().apply(update, deadline)


class NeverDone(ModuleEngine):
    def apply(self, update, deadline):
        super().apply(update, deadline)
        if update.version.number == 2:
            threading.Event().wait()


def test_an_engine_that_never_comes_back_costs_the_others_nothing(peer, scheme, sender):
    """Its buffers fill up; then it is left out, and said to be late."""
    (other,) = receivers(peer, scheme, "other")
    (stuck,) = receivers(peer, scheme, "stuck", engine=NeverDone)
    send(sender, 1, wait="applied")
    with pytest.raises(ws.ReceiverError, match="'stuck'"):
        send(sender, 2, wait="applied", timeout=2)
    assert other.call(held) == (2, 2)
    for number in (3, 4):
        with pytest.raises(ws.ReceiverError, match="'stuck'") as caught:
            send(sender, number, wait="applied", timeout=3)
        assert [f.state for f in caught.value.failures] == ["waiting"]
        assert other.call(held) == (number, number)
    assert stuck.process.is_alive()


def test_a_receiver_whose_setup_fails(peer, scheme):
    """H3."""

    with scheme.create_sender(constants(1)) as sender:
        one = peer()
        one.start(receive_broken, scheme)
        with pytest.raises(ws.ReceiverError, match=r"'broken'.*no nccl"):
            sender.connect(timeout=WAIT, receivers=1)
        with pytest.raises(PeerError, match="no nccl"):
            one.result()


class Broken(ModuleEngine):
    def connect(self, url, deadline):
        raise RuntimeError("no nccl")


def receive_broken(state, scheme):
    receive_in(state, scheme, "broken", engine=Broken)


def test_a_group_that_a_receiver_cannot_build(peer, scheme, sender):
    """H3: the reason is in the sender's error, and the others are served."""
    other, broken = receivers(peer, scheme, "other", "broken")
    broken.call(break_groups, "libnccl is missing")
    with pytest.raises(ws.ReceiverError, match=r"'broken'.*libnccl is missing"):
        send(sender, 1, wait="applied")
    assert other.call(held) == (1, 1)


def break_groups(state, words):
    def refuse(*arguments):
        raise RuntimeError(words)

    reader.Group = refuse


# -------------------------------------------------------------------- senders


def test_the_sender_is_killed_in_the_middle_of_a_transfer(peer, scheme):
    """Receivers keep what they hold; another sender takes over at the same port."""
    first = peer()
    first.call(send_from, scheme, **SHAPE)
    (one,) = receivers(peer, scheme, "one")
    assert first.call(publish, 1, wait="applied").receivers == {"one": ("applied", 1)}
    one.call(kill_at_bucket, first.pid, 9)
    first.start(publish, 2)
    eventually(lambda: not first.process.is_alive())
    assert one.call(held) == (1, 1)
    second = peer()
    second.call(send_from, scheme, **SHAPE)
    assert second.call(publish, 1, value=7, wait="applied").receivers == {"one": ("applied", 1)}
    assert one.call(held) == (1, 7)


def kill_at_bucket(state, pid, number):
    do_at_bucket(state, number, lambda: os.kill(pid, signal.SIGKILL), update=2)


def test_a_source_that_fails_half_way_costs_nothing_but_its_update(peer, scheme, sender):
    """W10: nothing becomes visible, and the group is as good as before."""
    (one,) = receivers(peer, scheme, "one")
    send(sender, 1, wait="applied")
    groups = dict(sender._publisher._rounds._groups)

    def stream():
        for name, tensor in sender.weights.items():
            if name == "layer4" and passes:
                raise RuntimeError("out of memory")
            yield name, tensor + 1
        passes.append(1)

    passes = []
    with pytest.raises(RuntimeError, match="out of memory"):
        sender.update_weights(stream, version=2)
    assert one.call(held) == (1, 1)
    send(sender, 3, wait="applied")
    assert one.call(held) == (3, 3)
    assert sender._publisher._rounds._groups == groups


def test_the_first_update_waits_for_as_many_replicas_as_were_announced(peer):
    scheme = ws.NCCLScheme(backend="gloo", num_replicas=2)
    writer = peer()
    writer.call(send_from, scheme, **SHAPE)
    receivers(peer, scheme, "one")
    writer.start(publish, 1, wait="applied")
    assert not writer.answered(0.5)
    receivers(peer, scheme, "two")
    assert set(writer.result().receivers) == {"one", "two"}
    with pytest.raises(PeerError, match="VersionError"):
        writer.call(publish, 0)


def test_too_few_replicas_are_an_error_at_the_deadline(peer):
    scheme = ws.NCCLScheme(backend="gloo", num_replicas=2)
    with scheme.create_sender(constants(1)) as sender:
        sender.connect()
        receivers(peer, scheme, "one")
        with pytest.raises(ws.DeadlineError, match=r"for 2 receivers.*connected: one"):
            sender.update_weights(version=1, timeout=1.0)


# -------------------------------------------------------------------- who may connect


def test_a_port_that_is_taken_is_named_at_once():
    """P3."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        sender = ws.NCCLScheme(master_port=port, backend="gloo").create_sender(constants(1))
        with pytest.raises(ws.SenderBusyError, match=rf"{port}.*master_port="):
            sender.connect(timeout=30)


def test_two_jobs_on_one_host_do_not_meet():
    """P3: without a port each gets its own."""
    schemes = [ws.NCCLScheme(backend="gloo") for _ in range(2)]
    targets = [constants(-1), constants(-1)]
    senders = [scheme.create_sender(constants(n)) for n, scheme in enumerate(schemes)]
    for sender in senders:
        sender.connect()
    made = [s.create_receiver(t) for s, t in zip(schemes, targets, strict=True)]
    for receiver in made:
        receiver.connect(WAIT)
    for sender in senders:
        sender.update_weights(version=1)
    for receiver in made:
        receiver.poll_and_apply(WAIT)
    assert [value_of(target) for target in targets] == [0, 1]
    for end in [*made, *senders]:
        end.shutdown()


def test_a_second_sender_is_refused(scheme, sender):
    with pytest.raises(ws.SenderBusyError, match="taken"):
        scheme.create_sender(constants(1)).connect()


def test_over_ipv6():
    """P5."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    scheme = ws.NCCLScheme(master_address="::1", backend="gloo")
    assert ws.scheme_from_url(scheme.to_url()) == scheme
    target = constants(-1)
    with scheme.create_sender(constants(5)) as sender, scheme.create_receiver(target) as receiver:
        sender.connect()
        receiver.connect(WAIT)
        sender.update_weights(version=1)
        receiver.poll_and_apply(WAIT)
        assert value_of(target) == 5


def test_trainer_and_engine_on_one_gpu(monkeypatch):
    """P7: found before there is any group, by the device's UUID."""
    for module in ("publisher", "reader"):
        monkeypatch.setattr(
            f"weightsync.schemes.nccl.{module}.device_identity", lambda: "GPU-8a6f-one"
        )
    monkeypatch.setattr(ws.NCCLScheme, "device_here", lambda self: torch.device("cpu"))
    scheme = ws.NCCLScheme()
    with scheme.create_sender(constants(1)) as sender:
        sender.connect()
        receiver = scheme.create_receiver(constants(0), id="r1")
        with pytest.raises(ValueError, match=r"trainer \(rank 0\).*'r1'.*GPU-8a6f-one.*shared"):
            receiver.connect(WAIT)
        with pytest.raises(ws.ReceiverError, match=r"'r1'.*GPU-8a6f-one"):
            sender.connect(receivers=1, timeout=WAIT)
        receiver.shutdown()


def test_devices_are_told_apart_by_uuid_not_by_index():
    topology.require_distinct({"trainer": "a", "r": "b", "on the CPU": "", "too": ""})
    with pytest.raises(ValueError, match="r1 and r2"):
        topology.require_distinct({"trainer": "a", "r1": "b", "r2": "b"})


def test_a_replica_of_another_size_is_refused():
    scheme = ws.NCCLScheme(backend="gloo", gpus_per_replica=2)
    with scheme.create_sender(constants(1)) as sender:
        sender.connect()
        receiver = scheme.create_receiver(constants(0), id="small")
        with pytest.raises(ws.WeightSyncError, match=r"'small' has 1 processes.*says 2"):
            receiver.connect(WAIT)
        receiver.shutdown()


def test_without_the_token_nobody_receives():
    scheme = ws.NCCLScheme(backend="gloo", token="sesame")
    guess = ws.NCCLScheme(master_port=scheme.master_port, backend="gloo", token="guess")
    none = ws.NCCLScheme(master_port=scheme.master_port, backend="gloo")
    target = constants(0)
    with scheme.create_sender(constants(3)) as sender, scheme.create_receiver(target) as receiver:
        sender.connect()
        for other in (guess, none):
            intruder = other.create_receiver(constants(0), id="intruder")
            with pytest.raises(ws.WeightSyncError, match="token"):
                intruder.connect(WAIT)
            intruder.shutdown()
        receiver.connect(WAIT)
        report = sender.update_weights(version=1)
        assert report.version.number == 1
        receiver.poll_and_apply(WAIT)
        assert value_of(target) == 3
        assert [r.receiver for r in sender.receivers()] == [receiver.id]


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_nothing_that_comes_in_is_unpickled(scheme, sender, tmp_path):
    """X1."""
    path = str(tmp_path / "made")
    data = pickle.dumps(Evil(path))
    ports = [scheme.port, sender._publisher._rounds._where.port]
    target = constants(0, **SHAPE)
    with scheme.create_receiver(target) as receiver:
        receiver.connect(WAIT)
        for port in ports:
            for payload in (data, len(data).to_bytes(4, "big") + data, b"\xff" * 64, b"{}\n", b""):
                with socket.create_connection(("127.0.0.1", port)) as link:
                    link.sendall(payload)
        send(sender, 1)
        receiver.poll_and_apply(WAIT)
        assert value_of(target) == 1
    assert not os.path.exists(path)


def test_words_that_make_no_sense_end_a_connection_and_nothing_else(scheme, sender):
    from weightsync.deadline import Deadline
    from weightsync.report import ReceiverReport
    from weightsync.run.records import report_to_json
    from weightsync.schemes.nccl.control import join
    from weightsync.schemes.nccl.endpoint import Endpoint

    where = Endpoint("127.0.0.1", scheme.port)
    said = report_to_json(ReceiverReport("x", "connected")).decode()
    good = {
        "role": "receiver",
        "receiver": "x",
        "workers": 1,
        "report": said,
        "host": "h",
        "pid": 1,
    }
    for change in (
        {"role": "king"},
        {"receiver": "../x"},
        {"receiver": None},
        {"workers": -1},
        {"workers": "many"},
        {"report": "[]"},
        {"report": 5},
    ):
        with pytest.raises((ws.WeightSyncError, EOFError, OSError)):
            join(where, None, {**good, **change}, Deadline(WAIT))
    for words in ({}, {"op": "report", "report": "?"}, {"op": 5}):
        connection, _ = join(where, None, good, Deadline(WAIT))
        connection.send(words)
        connection.close()
    target = constants(0, **SHAPE)
    with scheme.create_receiver(target, id="x") as receiver:
        receiver.connect(WAIT)
        send(sender, 1)
        receiver.poll_and_apply(WAIT)
        assert value_of(target) == 1


# -------------------------------------------------------------------- updates for some


def test_many_updates_for_all_one_and_two(scheme, sender):
    """H5."""
    names = ["a", "b", "c"]
    targets = {name: constants(-1, **SHAPE) for name in names}
    made = {name: scheme.create_receiver(target, id=name) for name, target in targets.items()}
    for receiver in made.values():
        receiver.connect(WAIT)
    last = {}
    for number in range(1, 51):
        some = [None, [names[number % 3]], [names[number % 3], names[(number + 1) % 3]]][number % 3]
        send(sender, number, receivers=some)
        for name in some or names:
            last[name] = number
            assert made[name].poll_and_apply(WAIT).version.number == number
    for name in names:
        assert made[name].poll_and_apply() is None
        assert (made[name].version.number, value_of(targets[name])) == (last[name], last[name])
        made[name].shutdown()


# -------------------------------------------------------------------- sharded trainers


def test_sharded_ranks_gather_together_and_one_sends(mortal, scheme, run_dir):
    """H6: the others wait for rank 0's word, not in a collective, while it sends."""
    world = mortal(2)
    world(trainers.build, "fsdp2")
    target = trainers.plain(seed=9)
    world.peers[0].start(trainers.connect, run_dir, scheme=scheme)
    world.peers[1].start(trainers.connect, run_dir, scheme=scheme)
    for one in world.peers:
        one.result()
    with scheme.create_receiver(target) as receiver:
        receiver.connect(WAIT)
        for number in (1, 2):
            world(trainers.train, number)
            world(trainers.update, number)
            receiver.poll_and_apply(WAIT)
            wanted = world(trainers.whole)[0]
            for name, tensor in target.state_dict().items():
                assert torch.equal(tensor, wanted[name]), name
    world(trainers.end_senders)


def slow(state, seconds):
    take = reader.Reader._take

    def patched(self, arriving):
        time.sleep(seconds)
        take(self, arriving)

    reader.Reader._take = patched


def receive_model(state, scheme, **options):
    state.target = trainers.plain(seed=9, **options)
    state.receiver = scheme.create_receiver(state.target)
    state.receiver.connect(WAIT)


def poll_model(state):
    state.receiver.poll_and_apply(WAIT)
    return {name: tensor.clone() for name, tensor in state.target.state_dict().items()}


@pytest.mark.slow
def test_a_slow_receiver_sets_off_no_watchdog_of_the_trainers_ranks(mortal, peer, scheme, run_dir):
    """H6: the ranks' own collectives time out after 2 s, the send takes much longer."""
    size = {"width": 200, "blocks": 6}
    world = mortal(2, seconds=2.0)
    world(trainers.build, "fsdp2", **size)
    one = peer()
    world(trainers.connect, run_dir, scheme=scheme)
    one.call(receive_model, scheme, **size)
    one.call(slow, 0.8)
    began = time.monotonic()
    world(trainers.update, 1)
    assert time.monotonic() - began > 3.0  # or it would not show anything
    wanted = world(trainers.whole)[0]
    found = one.call(poll_model)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    world(trainers.end_senders)


def test_signing_off_is_no_failure(peer, scheme, sender):
    one, two = receivers(peer, scheme, "one", "two", following=False)
    send(sender, 1)
    assert one.call(poll) == (1, 1)
    assert two.call(poll) == (1, 1)
    two.call(end_receiver)
    report = send(sender, 2)
    assert report.receivers == ()
    assert one.call(poll) == (2, 2)


def test_signing_off_while_versions_are_on_their_way_is_no_death(peer, scheme, sender):
    _, two = receivers(peer, scheme, "one", "two")
    with ThreadPoolExecutor(1) as pool:
        updating = pool.submit(lambda: [send(sender, number) for number in range(1, 60)])
        two.call(held_while_following, 3)
        two.call(end_receiver)
        reports = updating.result(60)  # raises what any of them raised
    assert len(reports) == 59


# -------------------------------------------------------------------- ends that are thrown away


def pair(**options):
    scheme = ws.NCCLScheme(backend="gloo", bucket_mb=1, peer_timeout=2.0, **options)
    weights, target = constants(0, **SHAPE), constants(-1, **SHAPE)
    sender = scheme.create_sender(weights, timeout=10)
    sender.weights = weights
    sender.connect()
    receiver = scheme.create_receiver(target, id="r")
    receiver.connect(WAIT)
    return scheme, sender, receiver, target


def test_one_buffer_is_enough():
    _, sender, receiver, target = pair(buffers=1)
    for number in (1, 2, 3):
        send(sender, number)
        assert receiver.poll_and_apply(WAIT).version.number == number
        assert value_of(target) == number
    receiver.shutdown()
    sender.shutdown()


def test_a_version_that_made_room_for_one_that_did_not_come():
    """It was announced and not looked at; looking for it must not wait for ever."""
    _, sender, receiver, target = pair()
    send(sender, 1)
    receiver.poll_and_apply(WAIT)
    send(sender, 2)
    passes = []

    def stream():
        for name, tensor in sender.weights.items():
            if name == "layer4" and passes:
                raise RuntimeError("out of memory")
            yield name, tensor + 1
        passes.append(1)

    with pytest.raises(RuntimeError, match="out of memory"):
        sender.update_weights(stream, version=3)
    eventually(lambda: receiver.poll_and_apply() is None)
    assert value_of(target) == 1
    send(sender, 4)
    assert receiver.poll_and_apply(WAIT).version.number == 4
    receiver.shutdown()
    sender.shutdown()


def source_that_fails_at_once(sender):
    passes = []

    def stream():
        for name, tensor in sender.weights.items():
            if passes:
                raise RuntimeError("out of memory")
            yield name, tensor + 1
        passes.append(1)

    return stream


def test_room_is_made_later_than_nothing_came_of_it(monkeypatch):
    """A version that was announced is taken back however slow the receiver was to drop it."""
    _, sender, receiver, _ = pair()
    send(sender, 1)
    receiver.poll_and_apply(WAIT)
    send(sender, 2)
    begin = Staging.begin
    begun, go_on = threading.Event(), threading.Event()

    def slow(self, *arguments):
        found = begin(self, *arguments)
        begun.set()
        assert go_on.wait(WAIT)
        return found

    def stream():
        for name, tensor in sender.weights.items():
            if passes:
                assert begun.wait(WAIT)
                raise RuntimeError("out of memory")
            yield name, tensor
        passes.append(1)

    monkeypatch.setattr(Staging, "begin", slow)
    passes = []
    with pytest.raises(RuntimeError, match="out of memory"):
        sender.update_weights(stream, version=3)
    go_on.set()
    eventually(lambda: receiver._subscriber.wait(None, Deadline(0)).number == 1)
    assert receiver.poll_and_apply() is None
    send(sender, 4)
    assert receiver.poll_and_apply(WAIT).version.number == 4
    receiver.shutdown()
    sender.shutdown()


def test_a_version_that_came_twice_is_not_taken_back_for_its_first_copy(monkeypatch):
    _, sender, receiver, target = pair()
    send(sender, 1)
    receiver.poll_and_apply(WAIT)
    send(sender, 2)
    send(sender, 2)  # into the buffer of the first copy

    def none_is_free(self, layout, keep, deadline, check):
        while not deadline.expired:
            check()
            time.sleep(0.01)

    with monkeypatch.context() as patch:
        patch.setattr(Staging, "begin", none_is_free)
        with pytest.raises(RuntimeError, match="out of memory"):
            sender.update_weights(source_that_fails_at_once(sender), version=3)
    assert sender._publisher._members.find("r").told[0].number == 2
    assert receiver.poll_and_apply(WAIT).version.number == 2
    assert value_of(target) == 2
    receiver.shutdown()
    sender.shutdown()


def test_a_receiver_does_not_wait_for_a_buffer_for_an_update_that_was_given_up():
    _, sender, receiver, target = pair()
    send(sender, 1)
    receiver.poll_and_apply(WAIT)
    version = send(sender, 2).version
    with receiver._subscriber.snapshot(version, Deadline(WAIT)):
        with pytest.raises(RuntimeError, match="out of memory"):
            sender.update_weights(source_that_fails_at_once(sender), version=3, timeout=600)
        with pytest.raises(ws.ReceiverError, match="buffers="):
            send(sender, 4, timeout=2)
    send(sender, 5)
    assert receiver.poll_and_apply(WAIT).version.number == 5
    assert value_of(target) == 5
    receiver.shutdown()
    sender.shutdown()


def test_two_updates_are_given_up_faster_than_a_receiver_looks(monkeypatch):
    """While it waits for a buffer for the first of them."""
    _, sender, receiver, target = pair()
    send(sender, 1)
    receiver.poll_and_apply(WAIT)
    begin, go_on = Staging.begin, threading.Event()

    def none_is_free(self, layout, keep, deadline, check):
        assert go_on.wait(WAIT)
        while not deadline.expired:
            check()
            time.sleep(0.01)

    monkeypatch.setattr(Staging, "begin", none_is_free)
    for number in (2, 3):
        with pytest.raises(RuntimeError, match="out of memory"):
            sender.update_weights(source_that_fails_at_once(sender), version=number, timeout=600)
    # Besides the first begin, which it is at: cancel, begin, cancel.
    eventually(lambda: receiver._subscriber._reader._orders.qsize() == 3)
    monkeypatch.setattr(Staging, "begin", begin)
    go_on.set()
    send(sender, 4, timeout=10)
    assert receiver.poll_and_apply(WAIT).version.number == 4
    assert value_of(target) == 4
    receiver.shutdown()
    sender.shutdown()


def test_a_sender_that_is_let_go_gives_its_port_back(scheme):
    sender = scheme.create_sender(constants(1))
    sender.connect()
    del sender
    gc.collect()
    with scheme.create_sender(constants(1)) as another:
        another.connect()


def test_a_receiver_that_found_no_sender_does_not_come_later(scheme):
    given_up = scheme.create_receiver(constants(0), id="r")
    with pytest.raises(ws.DeadlineError):
        given_up.connect(0.3)
    with scheme.create_sender(constants(1)) as sender:
        sender.connect()
        with scheme.create_receiver(constants(0), id="r") as receiver:
            receiver.connect(WAIT)
            sender.update_weights(version=1)
            assert receiver.poll_and_apply(WAIT).version.number == 1


def test_a_second_receiver_of_one_name_takes_nothing_from_the_first():
    scheme, sender, receiver, target = pair()
    second = scheme.create_receiver(constants(-2, **SHAPE), id="r")
    with pytest.raises(ws.WeightSyncError, match="another live receiver 'r'"):
        second.connect(WAIT)
    send(sender, 1)
    receiver.poll_and_apply(WAIT)
    assert value_of(target) == 1
    receiver.shutdown()
    sender.shutdown()


def test_receivers_that_died_between_updates_are_said_at_once(peer, scheme, sender):
    """H1: not at the deadline, when there is nobody left to wait for."""
    (victim,) = receivers(peer, scheme, "victim")
    send(sender, 1, wait="applied")
    victim.kill()
    eventually(lambda: all(r.state == "dead" for r in sender.receivers()))
    with pytest.raises(ws.ReceiverError, match=r"'victim'.*dead"):
        send(sender, 2, timeout=3600)
