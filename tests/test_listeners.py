"""Who subscribed hears of every update, however it came about, and can fail none."""

import asyncio
import contextlib
import threading

import pytest
import torch

import weightsync as ws
from tests.conftest import WAIT, newest_slot
from tests.fakes import fake, weights
from weightsync.stream_receiver import StreamReceiver
from weightsync.testing.faults import corrupt


class Heard(list):
    """A listener that keeps what it heard."""

    def __init__(self):
        super().__init__()
        self.came = threading.Condition()

    def __call__(self, outcome):
        with self.came:
            self.append(outcome)
            self.came.notify_all()

    def wait(self, count):
        with self.came:
            assert self.came.wait_for(lambda: len(self) >= count, WAIT)


@pytest.fixture
def heard():
    return Heard()


@pytest.fixture
def pair(ends, heard):
    """A sender and a receiver, both with the same listener."""
    options = {"listeners": [heard]}
    return ends.pair(weights(1), fake(), sender=options, receiver={"id": "r", **options})


def test_both_ends_tell_of_a_version_what_their_reports_say(pair, heard):
    sender, receiver = pair
    sent = sender.update_weights(version=3)
    applied = receiver.poll_and_apply()
    one, other = heard
    assert (one.side, one.receiver, one.report, one.error) == ("sender", "", sent, None)
    assert (other.side, other.receiver, other.report) == ("receiver", "r", applied)
    assert one.version == other.version == sent.version
    assert one.seconds == sent.seconds
    assert one.run == other.run == f"shm://{sender.scheme.path}"
    assert (one.scheme, one.end, other.end) == ("shm", sender, receiver)
    assert one.time <= other.time


def test_a_poll_that_finds_nothing_is_no_update(pair, heard):
    assert pair[1].poll_and_apply() is None
    assert heard == []


def test_whoever_is_subscribed_twice_hears_once_and_can_leave(pair, heard):
    sender, _ = pair
    sender.subscribe(heard)
    sender.update_weights(version=1)
    assert len(heard) == 1
    sender.unsubscribe(heard)
    sender.unsubscribe(heard)
    sender.update_weights(version=2)
    assert len(heard) == 1


def test_what_cannot_be_called_is_no_listener(ends):
    with pytest.raises(TypeError, match="a listener is called"):
        ends.scheme().create_sender(listeners=["wandb"])


@pytest.mark.parametrize(
    "apply",
    [
        lambda receiver: receiver.poll_and_apply(),
        lambda receiver: receiver.apply_weights(),
        lambda receiver: next(iter(receiver)),
        lambda receiver: asyncio.run(receiver.poll_and_apply_async()),
        lambda receiver: asyncio.run(receiver.apply_weights_async()),
        lambda receiver: asyncio.run(anext(aiter(receiver))),
    ],
)
def test_every_way_of_applying_is_heard_once(pair, heard, apply):
    sender, receiver = pair
    version = sender.update_weights(version=1).version
    apply(receiver)
    (outcome,) = [each for each in heard if each.side == "receiver"]
    assert (outcome.version, outcome.report.receivers[0].state) == (version, "applied")


def test_a_follower_tells_of_what_it_applies_and_of_what_it_cannot(ends, heard):
    engine = fake()
    sender, receiver = ends.pair(weights(1), engine, receiver={"listeners": [heard]})
    engine.fail["stage"] = RuntimeError("no room")
    receiver.follow()
    first = sender.update_weights(version=1).version
    heard.wait(2)
    assert [type(outcome.error) for outcome in heard] == [RuntimeError, type(None)]
    assert [outcome.version for outcome in heard] == [first, first]


def test_an_attached_receiver_tells_of_its_own(pair, heard):
    sender, receiver = pair
    sender.attach(receiver)
    sender.update_weights(version=1)
    assert [outcome.side for outcome in heard] == ["receiver", "sender"]
    assert heard[1].report.lag == 0


def test_several_engines_behind_one_receiver_are_one_update(ends, heard):
    engines = ws.Replicas({"a": fake(), "b": fake()})
    sender, receiver = ends.pair(weights(1), engines, receiver={"listeners": [heard]})
    sender.update_weights(version=1)
    receiver.poll_and_apply()
    (outcome,) = heard
    assert [engine.state for engine in outcome.report.receivers[0].engines] == ["applied"] * 2


def test_a_receiver_that_switches_tells_of_its_new_run(pair, heard, tmp_path):
    sender, receiver = pair
    sender.update_weights(version=9)
    receiver.poll_and_apply()
    elsewhere = ws.DiskScheme(str(tmp_path / "other"))
    with elsewhere.create_sender(weights(2)) as other:
        other.connect(WAIT)
        version = other.update_weights(version=1).version
        receiver.switch(elsewhere, WAIT)
        assert (heard[-1].version, heard[-1].scheme) == (version, "disk")
        assert heard[-1].run == f"disk://{elsewhere.path}"
        receiver.switch(sender.scheme, WAIT)


def test_an_update_that_fails_at_the_sender_is_heard_with_its_error(ends, heard):
    meta = {"a": torch.empty(2, device="meta")}
    sender = ends.sender(weights(1), listeners=[heard])
    with pytest.raises(ws.SourceError) as raised:
        sender.update_weights(meta, version=4)
    assert (heard[-1].error, heard[-1].report) == (raised.value, None)
    assert heard[-1].seconds.total > 0


def test_a_version_that_a_receiver_failed_at_is_heard_with_report_and_error(pair, heard):
    sender, receiver = pair
    receiver.engine.fail["stage"] = RuntimeError("no room")
    sender.attach(receiver)
    with pytest.raises(ws.ReceiverError) as raised:
        sender.update_weights(version=1)
    theirs, ours = heard
    assert (str(theirs.error), theirs.report, theirs.version) == ("no room", None, ours.version)
    assert (ours.error, ours.report) == (raised.value, raised.value.report)


def test_what_ends_a_wait_is_no_failed_update_unless_one_was_under_way(pair, heard, monkeypatch):
    _, receiver = pair

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(receiver._subscriber, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        receiver.poll_and_apply(WAIT)
    assert heard == []


def test_an_engine_that_is_interrupted_is_a_failed_update(pair, heard):
    sender, receiver = pair
    version = sender.update_weights(version=1).version
    receiver.engine.fail["load"] = SystemExit()
    with pytest.raises(SystemExit):
        receiver.poll_and_apply()
    assert (heard[-1].version, type(heard[-1].error)) == (version, SystemExit)


@pytest.mark.parametrize("error", [RuntimeError("the disk of the log is full"), ValueError()])
def test_a_listener_that_raises_fails_no_update_and_is_logged_once(pair, heard, error, caplog):
    sender, receiver = pair

    def broken(outcome):
        raise error

    sender.subscribe(broken)
    receiver.subscribe(broken)
    for step in (1, 2):
        sender.update_weights(version=step)
        receiver.poll_and_apply()
    assert len(heard) == 4
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert "broken" in caplog.messages[0]


def test_a_listener_may_change_who_listens(pair, heard):
    sender, _ = pair

    def once(outcome):
        sender.unsubscribe(once)
        sender.subscribe(later)

    later = Heard()
    sender.subscribe(once)
    sender.update_weights(version=1)
    sender.update_weights(version=2)
    assert (len(heard), len(later)) == (2, 1)


def test_a_listener_may_call_the_end_that_told_it(pair):
    """It is called when the update is over, by whoever made it."""
    sender, receiver = pair

    def follow_up(outcome):
        if outcome.version.number == 1:
            receiver.poll_and_apply()
            sender.update_weights(version=2)

    sender.subscribe(follow_up)
    sender.update_weights(version=1)
    assert sender.version.number == 2


async def _take(stream, most=None):
    count = 0
    async with contextlib.aclosing(stream):
        async for _ in stream:
            count += 1
            if count == most:
                break


def test_a_receiver_of_streams_tells_of_each(ends, heard):
    sender = ends.sender({"a": torch.ones(3), "b": torch.ones(2)})
    version = sender.update_weights(version=1).version
    with StreamReceiver(ends.scheme(), id="r", listeners=[heard]) as receiver:
        asyncio.run(_take(receiver.stream(WAIT)))
        (outcome,) = heard
        assert (outcome.side, outcome.receiver, outcome.version) == ("receiver", "r", version)
        assert (outcome.report.nbytes, outcome.report.tensors) == (20, 2)
        assert outcome.seconds.total == outcome.seconds.apply > 0
        assert (receiver.connected, receiver.version) == (True, version)

        asyncio.run(_take(receiver.stream(WAIT), most=1))
        assert (heard[1].report, heard[1].version, receiver.version) == (None, version, None)
        assert "not taken to its end" in str(heard[1].error)

        with pytest.raises(ws.DeadlineError):
            asyncio.run(_take(receiver.stream(0.0, sender.next_version)))
        assert isinstance(heard[2].error, ws.DeadlineError)
    assert not receiver.connected


def test_a_corrupt_stream_is_heard_of(ends, heard):
    sender = ends.sender({"a": torch.ones(3000)})
    version = sender.update_weights(version=1).version
    corrupt(newest_slot(ends.scheme()), 17)
    with StreamReceiver(ends.scheme(), listeners=[heard]) as receiver:
        with pytest.raises(ws.CorruptError):
            asyncio.run(_take(receiver.stream(WAIT)))
        assert [(each.version, type(each.error)) for each in heard] == [(version, ws.CorruptError)]


def test_one_for_the_whole_process_hears_of_ends_that_are_made_later(ends):
    heard, own = Heard(), Heard()
    ws.subscribe(heard)
    ws.subscribe(heard)
    try:
        sender, receiver = ends.pair(weights(1), fake(), receiver={"listeners": [own]})
        sender.update_weights(version=1)
        receiver.poll_and_apply()
        assert [outcome.side for outcome in heard] == ["sender", "receiver"]
        assert len(own) == 1
    finally:
        ws.unsubscribe(heard)
    sender.update_weights(version=2)
    assert len(heard) == 2


def test_one_for_the_whole_process_that_fails_fails_no_update(ends, caplog):
    def broken(outcome):
        raise RuntimeError("no network")

    ws.subscribe(broken)
    try:
        sender, _ = ends.pair(weights(1), fake())
        for number in (1, 2):
            assert sender.update_weights(version=number).version.number == number
    finally:
        ws.unsubscribe(broken)
    assert caplog.text.count("which is said once") == 1
