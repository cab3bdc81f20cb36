"""Every way to drive a receiver, and what an update that fails leaves behind."""

import copy
import threading
import time

import pytest
import torch

import weightsync as ws
from tests.live.processes import (
    WAIT,
    PeerError,
    constants,
    end_receiver,
    end_sender,
    fill,
    follow,
    held,
    held_while_following,
    poll,
    publish,
    publish_until,
    receive_in,
    send_from,
    value_of,
)
from weightsync.engines.module import ModuleEngine


def test_polling(peer, run_dir):
    scheme = ws.DoubleBufferScheme(run_dir, slots=3)
    writer, reader = peer(), peer()
    writer.call(send_from, scheme)
    reader.call(receive_in, scheme, "reader")
    assert reader.call(poll, 0.0) is None
    for number in 1, 2, 5:
        writer.call(publish, number)
        assert reader.call(poll, 0.0) == (number, number)
        assert reader.call(poll, 0.0) is None
    writer.call(publish, 6)
    writer.call(publish, 7)
    assert reader.call(poll, 0.0) == (7, 7)  # the newest, not one after the other


def test_blocking(peer, run_dir):
    scheme = ws.DoubleBufferScheme(run_dir)
    writer, reader = peer(), peer()
    writer.call(send_from, scheme)
    reader.call(receive_in, scheme, "reader")
    began = time.monotonic()
    assert reader.call(poll, 0.3) is None
    assert 0.3 <= time.monotonic() - began < WAIT / 2
    reader.start(poll)
    assert not reader.answered(0.1)
    writer.call(publish, 1)
    assert reader.result() == (1, 1)


def iterate(state, count):
    seen = []
    for report in state.receiver:
        seen.append((report.version.number, value_of(state.weights)))
        if len(seen) == count:
            state.receiver.shutdown()
    return seen


def test_iterating(peer, run_dir):
    scheme = ws.DoubleBufferScheme(run_dir)
    writer, reader = peer(), peer()
    writer.call(send_from, scheme)
    reader.call(receive_in, scheme, "reader")
    reader.start(iterate, 4)
    for number in range(1, 5):
        writer.call(publish, number, wait="applied")
    assert reader.result() == [(number, number) for number in range(1, 5)]
    writer.call(publish, 5)  # nobody is there any more, and nobody is missed


def look_while_following(state, times):
    """What stands in the weights, and their label, each looked at twice inside ``hold``."""
    seen = []
    for _ in range(times):
        with state.receiver.hold() as version:
            before = value_of(state.weights)
            time.sleep(0.005)
            seen.append((version.number, before, value_of(state.weights)))
    return seen


def test_following_in_the_background(peer, run_dir):
    scheme = ws.DoubleBufferScheme(run_dir)
    writer, reader = peer(), peer()
    writer.call(send_from, scheme)
    writer.call(publish, 1)
    reader.call(receive_in, scheme, "reader")
    reader.call(follow)
    reader.call(held_while_following, 1)
    reader.start(look_while_following, 100)
    last, _ = writer.call(publish_until, 1.0, first=2)
    seen = reader.result()
    assert all(len(set(looks)) == 1 for looks in seen), seen
    assert len(set(seen)) > 3
    assert reader.call(held_while_following, last) == (last, last)
    reader.call(end_receiver)
    writer.call(publish, last + 1)
    assert reader.call(value_in) == last


def value_in(state):
    return value_of(state.weights)


def test_attached_in_one_process_beside_others(peer, run_dir):
    scheme = ws.DoubleBufferScheme(run_dir)
    writer, other = peer(), peer()
    writer.call(send_from, scheme)
    other.call(receive_in, scheme, "other")
    writer.call(attach, scheme)
    report = writer.call(publish, 1)
    assert report.receivers == {"mine": ("applied", 1)}
    assert writer.call(value_attached) == 1
    other.start(poll)
    assert other.result() == (1, 1)
    other.call(follow)
    report = writer.call(publish, 2, wait="applied")
    assert report.receivers == {"mine": ("applied", 2), "other": ("applied", 2)}
    report = writer.call(publish, 3, wait="applied", receivers=["other"])
    assert report.receivers == {"other": ("applied", 3)}
    assert writer.call(value_attached) == 2
    assert other.call(held) == (3, 3)


def attach(state, scheme):
    state.target = constants(-1)
    state.receiver = scheme.create_receiver(state.target, id="mine")
    state.sender.attach(state.receiver)


def value_attached(state):
    return value_of(state.target)


def serve_a_copy(state, scheme, rebind):
    """C4: the model is registered, and a copy of it is used."""
    state.model = torch.nn.Linear(4, 4, bias=False)
    state.receiver = scheme.create_receiver(state.model, id="reader")
    state.receiver.connect(WAIT)
    state.served = copy.deepcopy(state.model)
    bound = state.receiver.is_bound_to(state.served)
    if rebind:
        state.receiver.rebind(state.served)
    return bound, state.receiver.is_bound_to(state.served)


def apply_to_copy(state):
    state.receiver.apply_weights()
    return state.served.weight.unique().tolist(), state.receiver.verify_weights().ok


def send_linear(state, scheme, value):
    model = torch.nn.Linear(4, 4, bias=False)
    torch.nn.init.constant_(model.weight, value)
    state.sender = scheme.create_sender(model)
    state.sender.connect()
    state.sender.update_weights(version=1)


def test_rebinding_to_a_copy(peer, run_dir):
    """C4."""
    scheme = ws.DoubleBufferScheme(run_dir)
    writer, reader, careless = peer(), peer(), peer()
    writer.call(send_linear, scheme, 3.0)
    assert reader.call(serve_a_copy, scheme, True) == (False, True)
    assert reader.call(apply_to_copy) == ([3.0], True)
    reader.call(end_receiver)
    # Without rebinding the library can tell that the copy is not what it updates.
    assert careless.call(serve_a_copy, scheme, False) == (False, False)
    served, _ = careless.call(apply_to_copy)
    assert served != [3.0]


def test_rebinding_after_updates(peer, run_dir):
    """The new object holds nothing until it was brought up to date."""
    scheme = ws.DoubleBufferScheme(run_dir)
    writer, reader = peer(), peer()
    writer.call(send_from, scheme)
    reader.call(receive_in, scheme, "reader")
    writer.call(publish, 1)
    reader.call(poll)
    assert reader.call(rebind) == (None, -5)
    assert reader.call(poll, 0.0) == (1, 1)
    reader.call(follow)
    assert writer.call(publish, 2, wait="applied").receivers == {"reader": ("applied", 2)}


def rebind(state):
    state.weights = constants(-5)
    state.receiver.rebind(state.weights)
    return held(state)


class FailsOnce(ModuleEngine):
    """Overwrites half of the weights with the third version, and fails."""

    failed = 0
    times = 1

    def apply(self, update, deadline):
        super().apply(update, deadline)
        if update.version.number == 3 and self.failed < self.times:
            self.failed += 1
            next(iter(self.target.values())).fill_(-3)
            raise RuntimeError("the engine is out of memory")


class FailsAlways(FailsOnce):
    times = 1 << 30


@pytest.fixture
def failing(peer, run_dir):
    """A sender, a receiver that fails at update 3, and another one; both follow."""

    def make(engine):
        scheme = ws.DoubleBufferScheme(run_dir, slots=3)
        writer, reader, other = peer(), peer(), peer()
        writer.call(send_from, scheme)
        reader.call(receive_in, scheme, "reader", engine=engine)
        other.call(receive_in, scheme, "other")
        for one in reader, other:
            one.call(try_in_background)
        for number in 1, 2:
            report = writer.call(publish, number, wait="applied")
            assert report.receivers == {"reader": ("applied", number), "other": ("applied", number)}
        return writer, reader, other

    return make


def try_in_background(state):
    """Poll like a rollout loop that survives a failed update. Retried only when told to."""
    state.errors = []
    state.retry = threading.Event()
    state.retry.set()

    def loop():
        while state.receiver.connected:
            state.retry.wait()
            try:
                state.receiver.poll_and_apply(0.1)
            except Exception as error:
                state.errors.append(str(error))
                state.retry.clear()

    threading.Thread(target=loop, daemon=True).start()


def retry(state):
    state.retry.set()


def test_an_update_that_a_receiver_refuses(failing):
    """C1: 3 raises with the receiver's words, it still holds 2, and 4 brings everything."""
    writer, reader, other = failing(FailsAlways)
    with pytest.raises(PeerError, match="the engine is out of memory") as caught:
        writer.call(publish, 3, wait="applied")
    assert caught.value.kind == "ReceiverError"
    assert "'reader'" in caught.value.text
    assert "rolled back" in caught.value.text
    assert "'other'" not in caught.value.text
    assert reader.call(held) == (2, 2)
    assert other.call(held) == (3, 3)
    writer.start(publish, 4, wait="applied")
    while not writer.answered(0.05):
        reader.call(retry)
    report = writer.result()
    assert report.receivers == {"reader": ("applied", 4), "other": ("applied", 4)}
    assert reader.call(held) == (4, 4)
    assert reader.call(verified)
    writer.call(end_sender)


def verified(state):
    return state.receiver.verify_weights().ok


def test_the_same_update_again(failing):
    """C1: the same number once more is waited for anew."""
    writer, reader, _ = failing(FailsOnce)
    with pytest.raises(PeerError, match="out of memory"):
        writer.call(publish, 3, wait="applied")
    assert reader.call(held) == (2, 2)
    writer.start(publish, 3, wait="applied")
    assert not writer.answered(0.3)  # the old answer is not taken for the new one
    reader.call(retry)
    assert writer.result().receivers == {"reader": ("applied", 3), "other": ("applied", 3)}
    assert reader.call(held) == (3, 3)


def test_the_same_number_with_other_weights(peer, run_dir):
    scheme = ws.DoubleBufferScheme(run_dir)
    writer, reader = peer(), peer()
    writer.call(send_from, scheme)
    reader.call(receive_in, scheme, "reader")
    writer.call(publish, 1)
    with pytest.raises(PeerError, match="other weights"):
        writer.call(publish, 1, 2)
    with pytest.raises(PeerError, match="older"):
        writer.call(publish, 0)
    assert reader.call(poll) == (1, 1)


def test_waiting_with_nobody_there(peer, run_dir):
    """An update that was to be applied, and no receiver: said at the deadline."""
    writer = peer()
    writer.call(send_from, ws.DoubleBufferScheme(run_dir))
    with pytest.raises(PeerError, match="no receiver was connected"):
        writer.call(publish, 1, wait="applied", timeout=0.2)
    with pytest.raises(PeerError, match="never connected") as caught:
        writer.call(publish, 2, wait="applied", receivers=["nobody"], timeout=0.2)
    assert "'nobody'" in caught.value.text


def test_a_receiver_that_comes_late_is_served(peer, run_dir):
    scheme = ws.DoubleBufferScheme(run_dir)
    writer, reader = peer(), peer()
    writer.call(send_from, scheme)
    writer.start(publish, 1, wait="applied")
    reader.call(receive_in, scheme, "reader")
    reader.call(follow)
    assert writer.result().receivers == {"reader": ("applied", 1)}


def apply_and_leave(state, scheme, times):
    """A worker that ends right after its last update, a new one each time."""
    for _ in range(times):
        receive_in(state, scheme, "worker", nbytes=4096)
        assert poll(state) is not None
        state.receiver.shutdown()


def test_a_receiver_that_leaves_right_after_an_update(peer, run_dir):
    """It did what it was waited for: no error, and it is not missed later."""
    scheme = ws.DoubleBufferScheme(run_dir, slots=3)
    writer, stays, goes = peer(), peer(), peer()
    writer.call(send_from, scheme, nbytes=4096)
    stays.call(receive_in, scheme, "stays", nbytes=4096)
    stays.call(follow)
    goes.start(apply_and_leave, scheme, 40)
    number = 0
    while not goes.answered():
        number += 1
        report = writer.call(publish, number, wait="applied")
        assert report.receivers["stays"] == ("applied", number)
    goes.result()
    report = writer.call(publish, number + 1, wait="applied")
    assert report.receivers == {"stays": ("applied", number + 1)}


def test_a_signed_off_receiver_is_not_missed(peer, run_dir):
    scheme = ws.DoubleBufferScheme(run_dir)
    writer, goes, stays = peer(), peer(), peer()
    writer.call(send_from, scheme)
    for one, id in ((goes, "goes"), (stays, "stays")):
        one.call(receive_in, scheme, id)
        one.call(follow)
    writer.call(publish, 1, wait="applied")
    goes.call(end_receiver)
    assert writer.call(publish, 2, wait="applied").receivers == {"stays": ("applied", 2)}


def test_fill_is_what_it_says():
    """The tests' own measure sees a torn set."""
    weights = constants(1)
    assert value_of(weights) == 1
    fill(weights, 2)
    weights["layer2"][7] = 1
    assert value_of(weights) == "torn: [1, 2]"
