"""Sleep on a real vLLM on a GPU: levels 1 and 2, woken whole and in parts, between updates."""

import importlib.util
import os

import pytest
import torch

import weightsync as ws

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm"),
]

PROMPTS = [[1, 2, 3, 4], [9, 8, 7], [42], [5] * 20]


def config():
    from tests.vllm.conftest import llama_config

    return llama_config(
        hidden_size=512, num_attention_heads=8, num_key_value_heads=4, torch_dtype="bfloat16"
    )


def model(seed):
    from tests.vllm.conftest import make_model

    return make_model(config(), seed).bfloat16()


def make_llm(folder, load_format="dummy", **options):
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    return LLM(
        str(folder),
        load_format=load_format,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=128,
        gpu_memory_utilization=0.15,
        weight_transfer_config=WeightTransferConfig(backend="weightsync"),
        **options,
    )


def stop(llm):
    llm.llm_engine.engine_core.shutdown()


def greedy(llm):
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=12, detokenize=False, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sleeper")
    config().save_pretrained(folder)
    llm = make_llm(folder, enable_sleep_mode=True)
    yield llm
    stop(llm)


@pytest.fixture
def scheme(tmp_path):
    return ws.DoubleBufferScheme(f"/dev/shm/weightsync-test-{os.getpid()}-{tmp_path.name}")


def ends(scheme, llm, **options):
    sender, receiver = scheme.create_sender(), scheme.create_receiver(llm, **options)
    sender.connect()
    sender.attach(receiver)
    return sender, receiver


def test_light_sleep_loses_nothing(llm, scheme):
    sender, receiver = ends(scheme, llm)
    with sender, receiver:
        sender.update_weights(model(1), version=1)
        tokens = greedy(llm)
        llm.sleep(level=1)
        llm.wake_up()
        assert receiver.ready
        assert receiver.poll_and_apply() is None
        assert receiver.verify_weights().ok
        assert greedy(llm) == tokens


def test_s1_after_deep_sleep_the_same_version_is_loaded_again(llm, scheme):
    sender, receiver = ends(scheme, llm)
    with sender, receiver:
        sender.update_weights(model(2), version=5)
        tokens = greedy(llm)
        llm.sleep(level=2)
        assert not receiver.ready
        with pytest.raises(ws.EngineUnusableError, match="sleep"):
            receiver.require_ready()
        llm.wake_up()
        assert not receiver.ready
        assert receiver.poll_and_apply().version.number == 5
        assert receiver.ready
        assert receiver.verify_weights().ok
        assert greedy(llm) == tokens
        assert receiver.poll_and_apply() is None


@pytest.mark.parametrize("level", [1, 2])
def test_an_update_wakes_the_weights_and_leaves_the_rest_to_the_user(llm, scheme, level):
    """wake(weights), load, flush; the user wakes the cache: memory for both was never needed."""
    sender, receiver = ends(scheme, llm)
    with sender, receiver:
        sender.update_weights(model(3), version=1)
        before = greedy(llm)
        llm.sleep(level=level)
        sender.update_weights(model(4), version=2)
        assert receiver.ready
        llm.wake_up(tags=["kv_cache"])
        tokens = greedy(llm)
        assert tokens != before
        assert receiver.verify_weights().ok
        sender.update_weights(model(3), version=3)
        assert greedy(llm) == before


def test_an_update_wakes_everything_where_that_is_wanted(llm, scheme):
    sender, receiver = ends(scheme, llm, wake="all")
    with sender, receiver:
        sender.update_weights(model(5), version=1)
        tokens = greedy(llm)
        llm.sleep(level=2)
        sender.update_weights(model(5), version=2)
        assert greedy(llm) == tokens


def test_an_update_that_fails_while_the_engine_sleeps_leaves_it_to_the_next(llm, scheme):
    sender, receiver = ends(scheme, llm)
    with sender, receiver:
        sender.update_weights(model(6), version=1)
        tokens = greedy(llm)
        llm.sleep(level=2)
        state = dict(model(7).state_dict())
        del state["model.norm.weight"]
        # Nothing can be looked at beforehand: found while loading, and rolled back.
        with pytest.raises(ws.ReceiverError, match="norm"):
            sender.update_weights(state, version=2)
        llm.wake_up(tags=["kv_cache"])
        assert receiver.version.number == 1
        assert greedy(llm) == tokens


def test_nothing_is_compared_while_the_weights_sleep(llm, scheme):
    sender, receiver = ends(scheme, llm)
    with sender, receiver:
        sender.update_weights(model(8), version=1)
        llm.sleep(level=1)
        with pytest.raises(ws.EngineError, match="asleep"):
            receiver.verify_weights()
        llm.wake_up()
        assert receiver.verify_weights().ok


def test_tokens_after_sleep_are_those_of_a_freshly_loaded_engine(llm, scheme, tmp_path):
    sender, receiver = ends(scheme, llm)
    with sender, receiver:
        sender.update_weights(model(9), version=1)
        llm.sleep(level=2)
        sender.update_weights(model(10), version=2)
        llm.wake_up(tags=["kv_cache"])
        tokens = greedy(llm)
    model(10).save_pretrained(tmp_path)
    fresh = make_llm(tmp_path, "safetensors")
    try:
        assert greedy(fresh) == tokens
    finally:
        stop(fresh)
