"""A LoRA adapter of an ``AsyncLLM`` that answers requests all the time."""

import asyncio
import threading
from glob import glob

import pytest

import weightsync as ws
from tests.vllm.conftest import expected, llama_config, make_model
from tests.vllm.forms.suite import WAIT
from tests.vllm.forms.test_async_llm import engine_in_a_thread
from tests.vllm.test_adapter import FOLDERS, LONG, make_adapter, merged, require_from_either

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

COUNT = 10


@pytest.fixture(scope="module")
def base():
    return make_model(llama_config(), seed=1)


@pytest.fixture(scope="module")
def made(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    base.save_pretrained(folder)
    options = {"load_format": "safetensors", "enable_lora": True, "max_lora_rank": 8}
    with engine_in_a_thread(folder, llama_config(), **options) as made:
        yield made


class Load:
    """Threads that ask all the time, with the request that the engine gives then."""

    def __init__(self, engine, loop, adapter):
        self.answers, self.errors = [], []
        self._engine, self._loop, self._adapter = engine, loop, adapter
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(2)]
        for thread in self._threads:
            thread.start()

    def _run(self, number):
        count = 0
        while not self._stop.is_set():
            count += 1
            try:
                self.answers.append(self.ask(f"{number}-{count}"))
            except BaseException as error:
                self.errors.append(error)
                return

    def ask(self, name):
        return asyncio.run_coroutine_threadsafe(self._ask(name), self._loop).result(WAIT)

    async def _ask(self, name):
        from vllm import SamplingParams

        request = self._adapter.lora_request
        parameters = SamplingParams(
            temperature=0, max_tokens=COUNT, detokenize=False, ignore_eos=True
        )
        prompt = {"prompt_token_ids": LONG[0]}
        outputs = self._engine.generate(prompt, parameters, name, lora_request=request)
        last = [output async for output in outputs][-1]
        return request.lora_name, list(last.outputs[0].token_ids)

    def stop(self):
        self._stop.set()
        for thread in self._threads:
            thread.join(WAIT)
        assert not self.errors
        assert self.answers
        return self.answers


@pytest.mark.parametrize("one_name", [False, True])
def test_f3_requests_meanwhile_are_answered_by_the_version_they_name(made, base, path, one_name):
    engine, loop = made
    pefts = [make_adapter(base, seed=300 + number) for number in range(2)]
    whole = [expected(merged(peft), LONG, COUNT)[0] for peft in pefts]
    scheme = ws.DoubleBufferScheme(path)
    adapter = ws.VLLMAdapter(engine, one_name=one_name)
    with scheme.create_sender() as sender, scheme.create_receiver(adapter) as receiver:
        sender.connect()
        sender.attach(receiver)
        sender.update_weights(ws.AdapterSource(pefts[0]), version=0)
        load = Load(engine, loop, adapter)
        for number in range(1, 5):
            report = sender.update_weights(ws.AdapterSource(pefts[number % 2]), version=number)
            assert report.version == receiver.version
            assert load.ask(f"after-{number}")[1] == whole[number % 2]
        answers = load.stop()
    if one_name:
        assert {name for name, _ in answers} == {"policy"}
        tokens = [tokens for _, tokens in answers]
        require_from_either(tokens, [merged(peft) for peft in pefts], LONG[0])
    else:
        for name, tokens in answers:
            number = int(name.partition("#")[0].rpartition(":")[2])
            assert tokens == whole[number % 2]
    adapter.unload()
    assert not glob(FOLDERS)
