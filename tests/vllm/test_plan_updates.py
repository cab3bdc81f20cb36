"""Updates by copy plan into a real vLLM ``LLM`` on the CPU.

Its linear layers are repacked there, so they go by vLLM's reload, and the others by plan, in one
session; some tests switch the repacking off, so that nothing needs the reload.
"""

import os

import pytest
import torch

import weightsync as ws
from tests.vllm.conftest import PROMPTS, expected, greedy, llama_config, make_llm, make_model, stop

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(params=[False, True], ids=["", "staged"])
def ends(llama, path, request):
    """A sender, and a receiver on the shared engine."""
    scheme = ws.DoubleBufferScheme(path)
    receiver = scheme.create_receiver(llama, apply="plan", stage=request.param)
    with scheme.create_sender() as sender, receiver:
        sender.connect()
        receiver.connect()
        yield sender, receiver


def test_layers_that_vllm_repacks_are_reloaded_and_the_others_written_in_place(llama, ends):
    sender, receiver = ends
    for number in range(1, 5):
        model = make_model(llama_config(), seed=number)
        sender.update_weights(model, version=number)
        (note,) = receiver.poll_and_apply().notes
        assert "copies by plan" in note
        assert "hides its weights" in note
        assert greedy(llama) == expected(model)
        assert receiver.verify_weights().ok
