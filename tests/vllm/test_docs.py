"""The README's engine process, run as it stands on a real engine."""

import functools

import pytest

import weightsync as ws
from tests.docs import run
from tests.vllm.conftest import PROMPTS, expected, greedy, llama_config, make_model, stop
from tests.vllm.test_adapter import make_adapter, merged

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture
def small_engines(monkeypatch):
    """What a test machine needs besides: no tokenizer, float32, small caches."""
    import vllm

    small = {"skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 128}
    monkeypatch.setattr(vllm, "LLM", functools.partial(vllm.LLM, **small, dtype="float32"))


def test_the_engine_of_the_readme(path, tmp_path, small_engines):
    config = llama_config(num_hidden_layers=1)
    make_model(config, 2).save_pretrained(tmp_path)
    model = make_model(config, 3)
    trainer = run("README.md", "trainer", path, model=model)
    engine = run("README.md", "engine", path, path=str(tmp_path))
    try:
        assert engine["report"].version == trainer["report"].version
        assert greedy(engine["llm"]) == expected(model)
    finally:
        engine["receiver"].shutdown()
        trainer["sender"].shutdown()
        stop(engine["llm"])


@pytest.mark.slow
def test_an_async_llm(path, tmp_path, monkeypatch):
    import asyncio

    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs

    small = {"skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 128}
    made = functools.partial(AsyncEngineArgs, **small, dtype="float32")
    monkeypatch.setattr("vllm.engine.arg_utils.AsyncEngineArgs", made)
    config = llama_config(num_hidden_layers=1)
    make_model(config, 2).save_pretrained(tmp_path)
    first, second = make_model(config, 3), make_model(config, 4)
    sampling = SamplingParams(temperature=0, max_tokens=10, detokenize=False, ignore_eos=True)

    async def ask(llm, name):
        async for output in llm.generate({"prompt_token_ids": PROMPTS[0]}, sampling, name):
            last = output
        return [list(last.outputs[0].token_ids)]

    async def use(llm, receiver):
        assert await ask(llm, "first") == expected(first, PROMPTS[:1])
        await asyncio.to_thread(sender.update_weights, second, version=2, wait="applied")
        assert await ask(llm, "second") == expected(second, PROMPTS[:1])
        assert receiver.version.number == 2
        engines.append(llm)

    engines = []
    with ws.DoubleBufferScheme(path).create_sender() as sender:
        sender.connect()
        sender.update_weights(first, version=1)
        names = run("docs/engines.md", "AsyncLLM", path, path=str(tmp_path), use=use)
        report = asyncio.run(names["serve"]())
        assert report.version.number == 1
    engines[0].shutdown()


@pytest.mark.slow
def test_adapters(path, tmp_path, small_engines):
    from vllm import SamplingParams

    base = make_model(llama_config(num_hidden_layers=1), 3)
    base.save_pretrained(tmp_path)
    peft = make_adapter(base, seed=4)
    trainer = run("docs/adapters.md", "trainer", path, model=peft)
    given = {
        "path": str(tmp_path),
        "prompts": [{"prompt_token_ids": prompt} for prompt in PROMPTS],
        "sampling": SamplingParams(temperature=0, max_tokens=10, detokenize=False, ignore_eos=True),
    }
    engine = run("docs/adapters.md", "engine", path, **given)
    try:
        tokens = [list(answer.outputs[0].token_ids) for answer in engine["answers"]]
        assert tokens == expected(merged(peft)) != expected(base)
    finally:
        engine["receiver"].shutdown()
        trainer["sender"].shutdown()
        stop(engine["llm"])
