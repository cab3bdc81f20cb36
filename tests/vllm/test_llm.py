"""The double buffer into a real vLLM ``LLM`` on the CPU, one engine for all tests."""

import pytest
import torch

import weightsync as ws
from tests.vllm.conftest import (
    PROMPTS,
    expected,
    greedy,
    llama_config,
    make_llm,
    make_model,
    mixtral_config,
    stop,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture
def ends(llama, path):
    """An attached sender and receiver on the shared engine."""
    scheme = ws.DoubleBufferScheme(path)
    with scheme.create_sender() as sender, scheme.create_receiver(llama) as receiver:
        sender.connect()
        sender.attach(receiver)
        yield sender, receiver


def test_successive_versions_give_the_tokens_of_the_model_that_was_sent(llama, ends):
    sender, receiver = ends
    seen = set()
    for number in range(1, 4):
        model = make_model(llama_config(), seed=number)
        report = sender.update_weights(model, version=number, wait="applied")
        assert greedy(llama) == expected(model)
        assert llama.get_weight_version() == str(report.version) == str(receiver.version)
        seen.add(str(greedy(llama)))
    assert len(seen) == 3  # a test that would pass with weights that never arrive is none
    assert report.seconds.apply >= report.seconds.pause > 0


@pytest.mark.slow
def test_same_tokens_as_an_engine_loaded_from_the_saved_checkpoint(llama, ends, tmp_path):
    model = make_model(llama_config(), seed=11)
    ends[0].update_weights(model, version=1)
    tokens = greedy(llama)
    model.save_pretrained(tmp_path)
    fresh = make_llm(tmp_path, "safetensors", backend=None)
    try:
        assert greedy(fresh) == tokens
    finally:
        stop(fresh)


def test_k1_the_prefix_cache_holds_nothing_of_the_old_weights(llama, ends):
    sender, _ = ends
    long = [list(range(1, 65))]  # several whole cache blocks
    for number in (1, 2):
        model = make_model(llama_config(), seed=20 + number)
        sender.update_weights(model, version=number)
        assert greedy(llama, long) == expected(model, long)


def test_a_request_in_flight_is_kept_and_continues_with_the_new_weights(llama, ends):
    """F1 on vLLM: started before an update, ended after it, labelled with both versions."""
    from vllm import SamplingParams

    sender, _ = ends
    first, second = make_model(llama_config(), 31), make_model(llama_config(), 32)
    one = sender.update_weights(first, version=1)
    parameters = SamplingParams(temperature=0, max_tokens=40, detokenize=False, ignore_eos=True)
    engine = llama.llm_engine
    engine.add_request("in-flight", {"prompt_token_ids": PROMPTS[0]}, parameters)
    while not any(out.outputs[0].token_ids for out in engine.step()):
        pass
    two = sender.update_weights(second, version=2)
    done = []
    while engine.has_unfinished_requests():
        done += [out for out in engine.step() if out.finished]
    (output,) = done
    tokens = list(output.outputs[0].token_ids)
    assert len(tokens) == 40
    if not hasattr(output.outputs[0], "weight_versions"):
        pytest.skip("this release says nothing of versions in an answer (before 0.32)")
    spans = output.outputs[0].weight_versions
    assert [span.version for span in spans] == [str(one.version), str(two.version)]
    # Everything from the switch on is what the new weights say after that text.
    switch = spans[1].start
    assert 0 < switch < 40
    prefix = PROMPTS[0] + tokens[:switch]
    assert expected(second, [prefix], 40 - switch) == [tokens[switch:]]
    assert expected(first, [PROMPTS[0]], switch) == [tokens[:switch]]


def broken(model, change):
    state = dict(model.state_dict())
    change(state)
    return state


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("model.layers.0.self_attn.q_proj.weight"), r"qkv_proj lacks weight\[q\]"),
        (lambda s: s.pop("model.layers.1.mlp.up_proj.weight"), r"gate_up_proj lacks weight\[1\]"),
        (lambda s: s.pop("model.norm.weight"), "model.norm lacks weight"),
        (lambda s: s.pop("model.embed_tokens.weight"), "embed_tokens lacks weight"),
        (lambda s: s.update({"bogus.weight": torch.zeros(3)}), "bogus"),
        (
            lambda s: s.update({"model.layers.1.mlp.down_proj.weight": torch.zeros(128, 200)}),
            r"model.layers.1.mlp.down_proj.weight' \(float32\[128, 200\]\)",
        ),
    ],
    ids=["q of qkv", "up of gate_up", "norm", "embedding", "unknown name", "wrong shape"],
)
def test_an_update_that_does_not_fit_is_refused_untouched(llama, ends, change, words):
    sender, receiver = ends
    model = make_model(llama_config(), seed=41)
    good = sender.update_weights(model, version=1)
    tokens = greedy(llama)
    assert tokens == expected(model)
    other = make_model(llama_config(), seed=42)
    with pytest.raises(ws.ReceiverError, match=words):
        sender.update_weights(broken(other, change), version=2)
    assert greedy(llama) == tokens
    assert receiver.status().state == "applied"
    assert llama.get_weight_version() == str(good.version)
    sender.update_weights(other, version=3)
    assert greedy(llama) == expected(other)


@pytest.mark.slow
def test_a_first_update_that_does_not_fit_costs_the_engine_nothing(path, tmp_path):
    config = llama_config(num_hidden_layers=1)
    model = make_model(config, seed=50)
    model.save_pretrained(tmp_path)
    llm = make_llm(tmp_path, "safetensors")  # as a server starts: with weights of its own
    try:
        scheme = ws.DoubleBufferScheme(path)
        with scheme.create_sender() as sender, scheme.create_receiver(llm) as receiver:
            sender.connect()
            sender.attach(receiver)
            other = llama_config(num_hidden_layers=1, hidden_size=256)
            with pytest.raises(ws.ReceiverError, match=r"embed_tokens.weight' \(float32\[100, 256"):
                sender.update_weights(make_model(other, seed=51), version=1)
            assert receiver.status().state == "connected"
            assert greedy(llm) == expected(model)
            right = make_model(config, seed=52)
            sender.update_weights(right, version=2)
            assert greedy(llm) == expected(right)
            receiver.require_ready()
    finally:
        stop(llm)


def test_a_first_update_that_fails_while_loading_leaves_the_engine_unusable(
    llama, ends, monkeypatch
):
    sender, receiver = ends
    bounded = receiver.engine.client.bounded

    def late(function, deadline, what):
        result = bounded(function, deadline, what)
        if what == "load":
            raise ws.DeadlineError(f"{what} did not return in time")
        return result

    with monkeypatch.context() as patch:
        patch.setattr(receiver.engine.client, "bounded", late)
        with pytest.raises(ws.ReceiverError, match="in time"):
            sender.update_weights(make_model(llama_config(), seed=53), version=1)
    assert receiver.status().state == "unusable"
    assert llama.get_weight_version() == "unusable"
    greedy(llama)  # whatever it says, it lives
    model = make_model(llama_config(), seed=54)
    sender.update_weights(model, version=2)
    assert greedy(llama) == expected(model)
    receiver.require_ready()


def test_corrupt_bytes_never_reach_the_engine(llama, ends, path):
    sender, receiver = ends
    model = make_model(llama_config(), seed=61)
    sender.update_weights(model, version=1)
    tokens = greedy(llama)
    sender.detach(receiver)
    sender.update_weights(make_model(llama_config(), seed=62), version=2)
    head = receiver.scheme.inspect()
    slot = next(s for s in head.slots if s.version == head.version)
    with open(f"{path}/{slot.generation}/slot{slot.slot}.bin", "r+b") as file:
        file.seek(5000)
        byte = file.read(1)
        file.seek(5000)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(ws.EngineError, match="do not match their digests"):
        receiver.poll_and_apply()
    assert greedy(llama) == tokens
    assert receiver.version.number == 1


@pytest.mark.slow
def test_tied_weights_are_sent_once(path, tmp_path):
    config = llama_config(tie_word_embeddings=True, num_hidden_layers=1)
    config.save_pretrained(tmp_path)
    llm = make_llm(tmp_path)
    try:
        scheme = ws.DoubleBufferScheme(path)
        with scheme.create_sender() as sender, scheme.create_receiver(llm) as receiver:
            sender.connect()
            sender.attach(receiver)
            for number in (1, 2):
                model = make_model(config, number)
                report = sender.update_weights(model, version=number)
                assert report.tensors == len(list(model.named_parameters()))
                assert greedy(llm) == expected(model)
    finally:
        stop(llm)


def test_without_the_backend_the_error_says_which_argument_to_pass(path):
    """An object with the surface of an LLM that was made without our backend."""
    from types import SimpleNamespace

    from weightsync.engines.vllm import make

    for config, words in [
        (None, "made with no weight_transfer_config"),
        (SimpleNamespace(backend="nccl"), "backend='nccl'"),
    ]:
        parallel = SimpleNamespace(world_size=1, data_parallel_size=1)
        settings = SimpleNamespace(weight_transfer_config=config, parallel_config=parallel)
        llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=settings))
        receiver = ws.DoubleBufferScheme(path).create_receiver(make(llm))
        with pytest.raises(ws.EngineError, match=words) as caught:
            receiver.connect(timeout=0.1)
        assert "WeightTransferConfig(backend='weightsync')" in str(caught.value)


@pytest.mark.slow
def test_a_mixture_of_experts_takes_every_update(path, tmp_path):
    """vLLM's own reload leaves the CPU's experts in the wrong layout, and reports success."""
    from safetensors.torch import load_file

    config = mixtral_config()
    config.save_pretrained(tmp_path)
    llm = make_llm(tmp_path)
    try:
        scheme = ws.DoubleBufferScheme(path)
        with scheme.create_sender() as sender, scheme.create_receiver(llm) as receiver:
            sender.connect()
            sender.attach(receiver)
            for number in (1, 2, 3):
                model = make_model(config, number)
                model.save_pretrained(tmp_path / str(number))
                saved = load_file(tmp_path / str(number) / "model.safetensors")
                sender.update_weights(saved, version=number)
                assert greedy(llm) == expected(model)
            # Half an expert is missing: refused, and the engine goes on with what it has.
            saved.pop(next(name for name in saved if "experts.2" in name))
            with pytest.raises(ws.ReceiverError, match="experts"):
                sender.update_weights(saved, version=4)
            assert greedy(llm) == expected(model)
    finally:
        stop(llm)


@pytest.mark.parametrize("step", ["pause", "begin", "load"])
def test_a_deadline_at_any_step_leaves_no_session_open(llama, ends, monkeypatch, step):
    """Whatever ends an update early, the engine lives, and the next one goes through."""
    sender, receiver = ends
    model = make_model(llama_config(), seed=71)
    sender.update_weights(model, version=1)
    client = receiver.engine.client
    bounded = client.bounded

    def late(function, deadline, what):
        result = bounded(function, deadline, what)
        if what == step:
            monkeypatch.setattr(client, "bounded", bounded)
            raise ws.DeadlineError(f"{what} did not return in time")
        return result

    monkeypatch.setattr(client, "bounded", late)
    with pytest.raises(ws.ReceiverError, match="in time"):
        sender.update_weights(make_model(llama_config(), seed=72), version=2)
    assert greedy(llama) == expected(model)
    last = make_model(llama_config(), seed=73)
    sender.update_weights(last, version=3)
    assert greedy(llama) == expected(last)
