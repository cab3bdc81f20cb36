"""A scheme chosen for a vLLM engine: its workers are asked, which are processes of their own."""

import os

import pytest

import weightsync as ws
from tests.conftest import WAIT
from tests.vllm.conftest import expected, greedy, llama_config, make_model
from weightsync.deadline import Deadline
from weightsync.placement.ends import end_of, look_at

pytestmark = pytest.mark.vllm


def test_the_workers_of_an_engine_share_memory_with_the_trainer_and_take_its_weights(llama):
    (end,) = look_at([end_of(llama)], Deadline(WAIT))
    receiver, worker = end.places
    assert receiver.pid == os.getpid() != worker.pid
    assert worker.is_with(receiver)
    model = make_model(llama_config(), seed=1)
    choice = ws.choose(model, llama)
    assert isinstance(choice.scheme, ws.DoubleBufferScheme)
    assert "LLM read it" in choice.why
    with choice.scheme.create_sender(model) as sender:
        sender.connect()
        with choice.schemes[0].create_receiver(llama) as receiver:
            receiver.connect()
            sender.update_weights(version=1)
            receiver.poll_and_apply(timeout=WAIT)
    assert greedy(llama) == expected(model)
