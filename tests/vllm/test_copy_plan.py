"""A copy plan leaves in a model of vLLM's what its layerwise reload leaves there, bit for bit.

The models are vLLM's own, without an engine around them. vLLM's CPU build packs the weights of
linear layers and experts, which a plan leaves to the reload; most tests switch that off, so that
layers are as plain as on a GPU.
"""

import numpy as np
import pytest
import torch
import torch.distributed
from torch import nn

from tests.vllm.conftest import llama_config, mixtral_config
from tests.vllm.plain import keep
from tests.vllm.test_architectures import CONFIGS, DEEPSEEK, TEXT, config_of, make, seeing
from weightsync.device import device_of
from weightsync.errors import EngineError
from weightsync.source import as_source

pytest.importorskip("vllm")

from weightsync.vllm_worker import belongings, compat, copy_plan
from weightsync.vllm_worker.dry_reload import same_bits

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", autouse=True)
def parallel(tmp_path_factory):
    """vLLM's groups of one rank each, which its layers ask for."""
    from vllm import distributed
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        store = f"file://{tmp_path_factory.mktemp('groups')}/store"
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        distributed.init_distributed_environment(1, 0, store, 0, backend)
        distributed.initialize_model_parallel(1, 1)
        yield
        distributed.destroy_model_parallel()
        distributed.destroy_distributed_environment()


@pytest.fixture
def plain(monkeypatch):
    """Linear layers and experts keep their weights as they are loaded."""
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", keep)
    monkeypatch.setattr(cpu_moe, "cpu_prepack_moe_weight", lambda weight, isa: weight)


class Loaded:
    """A model of vLLM's that holds the weights of a trainer's."""

    def __init__(self, folder, weights, dtype="float32", prepare=lambda model: None, **options):
        from vllm.config import set_current_vllm_config
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.model_loader import utils
        from vllm.utils.torch_utils import set_default_torch_dtype

        weights.config.architectures = [type(weights).__name__]
        weights.config.save_pretrained(folder)
        self.vllm_config = EngineArgs(
            str(folder), skip_tokenizer_init=True, max_model_len=128, dtype=dtype, **options
        ).create_engine_config()
        self.config = self.vllm_config.model_config
        self.context = lambda: set_current_vllm_config(self.vllm_config)
        place = torch.device(self.vllm_config.device_config.device)
        with self.context(), set_default_torch_dtype(getattr(torch, dtype)):
            with place:
                self.model = utils.initialize_model(vllm_config=self.vllm_config)
            for parameter in self.model.parameters():
                parameter.data.zero_()
            prepare(self.model)
            utils.process_weights_after_loading(self.model, self.config, place)
        self.device = device_of(next(self.model.parameters()).device)
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
        tensors = [
            by_name[spec.name].to(self.device.place).contiguous() for spec in manifest.tensors
        ]
        for number, offset, length in zip(plan.tensor, plan.offset, plan.length, strict=True):
            assert 0 <= offset < offset + length <= tensors[number].nbytes
        begin = np.array([tensor.data_ptr() for tensor in tensors])
        lane = self.device.current()
        self.device.moves(plan.into, begin[plan.tensor] + plan.offset, plan.length).run(lane)
        lane.wait()
        with torch.no_grad():
            for conversion in plan.conversions:
                conversion.apply(tensors[conversion.number])

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


def follows(config, folder, sent=torch.float32, **options):
    """Updates by plan leave what reloads leave; returns the plan, and the model."""
    first, second, third = (make(config, seed).to(sent) for seed in (1, 2, 3))
    loaded = Loaded(folder, first, **options)
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
    plan, _ = follows(config, tmp_path)
    manifest = as_source(make(config, 1)).manifest()
    assert plan.fallback == {}
    assert plan.reloaded == ()
    assert plan.conversions == ()
    assert plan.share == 1
    assert plan.nbytes == manifest.payload
    assert len(plan.length) < len(manifest.tensors) + 2


DERIVED_IN_LOADING = {"falcon_h1", "mamba2", "gpt_oss", "llama4"}
"""Models of which some layers compute while they load."""

DEFAULT = {"qwen3_moe", "glm4_moe", "gpt2"}


def marks(name):
    return [] if name in DEFAULT else [pytest.mark.slow]


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in CONFIGS])
def test_what_a_plan_leaves_is_what_a_reload_leaves(name, plain, tmp_path):
    """Experts, routers with a bias, transposed and fused checkpoints."""
    plan, _ = follows(config_of(CONFIGS[name]), tmp_path)
    assert plan.share > 0.1
    assert bool(plan.fallback) == (name in DERIVED_IN_LOADING), plan.fallback


def test_a_tied_model_is_planned_whole(plain, tmp_path):
    """T1: the embedding is sent once."""
    from transformers import Qwen2Config

    config = Qwen2Config(**TEXT, tie_word_embeddings=True)
    plan, _ = follows(config, tmp_path)
    assert plan.fallback == {}
    assert "lm_head.weight" not in as_source(make(config, 1)).manifest().by_name


def test_tied_weights_of_an_engine_that_loads_both_fall_back(plain, tmp_path):
    """T1: what is written twice is left to the reload."""
    model = make(llama_config(tie_word_embeddings=True), 1)
    loaded = Loaded(tmp_path, model)
    loaded.config.hf_config.tie_word_embeddings = False
    plan = loaded.plan(model)
    assert plan.fallback.keys() == {"model.embed_tokens", "lm_head"}
    assert plan.reloaded == ("model.embed_tokens.weight", "lm_head.weight")


@pytest.mark.slow
def test_mixtral(plain, tmp_path):
    plan, _ = follows(mixtral_config(), tmp_path)
    assert plan.fallback == {}


def test_weights_that_are_cast_are_converted(plain, tmp_path):
    """D1: float32 in the trainer, bfloat16 in the engine."""
    config = llama_config()
    plan, _ = follows(config, tmp_path, dtype="bfloat16")
    assert plan.fallback == {}
    assert len(plan.length) == 0
    assert plan.nbytes == as_source(make(config, 1)).manifest().payload / 2


def test_repacked_layers_fall_back(tmp_path):
    """Q4: vLLM's CPU build as it is; only norms are plain."""
    plan, _ = follows(llama_config(), tmp_path)
    assert len(plan.fallback) == 4 * 2 + 2
    assert set(plan.fallback.values()) == {"its kernel hides its weights"}
    assert len(plan.length) == 5
    assert 0 < plan.share < 0.01


def test_latent_attention_is_planned_where_it_only_looks_at_weights(plain, tmp_path):
    """DeepSeek-V3, unquantised: the matrices that attention uses are views of another layer's."""
    plan, loaded = follows(config_of(DEEPSEEK), tmp_path)
    assert any("W_UV" in path for path in loaded.state())
    assert plan.fallback == {}


def test_latent_attention_falls_back_where_it_keeps_copies(plain, tmp_path, monkeypatch):
    """They are derived from live weights, after all layers: no dry reload sees them change."""
    from vllm.model_executor.layers.attention import MLAAttention

    process = MLAAttention.process_weights_after_loading

    def copying(self, dtype):
        process(self, dtype)
        self.W_UV = nn.Parameter(self.W_UV.contiguous(), requires_grad=False)

    monkeypatch.setattr(MLAAttention, "process_weights_after_loading", copying)
    plan, _ = follows(config_of(DEEPSEEK), tmp_path)
    for layer in (0, 1):
        assert "W_UV" in plan.fallback[f"model.layers.{layer}.self_attn.kv_b_proj"]
    assert all(".self_attn." in name for name in plan.fallback)
    assert all(".self_attn." in name for name in plan.reloaded)
    assert plan.share > 0.3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "gemma3_vl"])
def test_a_model_that_sees(name, plain, tmp_path):
    """N1."""
    pytest.importorskip("torchvision", reason="vLLM needs it", exc_type=Exception)
    kinds = ("image", "video") if name == "qwen2_5_vl" else ("image",)
    limits = {"limit_mm_per_prompt": dict.fromkeys(kinds, 0)}
    plan, _ = follows(seeing(name), tmp_path, **limits)
    print(name, plan.share, plan.fallback)
    assert plan.share > 0.5


# ---------------------------------------------------------------- what is no mere copying

NORM = "model.norm"
PROJECTION = "model.layers.0.self_attn.o_proj"


def with_processing(act):
    """A model one of whose layers does more once it is loaded."""

    def prepare(model):
        method = model.get_submodule(PROJECTION).quant_method
        process = method.process_weights_after_loading

        def more(layer):
            process(layer)
            act(layer)

        method.process_weights_after_loading = more

    return prepare


def with_loader(load):
    """A model one of whose parameters is loaded in another way."""

    def prepare(model):
        from vllm.model_executor.model_loader.reload import layerwise

        info = layerwise.get_layerwise_info(model.get_submodule(NORM))
        info.restore_metadata[0]["weight"].weight_loader = load

    return prepare


def derive_a_tensor(layer):
    layer.absorbed = layer.weight.detach() * 2


def derive_a_tensor_in_place(layer):
    if not hasattr(layer, "absorbed"):
        layer.absorbed = torch.zeros_like(layer.weight)
    layer.absorbed.copy_(layer.weight)


def derive_a_tensor_in_a_closure(layer):
    packed = layer.weight.detach().t().contiguous()
    layer.cpu_linear = lambda x, weight, bias: nn.functional.linear(x, packed.t(), bias)


def derive_a_number(layer):
    layer.greatest = float(layer.weight.abs().max())


def permute(layer):
    layer.weight.data.copy_(layer.weight.data.flip(1))


def scale(layer):
    layer.weight.data.mul_(2)


def transpose(layer):
    layer.weight = nn.Parameter(layer.weight.detach().t().contiguous(), requires_grad=False)


def quantise(layer):
    layer.weight = nn.Parameter(layer.weight.detach().bfloat16(), requires_grad=False)


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (derive_a_tensor, "tensors are derived from it: absorbed"),
        (derive_a_tensor_in_place, "tensors are derived from it: absorbed"),
        (derive_a_tensor_in_a_closure, "tensors are derived from it: cpu_linear.packed"),
        (derive_a_number, "numbers are derived from it: greatest"),
        (permute, "weight: the reload does more than to copy"),
        (scale, "weight: the reload does more than to copy"),
        (transpose, "weight: the reload does more than to copy"),
        (quantise, "weight is repacked"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_layer_that_is_processed_falls_back(act, why, plain, tmp_path):
    """Q1, Q4, Q5: and the outcome of the update is that of a reload."""
    plan, _ = follows(llama_config(), tmp_path, prepare=with_processing(act))
    assert plan.fallback == {PROJECTION: why}
    assert plan.reloaded == (f"{PROJECTION}.weight",)


def add_one(param, loaded_weight):
    param.data.copy_(loaded_weight + 1)


def add_one_afterwards(param, loaded_weight):
    param.data.copy_(loaded_weight)
    param.data.add_(1)


def clone_first(param, loaded_weight):
    param.data.copy_(loaded_weight.clone())


def by_way_of_numpy(param, loaded_weight):
    param.data.copy_(torch.from_numpy(loaded_weight.numpy().copy()))


def fill(param, loaded_weight):
    param.data.copy_(loaded_weight)
    param.data.fill_(loaded_weight.max().item())


def element_by_element(param, loaded_weight):
    if param.is_meta:  # vLLM counts the elements that are copied
        param.data.copy_(loaded_weight)
    else:
        param.data.index_copy_(0, torch.arange(len(loaded_weight)), loaded_weight)


def share_memory(param, loaded_weight):
    if param.is_meta:
        param.data.copy_(loaded_weight)
    else:
        param.data = loaded_weight


def twice(param, loaded_weight):
    param.data.copy_(loaded_weight)
    param.data[32:].copy_(loaded_weight[:96])


@pytest.mark.parametrize(
    "load",
    [
        add_one,
        add_one_afterwards,
        clone_first,
        by_way_of_numpy,
        fill,
        element_by_element,
        share_memory,
        twice,
    ],
    ids=lambda value: value.__name__,
)
def test_a_loader_that_does_more_than_to_copy_is_left_to_the_reload(load, plain, tmp_path):
    plan, _ = follows(llama_config(), tmp_path, prepare=with_loader(load))
    assert plan.fallback.keys() == {NORM}
    assert plan.reloaded == (f"{NORM}.weight",)


def test_of_copies_to_the_same_place_the_last_one_counts(plain, tmp_path):
    def load(param, loaded_weight):
        first, second = loaded_weight.chunk(2)
        param.data[64:] = second
        param.data[:64].copy_(second)
        param.data[:64].copy_(first)

    plan, _ = follows(llama_config(), tmp_path, prepare=with_loader(load))
    assert plan.fallback == {}


def test_a_transposed_weight_is_converted(plain, tmp_path):
    def load(param, loaded_weight):
        param.data.view(16, 8).copy_(loaded_weight.view(8, 16).t())

    plan, _ = follows(llama_config(), tmp_path, prepare=with_loader(load))
    assert plan.fallback == {}
    assert [each.tensor for each in plan.conversions] == [f"{NORM}.weight"]


def test_what_is_computed_from_several_tensors_names_them_all(plain, tmp_path):
    """Before the loaders, where only the last of them is at hand."""

    def prepare(model):
        load_weights = model.load_weights

        def mixing(weights):
            def mixed():
                held = dict(weights)
                other = held["model.layers.0.input_layernorm.weight"]
                held[f"{NORM}.weight"] = torch.stack([held[f"{NORM}.weight"], other]).sum(0)
                yield from held.items()

            return load_weights(mixed())

        model.load_weights = mixing

    plan, _ = follows(llama_config(), tmp_path, prepare=prepare)
    first = "model.layers.0.input_layernorm"
    assert plan.fallback.keys() == {NORM, first}
    assert set(plan.reloaded) == {f"{NORM}.weight", f"{first}.weight"}


@pytest.mark.parametrize("kind", [float, torch.Tensor], ids=["number", "tensor"])
def test_a_model_that_keeps_something_while_it_loads_has_no_plan(kind, plain, tmp_path):
    def prepare(model):
        load_weights = model.load_weights
        model.model.total = 0.0 if kind is float else torch.zeros(1)

        def summing(weights):
            def summed():
                for name, tensor in weights:
                    if name == f"{NORM}.weight" and kind is float:
                        model.model.total = float(tensor.sum())
                    elif name == f"{NORM}.weight":
                        model.model.total[:] = tensor.sum()
                    yield name, tensor

            return load_weights(summed())

        model.load_weights = summing

    model = make(llama_config(), 1)
    loaded = Loaded(tmp_path, model, prepare=prepare)
    with pytest.raises(EngineError, match="load_weights itself changes what model holds"):
        loaded.plan(model)


# ---------------------------------------------------------------- failures


def unknown_name(weights):
    yield from list(weights)[:9]
    yield "model.nothing.weight", torch.zeros(3)


def wrong_shape(weights):
    for name, tensor in weights:
        yield name, tensor[:-1] if name.endswith("1.mlp.down_proj.weight") else tensor


def torn(weights):
    yield from list(weights)[:9]
    raise RuntimeError("the stream broke")


@pytest.mark.parametrize("damage", [unknown_name, wrong_shape, torn], ids=lambda d: d.__name__)
def test_a_plan_that_cannot_be_made_leaves_the_model_as_it_was(damage, plain, tmp_path):
    model = make(llama_config(attention_bias=True), 1)
    loaded = Loaded(tmp_path, model)
    before = loaded.state()
    stream = loaded.stream
    loaded.stream = lambda weights: damage(stream(weights))
    with pytest.raises(EngineError, match="no copy plan of this model"):
        loaded.plan(model)
    assert_same(loaded.state(), before, addresses=True)
    loaded.stream = stream
    assert loaded.plan(model).share == 1


def test_processing_that_fails_leaves_the_model_as_it_was(plain, tmp_path):
    broken = []

    def act(layer):
        if broken:
            layer.weight.data.zero_()
            raise RuntimeError("out of memory")

    model = make(llama_config(attention_bias=True), 1)
    loaded = Loaded(tmp_path, model, prepare=with_processing(act))
    before = loaded.state()
    broken.append(True)
    with pytest.raises(EngineError, match="RuntimeError: out of memory"):
        loaded.plan(model)
    assert_same(loaded.state(), before, addresses=True)
    broken.clear()
    assert loaded.plan(model).share == 1


# ---------------------------------------------------------------- how long a plan holds


def test_a_plan_holds_until_a_tensor_moves(plain, tmp_path):
    model = make(llama_config(), 1)
    loaded = Loaded(tmp_path, model)
    plan = loaded.plan(model)
    loaded.reload(make(llama_config(), 2))
    assert plan.holds(loaded.model)
    norm = loaded.model.get_submodule(NORM)
    former = norm.weight.data
    norm.weight.data = former.clone()
    assert not plan.holds(loaded.model)
    norm.weight.data = former
    assert plan.holds(loaded.model)
    norm.weight.data = former.view(2, -1)
    assert not plan.holds(loaded.model)
    norm.weight.data = former
    loaded.model.model.norm = nn.Identity()
    assert not plan.holds(loaded.model)
    loaded.model.model.norm = norm
    del norm.weight
    assert not plan.holds(loaded.model)


def test_what_is_needed_is_everything_once(plain, tmp_path):
    config = llama_config(attention_bias=True)
    model = make(config, 1)
    tensor, offset, length = Loaded(tmp_path, model).plan(model).needed()
    manifest = as_source(model).manifest()
    assert tensor.tolist() == list(range(len(manifest.tensors)))
    assert not offset.any()
    assert length.tolist() == [spec.nbytes for spec in manifest.tensors]
