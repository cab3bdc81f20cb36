"""A copy plan leaves in a model of vLLM's what its layerwise reload leaves there, bit for bit.

The models are vLLM's own, without an engine around them. vLLM's CPU build packs the weights of
linear layers and experts, which a plan leaves to the reload; most tests switch that off, so that
layers are as plain as on a GPU.
"""

import ctypes
import os

import pytest
import torch
import torch.distributed
from torch import nn

from tests.vllm.conftest import llama_config
from tests.vllm.test_architectures import CONFIGS, DEEPSEEK, TEXT, config_of, make
from weightsync.errors import EngineError
from weightsync.source import as_source

pytest.importorskip("vllm")

from weightsync.vllm_worker import belongings, compat, copy_plan
from weightsync.vllm_worker.dry_reload import same_bits

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", autouse=True)
def parallel():
    """vLLM's groups of one rank each, which its layers ask for."""
    from vllm import distributed
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()), pytest.MonkeyPatch.context() as patch:
        store = f"file:///dev/shm/weightsync-test-{os.getpid()}-groups"
        distributed.init_distributed_environment(1, 0, store, 0, "gloo")
        distributed.initialize_model_parallel(1, 1)
        yield patch
        distributed.destroy_model_parallel()
        distributed.destroy_distributed_environment()


@pytest.fixture
def plain(monkeypatch):
    """Linear layers and experts keep their weights as they are loaded."""
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    def keep(layer, remove_weight):
        layer.cpu_linear = nn.functional.linear

    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", keep)
    monkeypatch.setattr(cpu_moe, "cpu_prepack_moe_weight", lambda weight, isa: weight)


class Loaded:
    """A model of vLLM's that holds the weights of a trainer's."""

    def __init__(self, folder, weights, dtype="float32"):
        from vllm.config import set_current_vllm_config
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.model_loader import utils
        from vllm.utils.torch_utils import set_default_torch_dtype

        weights.config.architectures = [type(weights).__name__]
        weights.config.save_pretrained(folder)
        self.vllm_config = EngineArgs(
            str(folder), skip_tokenizer_init=True, max_model_len=128, dtype=dtype
        ).create_engine_config()
        self.config = self.vllm_config.model_config
        self.context = lambda: set_current_vllm_config(self.vllm_config)
        with self.context(), set_default_torch_dtype(getattr(torch, dtype)):
            self.model = utils.initialize_model(vllm_config=self.vllm_config)
            for parameter in self.model.parameters():
                parameter.data.zero_()
            utils.process_weights_after_loading(self.model, self.config, torch.device("cpu"))
        self.reload(weights)

    def stream(self, weights):
        source = as_source(weights)
        tensors = dict(source.tensors())
        yield from tensors.items()
        if not compat.ties_word_embeddings(self.config):
            for alias, name in source.manifest().aliases.items():
                yield alias, tensors[name]

    def reload(self, weights, only=None):
        with self.context(), torch.no_grad():
            compat.begin_reload(self.model)
            stream = self.stream(weights)
            compat.load(self.model, ((n, t) for n, t in stream if only is None or n in only))
            if only is None:
                assert not compat.incomplete_layers(self.model)
            compat.finish_reload(self.model, self.config)

    def plan(self, weights):
        with self.context(), torch.no_grad():
            manifest = as_source(weights).manifest()
            return copy_plan.make(self.model, self.config, manifest, self.stream(weights))

    def apply(self, plan, weights):
        """An update by plan, as simple as it can be."""
        source = as_source(weights)
        manifest, by_name = source.manifest(), dict(source.tensors())
        if plan.reloaded:
            self.reload(weights, only=set(plan.reloaded))
        tensors = [by_name[spec.name].contiguous() for spec in manifest.tensors]
        for tensor, offset, into, length in zip(
            plan.tensor, plan.offset, plan.into, plan.length, strict=True
        ):
            assert 0 <= offset <= offset + length <= tensors[tensor].nbytes
            ctypes.memmove(int(into), tensors[tensor].data_ptr() + int(offset), int(length))
        with torch.no_grad():
            for conversion in plan.conversions:
                conversion.apply(by_name[conversion.tensor].contiguous())

    def state(self):
        """Every tensor that the model holds, wherever."""
        layers = {layer: name for name, layer in self.model.named_modules()}
        held = {}
        for layer, name in layers.items():
            own = {**layer._parameters, **layer._buffers, **belongings.tensors(layer, layers)}
            held |= {f"{name}.{path}": each for path, each in own.items() if each is not None}
        return {
            path: (each.data_ptr(), each.detach().clone())
            for path, each in held.items()
            if not path.endswith("handler_tensor")
        }


def assert_same(one, other, addresses=False):
    assert one.keys() == other.keys()
    for path, (address, tensor) in one.items():
        assert same_bits(tensor, other[path][1]), path
        assert not addresses or address == other[path][0], path


def follows(config, folder, dtype="float32"):
    """Updates by plan leave what reloads leave; returns the plan, and the model."""
    first, second, third = (make(config, seed) for seed in (1, 2, 3))
    loaded = Loaded(folder, first, dtype)
    before = loaded.state()
    plan = loaded.plan(first)
    assert_same(loaded.state(), before, addresses=True)
    assert plan.holds(loaded.model)
    assert plan.fingerprint == as_source(first).manifest().fingerprint
    reloaded = {}
    for weights in (second, third):
        loaded.reload(weights)
        reloaded[weights] = loaded.state()
    assert not all(same_bits(t, before[path][1]) for path, (_, t) in reloaded[third].items())
    for weights in (second, third):
        loaded.apply(plan, weights)
        assert_same(loaded.state(), reloaded[weights])
    assert plan.holds(loaded.model)
    return plan, loaded


def test_a_dense_model_is_planned_whole(plain, tmp_path):
    """Fused projections with biases; an output layer of its own, whose vocabulary is padded."""
    config = llama_config(attention_bias=True)
    plan, loaded = follows(config, tmp_path)
    manifest = as_source(make(config, 1)).manifest()
    assert plan.fallback == {}
    assert plan.reloaded == ()
    assert plan.conversions == ()
    assert plan.share == 1
    assert plan.nbytes == manifest.payload
    assert len(plan.length) < len(manifest.tensors) + 2


@pytest.mark.parametrize("name", list(CONFIGS))
def test_what_a_plan_leaves_is_what_a_reload_leaves(name, plain, tmp_path):
    plan, _ = follows(config_of(CONFIGS[name]), tmp_path)
    print(name, plan.share, plan.fallback, len(plan.length), len(plan.conversions))
