"""The README's engine process, run as it stands on a real engine."""

import functools

import pytest

from tests.docs import run
from tests.vllm.conftest import expected, greedy, llama_config, make_model, stop

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_the_engine_of_the_readme(path, tmp_path, monkeypatch):
    import vllm

    config = llama_config(num_hidden_layers=1)
    config.save_pretrained(tmp_path)
    # What a test machine needs besides: no tokenizer, no checkpoint, float32, small caches.
    small = {"load_format": "dummy", "skip_tokenizer_init": True, "enforce_eager": True}
    sized = functools.partial(vllm.LLM, **small, dtype="float32", max_model_len=128)
    monkeypatch.setattr(vllm, "LLM", sized)
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
