"""Several threads, one receiver or sender; interrupts; ends in the middle."""

import os
import threading
import time

import pytest
import torch
from torch import nn

import weightsync as ws
from weightsync import chunks
from weightsync.testing import FakeEngine


def test_shutdown_inside_hold_with_an_update_pending(ends):
    sender = ends.sender({"w": torch.ones(3)})
    receiver = ends.receiver({"w": torch.zeros(3)})
    receiver.follow()
    with receiver.hold():
        sender.update_weights(version=1)
        threading.Event().wait(0.4)  # the follower has seen it, and waits for the lock
        receiver.shutdown()
    assert not receiver.connected


def test_an_update_that_waits_for_hold_keeps_its_deadline(ends):
    sender = ends.sender({"w": torch.ones(3)})
    receiver = ends.receiver({"w": torch.zeros(3)})
    sender.attach(receiver)
    held, done = threading.Event(), threading.Event()

    def hold():
        with receiver.hold():
            held.set()
            done.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(20)
    began = time.monotonic()
    with pytest.raises(ws.ReceiverError):
        sender.update_weights(version=1, timeout=0.3)
    assert time.monotonic() - began < 10
    done.set()
    thread.join()


def test_two_pollers_never_take_the_engine_back(ends):
    """The slower one has seen version 1 when the faster one applies version 2."""
    sender = ends.sender(scheme=ends.scheme(slots=4))
    target = {"w": torch.zeros(1)}
    receiver = ends.receiver(target, scheme=ends.scheme(slots=4))
    sender.update_weights({"w": torch.ones(1)}, version=1)
    seen, go = threading.Event(), threading.Event()
    wait = receiver._subscriber.wait

    def slow(after, deadline):
        version = wait(after, deadline)
        if threading.current_thread() is thread:
            seen.set()
            go.wait(20)
        return version

    receiver._subscriber.wait = slow
    results = []
    thread = threading.Thread(target=lambda: results.append(receiver.poll_and_apply()))
    thread.start()
    seen.wait(20)
    sender.update_weights({"w": torch.full((1,), 2.0)}, version=2)
    assert receiver.poll_and_apply().version.number == 2
    go.set()
    thread.join()
    assert results == [None]
    assert target["w"].item() == 2
    assert receiver.version.number == 2


def test_an_update_from_within_an_update_is_an_error(ends):
    sender = ends.sender(scheme=ends.scheme(slots=3))

    def stream():
        sender.update_weights({"w": torch.zeros(1)}, version=1)
        yield "w", torch.ones(1)

    with pytest.raises(ws.WeightSyncError, match="within"):
        sender.update_weights(stream, version=2)


def test_updates_from_many_threads_are_made_one_after_the_other(ends):
    target = {"w": torch.zeros(1 << 18)}
    sender = ends.sender()
    receiver = ends.receiver(target)
    sender.attach(receiver)
    failures = []

    def update(number):
        try:
            sender.update_weights({"w": torch.full((1 << 18,), float(number))})
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=update, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures
    assert sender.version.number == 7
    assert target["w"].eq(target["w"][0]).all()
    assert receiver.verify_weights().ok


def test_connect_after_shutdown_follows_again(ends):
    sender = ends.sender({"w": torch.ones(1)})
    receiver = ends.receiver({"w": torch.zeros(1)})
    receiver.follow()
    receiver.shutdown()
    receiver.connect(timeout=5)
    receiver.follow()
    sender.update_weights(version=1, wait="applied", timeout=10)
    assert receiver.version.number == 1


def test_a_receiver_that_was_shut_down_while_it_waited_is_gone(ends):
    sender = ends.sender({"w": torch.ones(1)})
    receiver = ends.receiver({"w": torch.zeros(1)}, id="x")
    waiting = threading.Thread(target=lambda: receiver.poll_and_apply(timeout=1.0))
    waiting.start()
    receiver.shutdown()
    waiting.join()
    assert sender.receivers() == []
    ends.receiver({"w": torch.zeros(1)}, id="x")


def test_an_interrupt_stops_all_threads_of_a_copy_before_anything_else_happens():
    """Otherwise they would write into a slot, or an engine, that is somebody else's by then."""
    copier = chunks.Copier(4)
    main = threading.main_thread()
    at_work = set()

    def work(number):
        at_work.add(number)
        if threading.current_thread() is main:
            raise KeyboardInterrupt
        threading.Event().wait(0.1)
        at_work.discard(number)

    for _ in range(5):
        at_work.clear()
        with pytest.raises(KeyboardInterrupt):
            copier.each(100, work)
        others = set(at_work)
        assert len(others) <= 1  # the piece that was interrupted
        threading.Event().wait(0.15)
        assert at_work == others
    copier.close()


def test_a_copy_works_in_a_forked_child():
    copier = chunks.Copier(4)
    done = []
    copier.each(20, done.append)
    pid = os.fork()
    if pid == 0:
        seen = []
        copier.each(20, seen.append)
        os._exit(0 if sorted(seen) == list(range(20)) else 1)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        time.sleep(0.01)
    else:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        pytest.fail("the child hangs")
    assert status == 0
    assert sorted(done) == list(range(20))


def test_an_interrupted_rollback_leaves_the_engine_marked_unusable(ends):
    engine = FakeEngine({"w": (2,)})
    sender = ends.sender()
    receiver = ends.receiver(engine)
    sender.update_weights({"w": torch.ones(2)}, version=1)
    receiver.poll_and_apply()
    sender.update_weights({"w": torch.full((2,), 2.0)}, version=2)
    engine.fail["finish"] = RuntimeError("broken")
    starts = []

    def interrupt(name):
        starts.append(name)
        if len(starts) == 2:
            raise KeyboardInterrupt

    engine.during_load = interrupt
    with pytest.raises(KeyboardInterrupt):
        receiver.poll_and_apply()
    assert receiver.status().state == "unusable"
    assert not receiver.ready
    assert receiver.poll_and_apply().version.number == 2
    assert receiver.ready


def test_ctrl_c_waits_until_the_engine_is_whole(ends):
    import signal

    engine = FakeEngine({"w": (2,)})
    sender = ends.sender({"w": torch.ones(2)})
    receiver = ends.receiver(engine)
    sender.update_weights(version=1)
    engine.during_load = lambda name: signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        receiver.poll_and_apply()
    assert receiver.version.number == 1
    assert receiver.status().state == "applied"
    assert receiver.verify_weights().ok
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_module_whose_state_dict_gives_copies_is_refused_by_name(ends):
    class Copying(nn.Linear):
        def _save_to_state_dict(self, state, prefix, keep_vars):
            super()._save_to_state_dict(state, prefix, keep_vars)
            state.update({name: tensor.detach().clone() for name, tensor in state.items()})

    module = Copying(2, 2)
    sender = ends.sender({"weight": torch.ones(2, 2), "bias": torch.ones(2)})
    receiver = ends.receiver(module)
    sender.update_weights(version=1)
    with pytest.raises(ws.EngineError, match=r"copy of '(weight|bias)'"):
        receiver.poll_and_apply()


def test_a_callback_that_fails_is_not_taken_for_a_failed_update(ends):
    sender = ends.sender({"w": torch.ones(1)})
    receiver = ends.receiver({"w": torch.zeros(1)})
    seen = []
    receiver.follow(on_update=lambda report: 1 / 0, on_error=seen.append)
    for number in (1, 2, 3):
        sender.update_weights(version=number, wait="applied", timeout=10)
    assert receiver.version.number == 3
    assert not seen
