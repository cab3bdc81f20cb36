"""What is known of an ``LLM``'s sleep without asking it."""

import pytest

from weightsync.deadline import Deadline
from weightsync.engines.vllm.llm import LLMClient
from weightsync.engines.vllm.pause import Pause
from weightsync.engines.vllm.sleeping import sleeps

WAIT = 10.0


class Core:
    """vLLM's client of its engine core."""

    def __init__(self):
        self.asleep, self.asked = False, 0

    def sleep(self, level=1, mode="abort"):
        self.asleep = True

    def is_sleeping(self):
        self.asked += 1
        return self.asleep

    def wake_up(self, tags=None):
        self.asleep = False


class LLM:
    def __init__(self):
        self.engine_core = Core()
        self.llm_engine = self
        self.is_sleeping = self.engine_core.is_sleeping
        self.wake_up = self.engine_core.wake_up

    def sleep(self, level=1, mode="abort"):
        self.engine_core.sleep(level, mode)


@pytest.fixture
def llm():
    return LLM()


def pause_once(llm, client):
    pause = Pause(client, "keep")
    pause.begin(Deadline(WAIT))
    stopped = llm.engine_core.asleep
    pause.end()
    return stopped


def test_sleeps_are_counted_and_deep_ones_apart(llm):
    sleeps(llm.engine_core)
    for level in (0, 1, 2, 2):
        llm.sleep(level)
    assert (sleeps(llm.engine_core).all, sleeps(llm.engine_core).deep) == (4, 2)


def test_an_llm_that_only_its_driver_pauses_is_asked_once(llm):
    client = LLMClient(llm)
    for _ in range(5):
        assert pause_once(llm, client)
        assert not llm.engine_core.asleep
    assert llm.engine_core.asked == 1


@pytest.mark.parametrize("level", [0, 1, 2])
def test_one_that_its_user_put_to_sleep_meanwhile_is_left_asleep(llm, level):
    client = LLMClient(llm)
    pause_once(llm, client)
    llm.sleep(level)
    pause_once(llm, client)
    assert llm.engine_core.asleep
    llm.wake_up()
    assert pause_once(llm, client)
    assert not llm.engine_core.asleep


def test_two_drivers_of_one_engine_know_what_the_other_did(llm):
    client, other = LLMClient(llm), LLMClient(llm)
    pause_once(llm, client)
    pause_once(llm, other)
    assert pause_once(llm, client)
    assert not llm.engine_core.asleep
    assert llm.engine_core.asked == 1


def test_one_that_a_driver_of_this_process_left_paused_is_resumed_by_the_next(llm, monkeypatch):
    monkeypatch.setattr("weightsync.engines.vllm.pause.GRACE", 0.05)
    first = Pause(LLMClient(llm), "keep")
    first.begin(Deadline(WAIT))
    awake, llm.wake_up = llm.wake_up, lambda tags=None: 1 / 0
    with pytest.raises(ZeroDivisionError):
        first.end()
    llm.wake_up = awake
    assert llm.engine_core.asleep
    pause_once(llm, LLMClient(llm))
    assert not llm.engine_core.asleep


@pytest.mark.parametrize("level", [0, 1])
def test_one_that_its_user_put_to_sleep_in_the_middle_of_an_update_is_left_asleep(llm, level):
    client = LLMClient(llm)
    pause_once(llm, client)
    pause = Pause(client, "keep")
    pause.begin(Deadline(WAIT))
    llm.sleep(level)
    pause.end()
    assert llm.engine_core.asleep
    pause_once(llm, client)  # and by the next update as well
    assert llm.engine_core.asleep
    llm.wake_up()
    assert pause_once(llm, client)
    assert not llm.engine_core.asleep


def test_one_that_its_user_paused_between_the_look_and_our_pause_is_left_so(llm):
    client = LLMClient(llm)
    look = client.is_paused

    def looked(deadline):
        found = look(deadline)
        llm.sleep(0)
        return found

    client.is_paused = looked
    pause_once(llm, client)
    assert llm.engine_core.asleep


def test_pauses_of_the_scheduler_count_and_are_no_sleep():
    class Async:
        def pause_scheduler_async(self, mode="keep", clear_cache=True):
            return mode

    core = Async()
    sleeps(core)
    assert core.pause_scheduler_async(mode="wait") == "wait"
    assert (sleeps(core).all, sleeps(core).deep) == (1, 0)
