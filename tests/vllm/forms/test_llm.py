"""The shared suite on vLLM's ``LLM``."""

import pytest

from tests.vllm.conftest import stop
from tests.vllm.forms.suite import LONG, Answer, EngineSuite, Form, Running, engine_arguments

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(180)]


class LLMForm(Form):
    """Steps the engine itself: ``generate`` takes the answers of other requests for its own."""

    def __init__(self, llm):
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


@pytest.fixture(scope="module")
def form(tmp_path_factory):
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    folder = tmp_path_factory.mktemp("llama")
    LLMForm.config.save_pretrained(folder)
    transfer = WeightTransferConfig(backend="weightsync")
    llm = LLM(**engine_arguments(folder, weight_transfer_config=transfer))
    yield LLMForm(llm)
    stop(llm)


class TestLLM(EngineSuite):
    pass
