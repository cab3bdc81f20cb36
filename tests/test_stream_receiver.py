"""Versions handed out as streams, for a framework that loads weights itself."""

import asyncio

import pytest
import torch

import weightsync as ws
from tests.conftest import WAIT, assert_all_same, looking, newest_slot
from weightsync.stream_receiver import StreamReceiver
from weightsync.testing.faults import corrupt
from weightsync.version import Version


def weights(value):
    return {"a": torch.full((3, 4), float(value)), "b": torch.arange(value, value + 5)}


async def taken(stream):
    return {name: tensor.clone() async for name, tensor in stream}


@pytest.fixture
def sender(ends):
    return ends.sender(weights(0))


@pytest.fixture
def receiver(ends):
    with StreamReceiver(ends.scheme(), id="r") as receiver:
        yield receiver


def test_a_stream_is_the_newest_version_and_the_sender_hears_of_it(sender, receiver):
    receiver.connect(WAIT)
    sender.wait_connected(["r"], WAIT)
    for step in (1, 2):
        version = sender.update_weights(weights(step), version=step).version
        assert_all_same(asyncio.run(taken(receiver.stream(WAIT))), weights(step))
        (report,) = sender.wait_applied(["r"], WAIT)
        assert (report.state, report.version) == ("applied", version)
    assert receiver.version == version


def test_a_stream_waits_for_the_version_asked_for(sender, receiver):
    sender.update_weights(weights(1), version=1)
    wanted = sender.next_version

    async def both():
        begun = looking(receiver)
        stream = asyncio.create_task(taken(receiver.stream(WAIT, wanted)))
        assert await asyncio.to_thread(begun.wait, WAIT)
        assert not stream.done()
        sender.update_weights(weights(2))
        return await stream

    assert wanted.number == 2
    assert_all_same(asyncio.run(both()), weights(2))


def test_a_former_senders_version_is_not_taken_for_the_one_asked_for(ends, receiver, tmp_path):
    """C8. It resumes from an earlier step, beside the versions that its former life has left."""
    scheme = ws.DiskScheme(str(tmp_path / "run"))
    with scheme.create_sender(weights(7)) as former:
        former.connect(WAIT)
        former.update_weights(version=7)
    with scheme.create_sender(weights(3)) as sender, StreamReceiver(scheme) as receiver:
        sender.connect(WAIT)

        async def both():
            begun = looking(receiver)
            stream = asyncio.create_task(taken(receiver.stream(WAIT, sender.next_version)))
            assert await asyncio.to_thread(begun.wait, WAIT)
            sender.update_weights(version=3)
            return await stream

        assert_all_same(asyncio.run(both()), weights(3))


def test_a_version_that_does_not_come_is_an_error_at_the_deadline(sender, receiver):
    """H1."""
    with pytest.raises(
        ws.DeadlineError, match=r"receiver 'r': no version as new as .* within 0\.3"
    ):
        asyncio.run(taken(receiver.stream(0.3, sender.next_version)))


def test_a_stream_that_is_not_taken_to_its_end_is_told_to_the_sender(sender, receiver):
    """C1."""
    receiver.connect(WAIT)
    sender.update_weights(version=1)

    async def half():
        stream = receiver.stream(WAIT)
        await anext(stream)
        await stream.aclose()

    asyncio.run(half())
    with pytest.raises(
        ws.ReceiverError, match=r"version 1: receiver 'r' .*unusable.*not taken to its end.*was 'a'"
    ):
        sender.wait_applied(["r"], WAIT)
    assert receiver.version is None
    asyncio.run(taken(receiver.stream(WAIT)))
    assert [report.state for report in sender.wait_applied(["r"], WAIT)] == ["applied"]


def test_wrong_bytes_are_refused_before_the_first_tensor(ends, sender, receiver):
    sender.update_weights(version=1)
    corrupt(newest_slot(ends.scheme()), 1)

    async def first():
        return await anext(receiver.stream(WAIT))

    with pytest.raises(ws.CorruptError, match="'a'"):
        asyncio.run(first())


def test_a_version_is_kept_as_it_is_after_its_stream_ended_until_it_is_released(ends):
    """R1. A framework may send its last bucket when the stream is at its end."""
    sender = ends.sender(weights(0), scheme=ends.scheme(on_busy="skip"))
    with StreamReceiver(ends.scheme()) as receiver:
        sender.update_weights(version=1)

        async def kept():
            return {name: tensor async for name, tensor in receiver.stream(WAIT)}

        views = asyncio.run(kept())
        reports = [sender.update_weights(weights(n), version=n) for n in (2, 3)]
        assert [report.skipped for report in reports] == [False, True]
        assert_all_same(views, weights(0))
        receiver.release()
        assert not sender.update_weights(weights(4), version=4).skipped


def test_a_later_stream_ends_one_that_still_waits(sender, receiver):
    """One left over from an update that failed must not load the next update's weights too."""

    async def both():
        begun = looking(receiver)
        late = asyncio.create_task(taken(receiver.stream(WAIT, sender.next_version)))
        assert await asyncio.to_thread(begun.wait, WAIT)
        now = asyncio.create_task(taken(receiver.stream(WAIT, sender.next_version)))
        assert (await asyncio.wait({late}, timeout=WAIT))[0]
        sender.update_weights(version=1)
        return await asyncio.gather(late, now, return_exceptions=True)

    error, held = asyncio.run(both())
    assert isinstance(error, ws.WeightSyncError)
    assert "ended by a later call" in str(error)
    assert_all_same(held, weights(0))


def test_a_stream_that_was_left_over_does_not_hide_what_a_later_one_brought(sender, receiver):
    """It belongs to an update that failed, and its framework goes on with it only now."""
    receiver.connect(WAIT)
    sender.update_weights(version=1)

    async def both():
        left_over = receiver.stream(WAIT)
        await anext(left_over)
        held = await taken(receiver.stream(WAIT))
        with pytest.raises(ws.WeightSyncError, match=r"closed|ended by a later call"):
            await taken(left_over)
        return held

    assert_all_same(asyncio.run(both()), weights(0))
    assert receiver.version == sender.version
    assert [report.state for report in sender.wait_applied(["r"], WAIT)] == ["applied"]


def test_a_sender_names_those_that_do_not_join(sender):
    with pytest.raises(ws.DeadlineError, match=r"receivers \(x, y\); connected: none"):
        sender.wait_connected(["x", "y"], 0.1)


def test_a_sender_names_those_that_are_late(sender, receiver):
    """C1, H1."""
    receiver.connect(WAIT)
    sender.update_weights(version=1)
    with pytest.raises(ws.ReceiverError, match=r"receiver 'r' .*: waiting, holds no version: late"):
        sender.wait_applied(["r"], 0.2)


def test_what_needs_a_connection_says_so(ends):
    sender = ends.sender(weights(0), connect=False)
    assert not sender.connected
    for call in (lambda: sender.next_version, sender.wait_applied):
        with pytest.raises(ws.WeightSyncError, match="not connected"):
            call()
    sender.connect(WAIT)
    assert sender.connected
    with pytest.raises(ws.WeightSyncError, match="no version was published yet"):
        sender.wait_applied()
    assert sender.next_version == Version(sender.next_version.epoch, 0)
