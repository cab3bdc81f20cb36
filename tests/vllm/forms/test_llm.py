"""The shared suite on vLLM's ``LLM``."""

import os
import subprocess
import sys
from contextlib import contextmanager

import pytest

from tests.vllm.conftest import stop
from tests.vllm.forms.suite import LONG, Answer, EngineSuite, Form, Running, engine_arguments

# An LLM is updated in tests/vllm/test_llm.py every time.
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]

ALONE = "VLLM_ENABLE_V1_MULTIPROCESSING"
"""With 0 an ``LLM`` does everything in the process of who calls it."""


class LLMForm(Form):
    """Steps the engine itself: ``generate`` takes the answers of other requests for its own."""

    def __init__(self, llm):
        if os.environ.get(ALONE) == "0":
            self.modes = ("keep",)  # nothing goes on by itself
        self.target = llm
        self.outputs = {}
        self._started = 0

    def greedy(self, prompts, count):
        return [each.answer().tokens for each in [self.start(p, count) for p in prompts]]

    def start(self, prompt, count=LONG):
        from vllm import SamplingParams

        self._started += 1
        name = f"request-{self._started}"
        parameters = SamplingParams(
            temperature=0, max_tokens=count, detokenize=False, ignore_eos=True
        )
        self.target.llm_engine.add_request(name, {"prompt_token_ids": prompt}, parameters)
        return Stepped(self, name)

    def step(self):
        for output in self.target.llm_engine.step():
            self.outputs[output.request_id] = output

    def label(self):
        return self.target.get_weight_version()


class Stepped(Running):
    def __init__(self, form, name):
        self._form, self._name = form, name

    def _step_until(self, done):
        while True:
            output = self._form.outputs.get(self._name)
            if output is not None and done(output):
                return output
            assert self._form.target.llm_engine.has_unfinished_requests()
            self._form.step()

    def wait_begun(self):
        self._step_until(lambda output: output.outputs[0].token_ids)

    def answer(self):
        return Answer.of(self._step_until(lambda output: output.finished))


@contextmanager
def llm_form(folder, **changes):
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    LLMForm.config.save_pretrained(folder)
    transfer = WeightTransferConfig(backend="weightsync")
    llm = LLM(**engine_arguments(folder, weight_transfer_config=transfer, **changes))
    yield LLMForm(llm)
    stop(llm)


class TestLLM(EngineSuite):
    @pytest.fixture(scope="class")
    def form(self, tmp_path_factory):
        with llm_form(tmp_path_factory.mktemp("llama")) as form:
            yield form


parallel = pytest.mark.skipif(os.environ.get(ALONE) == "0", reason="takes several processes")


@parallel
class TestTensorParallel(EngineSuite):
    @pytest.fixture(scope="class")
    def form(self, tmp_path_factory):
        with llm_form(tmp_path_factory.mktemp("tensor"), tensor_parallel_size=2) as form:
            yield form


@parallel
class TestPipelineParallel(EngineSuite):
    @pytest.fixture(scope="class")
    def form(self, tmp_path_factory):
        with llm_form(tmp_path_factory.mktemp("pipeline"), pipeline_parallel_size=2) as form:
            # Without any warm-up vLLM 0.32 has no room on the CPU for what one stage hands to the
            # next, and dies at the first request.
            form.target.collective_rpc("execute_dummy_batch")
            yield form


@parallel
@pytest.mark.timeout(500)
def test_an_llm_in_one_process_takes_the_suite_too():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-m", "slow or not slow", __file__],
        env={**os.environ, ALONE: "0"},
        capture_output=True,
        text=True,
        timeout=480,
    )
    assert done.returncode == 0, done.stdout[-4000:]
