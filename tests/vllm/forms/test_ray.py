"""The shared suite on Ray actors that hold an ``LLM`` or an ``AsyncLLM``."""

import contextlib
import os
import time
from contextlib import contextmanager

import psutil
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

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

START = 200.0
"""Seconds for an actor to load its engine."""


class LLMActor:
    def __init__(self, folder):
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        from tests.vllm.forms.test_llm import LLMForm

        transfer = WeightTransferConfig(backend="weightsync")
        self.llm = LLM(**engine_arguments(folder, weight_transfer_config=transfer))
        self._form = LLMForm(self.llm)
        self._running = {}

    def start(self, name, prompt, count):
        self._running[name] = self._form.start(prompt, count)

    def wait_begun(self, name):
        self._running[name].wait_begun()

    def answer(self, name):
        return self._running.pop(name).answer()

    def label(self):
        return self._form.label()

    def be_busy(self, seconds):
        time.sleep(seconds)

    def stop(self):
        self.llm.llm_engine.engine_core.shutdown()


class AsyncLLMActor:
    def __init__(self, folder):
        from vllm.config import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        transfer = WeightTransferConfig(backend="weightsync")
        arguments = engine_arguments(folder, weight_transfer_config=transfer)
        self.engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        self._begun = {}
        self._ended = {}

    async def start(self, name, prompt, count):
        import asyncio

        self._begun[name] = asyncio.Event()
        self._ended[name] = asyncio.ensure_future(self._read(name, prompt, count))

    async def _read(self, name, prompt, count):
        from vllm import SamplingParams

        parameters = SamplingParams(
            temperature=0, max_tokens=count, detokenize=False, ignore_eos=True
        )
        outputs = []
        async for output in self.engine.generate({"prompt_token_ids": prompt}, parameters, name):
            outputs.append(output)
            self._begun[name].set()
        return Answer.of(outputs[-1])

    async def wait_begun(self, name):
        await self._begun[name].wait()

    async def answer(self, name):
        return await self._ended.pop(name)

    async def label(self):
        return await self.engine.get_weight_version()

    async def stop(self):
        self.engine.shutdown()


class ActorForm(Form):
    def __init__(self, handle):
        self.target = handle
        self._started = 0

    def greedy(self, prompts, count):
        return [each.answer().tokens for each in [self.start(p, count) for p in prompts]]

    def start(self, prompt, count=LONG):
        self._started += 1
        return InActor(self, f"request-{self._started}", prompt, count)

    def get(self, reference, timeout=WAIT):
        import ray

        return ray.get(reference, timeout=timeout)

    def label(self):
        return self.get(self.target.label.remote())


class InActor(Running):
    def __init__(self, form, name, prompt, count):
        self._form, self._name = form, name
        form.get(form.target.start.remote(name, prompt, count))

    def wait_begun(self):
        self._form.get(self._form.target.wait_begun.remote(self._name))

    def answer(self):
        return self._form.get(self._form.target.answer.remote(self._name))


@pytest.fixture(scope="module")
def cluster():
    os.environ["RAY_AUTH_MODE"] = "disabled"  # it would write a token into the home
    import ray

    ray.init(
        "local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=80 << 20,
        log_to_driver=False,
    )
    yield ray
    ray.shutdown()


@contextmanager
def make_form(cluster, kind, folder):
    Form.config.save_pretrained(folder)
    handle = cluster.remote(num_cpus=0)(kind).remote(str(folder))
    form = ActorForm(handle)
    form.get(handle.label.remote(), START)
    yield form
    # What vLLM started outlives an actor that is killed.
    with contextlib.suppress(cluster.exceptions.RayError):
        form.get(handle.stop.remote())
    cluster.kill(handle)


class TestLLMActor(EngineSuite):
    @pytest.fixture(scope="class")
    def form(self, cluster, tmp_path_factory):
        with make_form(cluster, LLMActor, tmp_path_factory.mktemp("llama")) as form:
            yield form

    def test_a_busy_actor_is_waited_for_until_the_deadline(self, form, run, monkeypatch):
        monkeypatch.setattr("weightsync.engines.vllm.ray.GRACE", 0.0)
        receiver = run.receive(apply_timeout=10.0)
        first = form.model(1)
        run.send(first)
        form.target.be_busy.remote(20.0)
        with pytest.raises(ws.ReceiverError, match=r"Actor\(LLMActor, \w+\) had not answered"):
            run.send(form.model(2))
        assert receiver.status().state == "applied"
        form.get(form.target.be_busy.remote(0.0))
        assert self.is_right(form, first)
        last = form.model(3)
        run.send(last)
        assert self.is_right(form, last)


class TestAsyncLLMActor(EngineSuite):
    @pytest.fixture(scope="class")
    def form(self, cluster, tmp_path_factory):
        with make_form(cluster, AsyncLLMActor, tmp_path_factory.mktemp("llama")) as form:
            yield form


def test_an_actor_that_dies_is_named_and_the_other_goes_on(cluster, path, tmp_path):
    with (
        make_form(cluster, LLMActor, tmp_path / "one") as one,
        make_form(cluster, LLMActor, tmp_path / "other") as other,
        one_dies_in_an_update(cluster, path, one, other) as model,
    ):
        assert other.greedy(PROMPTS, 10) == other.reference(model, PROMPTS, 10)


@contextmanager
def one_dies_in_an_update(cluster, path, one, other):
    pid = one.get(one.target.__ray_call__.remote(lambda actor: os.getpid()))
    children = psutil.Process(pid).children(recursive=True)
    scheme = ws.DoubleBufferScheme(path)
    replicas = ws.Replicas({"one": one.target, "other": other.target})
    try:
        with scheme.create_sender() as sender, scheme.create_receiver(replicas) as receiver:
            sender.connect()
            receiver.connect(timeout=WAIT)
            sender.update_weights(one.model(1), version=1)
            receiver.poll_and_apply()
            model = one.model(2)
            sender.update_weights(model, version=2)
            client = receiver.engines["one"].client
            with (
                stepped(client, before=at("load", lambda: cluster.kill(one.target))),
                pytest.raises(ws.EngineError, match=r"'one': .*LLMActor"),
            ):
                receiver.poll_and_apply()
            states = {each.engine: each.state for each in receiver.status().engines}
            assert states == {"one": "dead", "other": "applied"}
            yield model
    finally:
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
