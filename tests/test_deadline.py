import math
import threading
import time

import pytest

from weightsync.deadline import Deadline, call_with_deadline
from weightsync.errors import DeadlineError


@pytest.mark.parametrize("seconds", [-1, -1e-9, math.nan, -math.inf])
def test_refused(seconds):
    with pytest.raises(ValueError, match="timeout"):
        Deadline(seconds)


def test_remaining_is_never_negative():
    over = Deadline(0)
    assert over.expired
    assert over.remaining == 0
    assert not Deadline(100).expired
    assert 99 < Deadline(100).remaining <= 100
    assert Deadline(math.inf).remaining == math.inf


def test_of():
    deadline = Deadline(3)
    assert Deadline.of(deadline) is deadline
    assert Deadline.of(3).seconds == 3.0


def test_at_most_is_the_earlier_one():
    assert Deadline(100).at_most(1).remaining <= 1
    assert Deadline(1).at_most(100).remaining <= 1


def test_wait_looks_once_when_it_is_over():
    looks = []
    assert Deadline(0).wait(lambda: looks.append(1)) is None
    assert looks == [1]
    assert Deadline(0).wait(lambda: "there") == "there"


def test_wait_returns_what_came_false_values_too():
    answers = iter([None, None, 0])
    assert Deadline(10).wait(lambda: next(answers)) == 0


def test_wait_ends_at_the_deadline():
    began = time.monotonic()
    assert Deadline(0.05).wait(lambda: None) is None
    assert time.monotonic() - began >= 0.05


def test_wait_lets_errors_through():
    with pytest.raises(ZeroDivisionError):
        Deadline(10).wait(lambda: 1 // 0)


@pytest.mark.parametrize("seconds", [10, math.inf])
def test_call_returns_or_raises_what_the_call_does(seconds):
    assert call_with_deadline(lambda: 5, Deadline(seconds), "five") == 5
    assert call_with_deadline(lambda: None, Deadline(seconds), "nothing") is None
    with pytest.raises(ZeroDivisionError):
        call_with_deadline(lambda: 1 // 0, Deadline(seconds), "division")


def test_call_that_does_not_return():
    """Promise 5: a peer that never answers costs at most the deadline, and is named."""
    release = threading.Event()
    try:
        with pytest.raises(DeadlineError, match=r"the peer did not return within 0\.1 s"):
            call_with_deadline(release.wait, Deadline(0.1), "the peer")
    finally:
        release.set()
