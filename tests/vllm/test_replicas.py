"""Two real engines behind one receiver, of which one is killed: the other one goes on."""

import os
import random
import signal
import threading
import time

import pytest

import weightsync as ws
from tests.conftest import WAIT
from tests.vllm.conftest import expected, greedy, llama_config, make_llm, make_model, stop
from weightsync.deadline import Deadline
from weightsync.testing.faults import kill

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    llama_config(num_hidden_layers=1).save_pretrained(folder)
    return folder


def model(seed):
    return make_model(llama_config(num_hidden_layers=1), seed)


def process_of(llm):
    """The engine process, which is not the driver's."""
    (process,) = llm.llm_engine.engine_core.resources.engine_manager.processes
    return process.pid


def test_an_engine_that_is_killed_at_any_time_is_named_and_replaced(folder, path):
    llms = {"a": make_llm(folder), "b": make_llm(folder)}
    scheme = ws.DoubleBufferScheme(path, slots=3)
    chance = random.Random(0)
    try:
        with scheme.create_sender(timeout=120) as sender:
            sender.connect()
            receiver = scheme.create_receiver(ws.Replicas(llms), apply_timeout=60.0)
            with receiver:
                receiver.connect(WAIT)
                sender.attach(receiver)
                for number in range(1, 3):
                    sent = model(number)
                    sender.update_weights(sent, version=number)
                    for llm in llms.values():
                        assert greedy(llm) == expected(sent)
                for round in range(2):
                    number = 10 * (round + 1)
                    sent = model(number)
                    began = time.monotonic()
                    killer = delayed_kill(process_of(llms["a"]), chance.random() * 0.3)
                    words = told_by(sender, sent, number)
                    killer.join()
                    assert "engine 'b'" not in words
                    assert time.monotonic() - began < 60
                    assert greedy(llms["b"]) == expected(sent)
                    sent = model(number + 1)
                    # If it was killed just after the update, it is named now.
                    words += told_by(sender, sent, number + 1)
                    assert "engine 'a': EngineDiedError" in words
                    report = sender.update_weights(sent, version=number + 2)
                    told = {e.engine: e.state for e in report.receivers[0].engines}
                    assert told == {"a": "dead", "b": "applied"}
                    assert greedy(llms["b"]) == expected(sent)
                    with pytest.raises(ws.EngineUnusableError, match="dead"):
                        receiver.guard("a").generate([])
                    llms["a"] = make_llm(folder)
                    receiver.rebind(ws.Replicas(llms))
                    sent = model(number + 3)
                    sender.update_weights(sent, version=number + 3)
                    for llm in llms.values():
                        assert greedy(llm) == expected(sent)
    finally:
        for llm in llms.values():
            stop(llm)


def told_by(sender, sent, number):
    """What the sender is told of an update that may fail."""
    try:
        sender.update_weights(sent, version=number)
    except ws.ReceiverError as error:
        return str(error)
    return ""


def delayed_kill(pid, seconds):
    def end():
        time.sleep(seconds)
        kill(pid)

    thread = threading.Thread(target=end)
    thread.start()
    return thread


def test_an_engine_that_stands_still_costs_the_deadline_and_goes_on_later(folder, path):
    llms = {"a": make_llm(folder), "b": make_llm(folder)}
    scheme = ws.DoubleBufferScheme(path, slots=3)
    try:
        with scheme.create_sender(timeout=120) as sender:
            sender.connect()
            receiver = scheme.create_receiver(ws.Replicas(llms), apply_timeout=8.0)
            with receiver:
                receiver.connect(WAIT)
                sender.attach(receiver)
                sender.update_weights(model(1), version=1)
                os.kill(process_of(llms["a"]), signal.SIGSTOP)
                second = model(2)
                began = time.monotonic()
                with pytest.raises(ws.ReceiverError, match="engine 'a'") as caught:
                    sender.update_weights(second, version=2, timeout=8.0)
                assert time.monotonic() - began < 60
                assert "engine 'b'" not in str(caught.value)
                assert greedy(llms["b"]) == expected(second)
                os.kill(process_of(llms["a"]), signal.SIGCONT)
                third = model(3)
                again = Deadline(90)
                numbers = iter(range(3, 100))
                while told_by(sender, third, next(numbers)):
                    assert not again.expired
                    time.sleep(2)
                for llm in llms.values():
                    assert greedy(llm) == expected(third)
    finally:
        for llm in llms.values():
            os.kill(process_of(llm), signal.SIGCONT)
            stop(llm)
