"""The shared suite on vLLM's ``AsyncLLM``, used from other threads and in its own event loop."""

import asyncio
import json
import secrets
import threading
from contextlib import contextmanager

import pytest

import weightsync as ws
from tests.vllm.conftest import PROMPTS
from tests.vllm.forms.suite import (
    LONG,
    WAIT,
    Answer,
    EngineSuite,
    Form,
    Running,
    at,
    engine_arguments,
    stepped,
)
from weightsync.deadline import Deadline

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(180)]


class AsyncLLMForm(Form):
    """An engine whose event loop runs in a thread of its own."""

    def __init__(self, engine, loop):
        self.target = engine
        self.loop = loop
        self._started = 0

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(WAIT)

    def greedy(self, prompts, count):
        return [each.answer().tokens for each in [self.start(p, count) for p in prompts]]

    def start(self, prompt, count=LONG):
        self._started += 1
        return Streamed(self, prompt, count, f"request-{self._started}")

    def label(self):
        return self.run(self.target.get_weight_version())


class Streamed(Running):
    def __init__(self, form, prompt, count, name):
        from vllm import SamplingParams

        self._form = form
        self._begun = threading.Event()
        parameters = SamplingParams(
            temperature=0, max_tokens=count, detokenize=False, ignore_eos=True
        )
        self._end = asyncio.run_coroutine_threadsafe(
            self._read(prompt, parameters, name), form.loop
        )

    async def _read(self, prompt, parameters, name):
        inputs = {"prompt_token_ids": prompt}
        outputs = []
        async for output in self._form.target.generate(inputs, parameters, name):
            outputs.append(output)
            self._begun.set()
        return Answer.of(outputs[-1])

    def wait_begun(self):
        assert self._begun.wait(WAIT)

    def answer(self):
        return self._end.result(WAIT)


@contextmanager
def engine_in_a_thread(folder, config, **changes):
    """An ``AsyncLLM`` that lives in an event loop of its own."""
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    config.save_pretrained(folder)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    transfer = WeightTransferConfig(backend="weightsync")
    arguments = engine_arguments(folder, weight_transfer_config=transfer, **changes)

    async def make():
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    try:
        engine = asyncio.run_coroutine_threadsafe(make(), loop).result(240)
        try:
            yield engine, loop
        finally:
            asyncio.run_coroutine_threadsafe(end(engine), loop).result(WAIT)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def end(engine):
    engine.shutdown()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture(scope="module")
def form(tmp_path_factory):
    with engine_in_a_thread(tmp_path_factory.mktemp("llama"), AsyncLLMForm.config) as made:
        yield AsyncLLMForm(*made)


class AsyncSuite(EngineSuite):
    def test_a_pause_that_did_not_come_about_is_given_up(self, form, run, monkeypatch):
        """It waits for requests longer than it may: they go on, and so does the engine."""
        run.receive()
        first = form.model(1)
        run.send(first)
        started = [form.start(prompt, 200) for prompt in PROMPTS]
        started[0].wait_begun()
        with monkeypatch.context() as patch:
            patch.setattr("weightsync.engines.vllm.async_llm.GRACE", 0.0)
            with pytest.raises(ws.DeadlineError, match="pause_generation"):
                run.client.pause("wait", Deadline(0.05))
        run.client.resume(Deadline(WAIT))
        assert self.is_right(form, first)
        assert [len(each.answer().tokens) for each in started] == [200] * len(PROMPTS)
        second = form.model(2)
        run.send(second)
        assert self.is_right(form, second)


class TestAsyncLLM(AsyncSuite):
    pass


async def tokens_of(engine, prompt, count=10):
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=count, detokenize=False, ignore_eos=True)
    inputs = {"prompt_token_ids": prompt}
    name = f"own-{secrets.token_hex(4)}"
    outputs = [output async for output in engine.generate(inputs, parameters, name)]
    return list(outputs[-1].outputs[0].token_ids)


def test_in_its_own_event_loop_a_receiver_is_used_by_coroutines(form, path):
    scheme = ws.DoubleBufferScheme(path)
    models = [form.model(seed) for seed in (1, 2, 3)]
    rights = [form.reference(model, PROMPTS[:1], 10)[0] for model in models]

    async def rollouts(sender):
        async with scheme.create_receiver(form.target) as receiver:
            await receiver.connect_async(timeout=WAIT)
            assert await receiver.poll_and_apply_async() is None
            await asyncio.to_thread(sender.update_weights, models[0], version=1)
            assert (await receiver.apply_weights_async()).version.number == 1
            async with receiver.hold_async() as version:
                assert version.number == 1
                assert await tokens_of(form.target, PROMPTS[0]) == rights[0]
            number = 1
            await asyncio.to_thread(sender.update_weights, models[1], version=2)
            async for report in receiver:
                number += 1
                assert report.version.number == number
                assert await tokens_of(form.target, PROMPTS[0]) == rights[number - 1]
                if number == 3:
                    break
                await asyncio.to_thread(sender.update_weights, models[2], version=3)

    with scheme.create_sender() as sender:
        sender.connect()
        form.run(rollouts(sender))


def test_a_synchronous_call_in_its_event_loop_says_what_to_use_instead(form, path):
    scheme = ws.DoubleBufferScheme(path)

    async def calls():
        receiver = scheme.create_receiver(form.target)
        with pytest.raises(ws.EngineError, match="poll_and_apply_async"):
            receiver.connect(timeout=1)
        await receiver.connect_async(timeout=WAIT)
        for call in (
            receiver.poll_and_apply,
            receiver.apply_weights,
            receiver.verify_weights,
            receiver.shutdown,
            receiver.hold().__enter__,
        ):
            with pytest.raises(ws.EngineError, match="poll_and_apply_async"):
                call()
        assert receiver.version is None
        assert not receiver.ready
        await receiver.shutdown_async()

    with scheme.create_sender() as sender:
        sender.connect()
        form.run(calls())


def test_a_cancelled_update_ends_before_its_coroutine_does(form, path):
    scheme = ws.DoubleBufferScheme(path)
    model = form.model(5)

    async def cancelled(receiver):
        loading = asyncio.Event()
        loop = asyncio.get_running_loop()
        seen = at("load", lambda: loop.call_soon_threadsafe(loading.set))
        with stepped(receiver.engine.client, before=seen):
            task = asyncio.ensure_future(receiver.apply_weights_async())
            await asyncio.wait_for(loading.wait(), WAIT)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert receiver.version.number == 1
        return await tokens_of(form.target, PROMPTS[0])

    async def waits_for_nothing(receiver):
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(receiver.poll_and_apply_async(timeout=10**6), 0.1)

    with scheme.create_sender() as sender, scheme.create_receiver(form.target) as receiver:
        sender.connect()
        receiver.connect()
        sender.update_weights(model, version=1)
        assert [form.run(cancelled(receiver))] == form.reference(model, PROMPTS[:1], 10)
        form.run(waits_for_nothing(receiver))


def test_it_follows_in_the_background_while_requests_run(form, path):
    scheme = ws.DoubleBufferScheme(path)
    applied = threading.Semaphore(0)
    with scheme.create_sender() as sender, scheme.create_receiver(form.target) as receiver:
        sender.connect()
        receiver.connect()
        receiver.follow(on_update=lambda report: applied.release())
        answers = []
        for number in (1, 2, 3):
            model = form.model(number)
            answers += [form.start(prompt, 100) for prompt in PROMPTS]
            sender.update_weights(model, version=number)
            assert applied.acquire(timeout=WAIT)
            with receiver.hold() as version:
                assert version.number == number
                assert form.greedy(PROMPTS, 10) == form.reference(model, PROMPTS, 10)
        assert [len(each.answer().tokens) for each in answers] == [100] * 12


def test_an_error_of_the_engine_is_told_in_its_own_words(form, path):
    scheme = ws.DoubleBufferScheme(path)
    with scheme.create_sender() as sender, scheme.create_receiver(form.target) as receiver:
        sender.connect()
        receiver.connect()
        client = receiver.engine.client
        with pytest.raises(ws.EngineError, match=r"vLLM's pause_generation says .*bogus"):
            client.pause("bogus", Deadline(WAIT))


def test_log_probabilities_are_those_of_the_model(form, path):
    import torch

    scheme = ws.DoubleBufferScheme(path)
    model = form.model(6)
    with scheme.create_sender() as sender, scheme.create_receiver(form.target) as receiver:
        sender.connect()
        sender.attach(receiver)
        sender.update_weights(model, version=1)
        found = receiver.engine.client.logprobs(PROMPTS[:2], Deadline(WAIT))
    for prompt, values in zip(PROMPTS[:2], found, strict=True):
        with torch.no_grad():
            scores = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        right = [scores[place, token].item() for place, token in enumerate(prompt[1:])]
        assert values == pytest.approx(right, abs=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(600)
class TestDataParallel(AsyncSuite):
    """Two ranks of a dense model, each an engine core of its own."""

    @pytest.fixture(scope="class")
    def form(self, tmp_path_factory):
        folder = tmp_path_factory.mktemp("ranks")
        with engine_in_a_thread(folder, AsyncLLMForm.config, data_parallel_size=2) as made:
            yield AsyncLLMForm(*made)

    def test_every_worker_of_every_rank_answers(self, form, run):
        receiver = run.receive()
        answers = receiver.engine.client.ask('{"op": "status"}', Deadline(WAIT), "status")
        assert sorted(json.loads(answer)["rank"] for answer in answers) == [0, 1]
