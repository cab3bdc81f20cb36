"""Updates by copy plan into a real vLLM ``LLM`` on the CPU.

Its linear layers are repacked there, so they go by vLLM's reload, and the others by plan, in one
session. Models of which nothing needs the reload: ``test_copy_plan.py``, and on a GPU.
"""

import re

import pytest

import weightsync as ws
from tests.conftest import newest_slot
from tests.docs import run
from tests.vllm.conftest import expected, greedy, llama_config, make_llm, make_model, stop
from weightsync.testing.faults import corrupt

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
        (note, *staged) = receiver.poll_and_apply().notes
        assert "copies by plan" in note
        assert "hides its weights" in note
        if number == 1 and staged:
            (words,) = staged
            assert words == "not staged: the memory for it was made only now; the next version is"
        assert greedy(llama) == expected(model)
        assert receiver.verify_weights().ok
    print(note, staged)
    assert all(re.fullmatch(r"staged: \d+\.\d\d kB kept ready", words) for words in staged)


def test_auto_says_why_it_chose_the_reload(llama, path):
    """The share that a plan would have, and the reasons of what it would not cover."""
    model = make_model(llama_config(), seed=2)
    scheme = ws.DoubleBufferScheme(path)
    with (
        scheme.create_sender(model) as sender,
        scheme.create_receiver(llama, stage=True) as receiver,
    ):
        sender.connect()
        receiver.connect()
        sender.update_weights(version=1)
        why, staged = receiver.poll_and_apply().notes
        assert "by vLLM's reload: a plan would cover" in why
        assert "model.layers.0.self_attn.qkv_proj" in why
        assert "its kernel hides its weights" in why
        assert staged == "not staged: no layer is planned"


def test_staged_as_documented(llama, path):
    model = make_model(llama_config(), seed=3)
    with ws.DoubleBufferScheme(path).create_sender(model) as sender:
        sender.connect()
        sender.update_weights(version=1)
        names = run("docs/gpu.md", "staged", path, llm=llama)
        with names["receiver"]:
            assert names["report"].version.number == 1
            assert greedy(llama) == expected(model)


def test_an_option_that_there_is_not_is_refused(llama, path):
    scheme = ws.DoubleBufferScheme(path)
    with pytest.raises(ws.EngineError, match="'auto', 'plan' or 'reload'"):
        scheme.create_receiver(llama, apply="fast")
    with pytest.raises(ws.EngineError, match="needs a plan"):
        scheme.create_receiver(llama, apply="reload", stage=True)


def test_a_version_that_fails_half_way_is_undone(llama, ends):
    """The slot's bytes are changed after they were sent: refused, and the former version stays."""
    sender, receiver = ends
    first, second = make_model(llama_config(), seed=1), make_model(llama_config(), seed=2)
    for number, model in enumerate((first, second, first), start=1):
        sender.update_weights(model, version=number)
        receiver.poll_and_apply()
    tokens = greedy(llama)
    sender.update_weights(second, version=4)
    corrupt(newest_slot(sender.scheme), 5000)
    refused = ""
    try:
        receiver.poll_and_apply()
    except ws.WeightSyncError as error:
        refused = str(error)
    if refused:
        assert "digest" in refused
        assert greedy(llama) == tokens == expected(first)
        assert receiver.version.number == 3
    else:  # what was read ahead of the damage is right
        assert greedy(llama) == expected(second)
    sender.update_weights(second, version=5)
    receiver.poll_and_apply()
    assert greedy(llama) == expected(second)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [False, True], ids=["", "staged"])
def test_each_rank_writes_and_keeps_its_part_alone(path, tmp_path, stage):
    """TP=2, with layers that are not repacked: rows and columns of each tensor, by plan."""
    config = llama_config()
    config.save_pretrained(tmp_path)
    llm = make_llm(
        tmp_path, tensor_parallel_size=2, worker_extension_cls="tests.vllm.plain_worker.Plain"
    )
    try:
        scheme = ws.DoubleBufferScheme(path)
        receiver = scheme.create_receiver(llm, apply="plan", stage=stage)
        with scheme.create_sender() as sender, receiver:
            sender.connect()
            receiver.connect()
            for number in range(1, 6):
                model = make_model(config, number)
                sender.update_weights(model, version=number)
                notes = receiver.poll_and_apply().notes
                assert greedy(llm) == expected(model)
                assert receiver.verify_weights().ok
            assert not any("reload" in note for note in notes), notes
            assert any("copies by plan" in note for note in notes)
    finally:
        stop(llm)
