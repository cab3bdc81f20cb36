"""The shared suite of vLLM's forms on a GPU: bfloat16, CUDA graphs, real kernels.

Right are the tokens of another engine of the same model and dtype, into which vLLM loaded the
weights itself; one test compares with an engine that was started from a checkpoint.
"""

import asyncio
import threading

import pytest
import torch

from tests.vllm.conftest import PROMPTS, llama_config, make_model, stop
from tests.vllm.forms.suite import EngineSuite, engine_arguments
from tests.vllm.forms.test_async_llm import AsyncLLMForm
from tests.vllm.forms.test_llm import LLMForm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.timeout(60, func_only=True),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CONFIG = llama_config(hidden_size=256, intermediate_size=512, torch_dtype="bfloat16")


def arguments(folder, **changes):
    return engine_arguments(
        folder,
        **{
            "dtype": "bfloat16",
            "enforce_eager": False,
            "gpu_memory_utilization": 0.08,
            "max_num_seqs": 16,
            **changes,
        },
    )


def sharp(config, seed):
    """Weights whose greedy tokens leave no doubt that rounding could decide."""
    model = make_model(config, seed).to(torch.bfloat16)
    with torch.no_grad():
        model.lm_head.weight.mul_(4)
    return model


class Reference:
    """An engine that takes weights by vLLM's own reload, each from a checkpoint of its own."""

    def __init__(self, scratch):
        from vllm import LLM

        self._scratch, self._saved = scratch, 0
        self._loaded = sharp(CONFIG, 0)
        # A dummy engine reloads nothing.
        self.llm = LLM(**arguments(self._save(self._loaded), load_format="safetensors"))

    def _save(self, model):
        self._saved += 1
        folder = self._scratch / str(self._saved)
        model.save_pretrained(folder)
        return folder

    def tokens(self, model, prompts, count):
        if self._loaded is not model:
            path = str(self._save(model))
            self.llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
            self._loaded = model
        self.llm.reset_prefix_cache()
        return tokens_of(self.llm, prompts, count)


def tokens_of(llm, prompts, count):
    from vllm import SamplingParams

    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(temperature=0, max_tokens=count, detokenize=False, ignore_eos=True),
        use_tqdm=False,
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture
def path(run_dir):
    return run_dir


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    CONFIG.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def from_checkpoint(tmp_path_factory):
    """A model, and the tokens of an engine that was started from its checkpoint."""
    from vllm import LLM

    folder = tmp_path_factory.mktemp("checkpoint")
    model = sharp(CONFIG, 200)
    model.save_pretrained(folder)
    fresh = LLM(**arguments(folder, load_format="safetensors"))
    try:
        return model, tokens_of(fresh, PROMPTS, 20)
    finally:
        stop(fresh)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    made = Reference(tmp_path_factory.mktemp("reference"))
    yield made
    stop(made.llm)


class OnGPU:
    """What differs from the forms on the CPU."""

    config = CONFIG
    dtype = torch.bfloat16
    other = None

    def model(self, seed):
        return sharp(self.config, seed)

    def reference(self, model, prompts, count):
        return self.other.tokens(model, prompts, count)


class GPULLM(OnGPU, LLMForm):
    def label(self):
        say = getattr(self.target, "get_weight_version", None)
        return say() if say else None


class GPUAsyncLLM(OnGPU, AsyncLLMForm):
    def label(self):
        return super().label() if hasattr(self.target, "get_weight_version") else None


class TestLLM(EngineSuite):
    @pytest.fixture(scope="class")
    def form(self, folder, reference):
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        transfer = WeightTransferConfig(backend="weightsync")
        llm = LLM(**arguments(folder, weight_transfer_config=transfer))
        form = GPULLM(llm)
        form.other = reference
        yield form
        stop(llm)

    def test_tokens_are_those_of_an_engine_started_from_the_checkpoint(
        self, from_checkpoint, form, run
    ):
        model, tokens = from_checkpoint
        run.receive()
        run.send(model)
        assert form.greedy(PROMPTS, 20) == tokens

    def test_what_it_holds_is_verified(self, form, run):
        receiver = run.receive()
        run.send(form.model(201))
        outcome = receiver.verify_weights()
        assert not outcome.different, outcome
        assert outcome.checked
        assert self.is_right(form, form.model(201))


class TestAsyncLLM(EngineSuite):
    @pytest.fixture(scope="class")
    def form(self, folder, reference):
        from vllm.config import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        transfer = WeightTransferConfig(backend="weightsync")

        async def make():
            made = AsyncEngineArgs(**arguments(folder, weight_transfer_config=transfer))
            return AsyncLLM.from_engine_args(made)

        engine = asyncio.run_coroutine_threadsafe(make(), loop).result(300)
        form = GPUAsyncLLM(engine, loop)
        form.other = reference
        yield form
        engine.shutdown()
        loop.call_soon_threadsafe(loop.stop)


class TestServer(EngineSuite):
    @pytest.fixture(scope="class")
    def form(self, folder, reference, tmp_path_factory):
        pytest.importorskip("httpx")
        from tests.vllm.forms.servers import Server
        from tests.vllm.forms.test_server import ServerForm

        class GPUServer(OnGPU, ServerForm):
            pass

        log = tmp_path_factory.mktemp("server") / "log"
        server = Server(folder, str(log))
        command = [word for word in server._command if word != "--enforce-eager"]
        command[command.index("float32")] = "bfloat16"
        server._command = [*command, *("--gpu-memory-utilization", "0.08", "--max-num-seqs", "16")]
        server.start()
        try:
            server.wait()
            form = GPUServer(server)
            form.other = reference
            yield form
        finally:
            server.stop()
