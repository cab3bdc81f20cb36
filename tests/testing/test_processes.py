"""Other processes run what they are told to, and never outlive the test."""

import os
import signal

import pytest

from weightsync.testing.processes import Peer, PeerError, eventually

pytestmark = pytest.mark.live


@pytest.fixture
def peer():
    made = Peer()
    yield made
    made.dispose()


def count(state, step):
    state.count = getattr(state, "count", 0) + step
    return os.getpid(), state.count


def fail(state):
    raise LookupError("no such thing")


def hang(state):
    signal.pause()


def test_the_state_stays(peer):
    assert peer.call(count, 2) == (peer.pid, 2)
    assert peer.call(count, 3) == (peer.pid, 5)


def test_errors_come_back(peer):
    with pytest.raises(PeerError, match="no such thing") as caught:
        peer.call(fail)
    assert caught.value.kind == "LookupError"
    assert peer.call(count, 1)[1] == 1


def test_no_answer_is_a_failure(peer):
    peer.start(hang)
    with pytest.raises(AssertionError, match=f"pid {peer.pid} did not answer"):
        peer.result(0.1)


def test_they_end_in_every_way():
    peers = [Peer() for _ in range(3)]
    peers[0].kill()
    peers[1].end()
    peers[2].start(hang)
    for one in peers:
        one.dispose()
        assert not one.process.is_alive()


def test_the_condition_does_not_come_true():
    with pytest.raises(AssertionError, match="did not come true"):
        eventually(lambda: None, timeout=0.01)
