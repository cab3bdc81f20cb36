"""Models of the transformers library: what is sent is what ``save_pretrained`` writes."""

import copy
import weakref

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import core_model_loading as loading

import weightsync as ws
from tests.conftest import assert_all_same, assert_same, copy_of, read
from tests.sources.architectures import MODELS, make
from weightsync.source import SourceOptions, as_source
from weightsync.sources.transformers import checkpoint_of
from weightsync.tree import state_of
from weightsync.weight import Piece, Weight


def saved(model, folder):
    """The tensors that ``save_pretrained`` writes."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def sent(model, **options):
    """The tensors that are sent, cloned."""
    source = as_source(model, SourceOptions(**options))
    tensors = {name: copy_of(tensor) for name, tensor in source.tensors()}
    assert list(source.manifest().by_name) == list(as_source(model).manifest().by_name)
    for spec in source.manifest().tensors:
        if not options:
            assert (spec.dtype, spec.shape) == (tensors[spec.name].dtype, tensors[spec.name].shape)
    return tensors


def unchanged(model):
    """Remembers a model; the returned function checks it."""
    state = {name: copy_of(tensor) for name, tensor in model.state_dict().items()}
    conversions = described(model)

    def check():
        assert_all_same(model.state_dict(), state)
        assert described(model) == conversions

    return check


def described(model):
    """All that a model's conversions say and remember."""
    slots = loading.WeightTransform.__slots__
    return [
        {name: copy.deepcopy(getattr(conversion, name)) for name in slots}
        for conversion in getattr(model, "_weight_conversions", None) or ()
    ]


@pytest.mark.parametrize("name", MODELS)
def test_what_is_sent_is_what_save_pretrained_writes(name, tmp_path):
    """N1, M1, T1, B1: for a new model, and for one that was loaded; nothing on it changes."""
    model = make(name)
    check = unchanged(model)
    tensors = sent(model)
    check()
    assert_all_same(tensors, saved(model, tmp_path))
    assert_all_same(sent(model), tensors)
    loaded = type(model).from_pretrained(tmp_path)
    check = unchanged(loaded)
    assert_all_same(sent(loaded), tensors)
    check()
    assert_all_same(saved(loaded, tmp_path / "again"), tensors)
    assert_all_same(sent(loaded), tensors)


@pytest.mark.parametrize("name", MODELS)
def test_the_same_in_bfloat16(name, tmp_path):
    model = make(name, dtype=torch.bfloat16)
    assert_all_same(sent(model), saved(model, tmp_path))


@pytest.mark.parametrize("name", ["qwen2", "gpt_oss", "deepseek_v3", "gte", "qwen2_5_vl", "mamba2"])
def test_through_the_double_buffer(name, ends, tmp_path):
    model = make(name)
    sender = ends.sender(model)
    for number in (1, 2):
        sender.update_weights(version=number)
        assert_all_same(read(ends)[1], saved(model, tmp_path / str(number)))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)


def test_n1_wrapper_models_have_three_layouts():
    """N1: one rule for all of them would be wrong for two."""
    first = {
        name: {name.split(".")[0] for name in as_source(make(name)).manifest().by_name}
        for name in ("llava", "qwen2_5_vl", "gemma3")
    }
    assert first["llava"] == {"language_model", "multi_modal_projector", "vision_tower"}
    assert first["gemma3"] == {"language_model", "multi_modal_projector", "vision_tower"}
    assert first["qwen2_5_vl"] == {"model", "visual", "lm_head"}
    assert "language_model.model.norm.weight" in sent(make("llava"))
    assert "model.norm.weight" in sent(make("qwen2_5_vl"))


def test_m1_packed_experts_are_split():
    """M1, M5: the gate is the first half."""
    model = make("qwen3_moe")
    packed = model.state_dict()["model.layers.1.mlp.experts.gate_up_proj"]
    tensors = sent(model)
    prefix = "model.layers.1.mlp.experts.3"
    assert_same(tensors[f"{prefix}.gate_proj.weight"], packed[3, :24])
    assert_same(tensors[f"{prefix}.up_proj.weight"], packed[3, 24:])
    assert not [name for name in tensors if name.endswith("gate_up_proj")]


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3", "qwen3_next", "jamba"])
def test_what_is_renamed_or_split_is_not_copied(name):
    """G6: all of it lies in the model's own memory, and can be written there."""
    model = make(name)
    assert as_source(model).inventory().streamed() == []
    twin = make(name, seed=1)
    views = checkpoint_of(twin).convert(state_of(twin))
    with torch.no_grad():
        for key, tensor in sent(model).items():
            views[key].copy_(tensor)
    assert_all_same(twin.state_dict(), model.state_dict())


def test_only_what_must_be_computed_is():
    source = as_source(make("nomic_bert"))
    inventory = source.inventory()
    computed = [inventory.manifest.tensors[number].name for number in inventory.streamed()]
    assert computed == [f"nomic_bert.encoder.layers.{i}.attn.Wqkv.weight" for i in (0, 1)]


def test_names_of_a_wrapped_model():
    model = make("qwen3_moe")
    wrapped = torch.compile(model)
    assert_all_same(sent(wrapped), sent(model))


def test_a_module_that_holds_such_a_model_keeps_its_own_names():
    """It has no checkpoint layout of its own, and nothing says what its prefix means."""
    model = nn.ModuleDict({"policy": make("qwen3_moe")})
    names = as_source(model).manifest().by_name
    assert "policy.model.layers.0.mlp.experts.gate_up_proj" in names


class TestTies:
    """T1: a tie is a tie by storage."""

    def test_tied(self):
        manifest = as_source(make("qwen2")).manifest()
        assert manifest.aliases == {"lm_head.weight": "model.embed_tokens.weight"}

    def test_three_names(self):
        manifest = as_source(make("t5")).manifest()
        assert set(manifest.aliases) == {
            "encoder.embed_tokens.weight",
            "decoder.embed_tokens.weight",
            "lm_head.weight",
        }
        assert set(manifest.aliases.values()) == {"shared.weight"}

    def test_an_alias_has_its_checkpoint_name_too(self):
        aliases = as_source(make("gemma3")).manifest().aliases
        tied = {"language_model.lm_head.weight": "language_model.model.embed_tokens.weight"}
        assert aliases == tied

    def test_untied_in_spite_of_the_config(self, tmp_path):
        model = make("qwen2")
        model.lm_head.weight = nn.Parameter(torch.randn(100, 32))
        source = as_source(model)
        assert model.config.tie_word_embeddings
        assert source.manifest().aliases == {}
        assert_all_same(sent(model), saved(model, tmp_path))

    def test_tied_in_spite_of_the_config(self):
        model = make("llama")
        source = as_source(model)
        assert source.manifest().aliases == {}
        model.lm_head.weight = model.model.embed_tokens.weight
        assert not model.config.tie_word_embeddings
        assert source.manifest().aliases == {"lm_head.weight": "model.embed_tokens.weight"}

    def test_tied_where_no_model_of_the_kind_is(self):
        """``save_pretrained`` refuses that; here it is sent once."""
        model = make("llama")
        layers = model.model.layers
        layers[1].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
        aliases = {f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 1)}
        manifest = as_source(model).manifest()
        ((alias, name),) = manifest.aliases.items()
        assert {alias, name} == aliases

    def test_tied_experts(self):
        """Each of what they are split into is sent once."""
        model = make("qwen3_moe")
        layers = model.model.layers
        layers[1].mlp.experts.down_proj = layers[0].mlp.experts.down_proj
        manifest = as_source(model).manifest()
        expected = {
            f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"
            for layer in (0, 1)
            for expert in range(4)
        }
        assert {*manifest.aliases, *manifest.aliases.values()} == expected
        assert len(manifest.aliases) == 4


def test_b1_buffers():
    """B1: persistent ones are sent, the others never."""
    model = make("deepseek_v3")
    names = as_source(model).manifest().names()
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in names
    transient = {name for name, _ in model.named_buffers()} - set(model.state_dict())
    assert transient
    assert transient.isdisjoint(names)


def test_a_key_that_the_model_does_not_save_is_not_sent(tmp_path):
    model = make("llama")
    model._keys_to_ignore_on_save = {"model.norm.weight"}
    assert_all_same(sent(model), saved(model, tmp_path))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["deepseek_v3", "t5", "llama", "mamba2", "qwen3_next"])
def test_what_the_model_wants_in_float32_stays_so(name, dtype, tmp_path):
    """As ``from_pretrained(dtype=...)`` loads it."""
    model = make(name)
    names = set(saved(model, tmp_path))
    loaded = type(model).from_pretrained(tmp_path, dtype=dtype)
    expected = {name: tensor.dtype for name, tensor in saved(loaded, tmp_path / "2").items()}
    manifest = as_source(model, SourceOptions(dtype=dtype)).manifest()
    assert {spec.name: spec.dtype for spec in manifest.tensors} == expected
    assert set(expected) == names


def test_some_tensors_stay_float32():
    """So that the test above says something."""
    kept = {
        (name, dtype): sum(
            spec.dtype == torch.float32
            for spec in as_source(make(name), SourceOptions(dtype=dtype)).manifest().tensors
        )
        for name in ("deepseek_v3", "t5")
        for dtype in (torch.bfloat16, torch.float16)
    }
    assert kept == {
        ("deepseek_v3", torch.bfloat16): 1,
        ("deepseek_v3", torch.float16): 1,
        ("t5", torch.bfloat16): 0,
        ("t5", torch.float16): 4,
    }


def test_what_is_not_float32_now_is_cast():
    source = as_source(make("deepseek_v3", dtype=torch.float64), SourceOptions(dtype=torch.float16))
    assert {spec.dtype for spec in source.manifest().tensors} == {torch.float16}


class TestResizedVocabulary:
    """E6: 70 tokens, padded to 128 rows."""

    @pytest.fixture
    def models(self):
        padded, exact = make("llama"), make("llama", seed=1)
        padded.resize_token_embeddings(70, pad_to_multiple_of=64)
        exact.resize_token_embeddings(70)
        return padded, exact

    def test_all_rows_are_sent(self, models):
        assert sent(models[0])["lm_head.weight"].shape == (128, 32)
        assert sent(models[1])["lm_head.weight"].shape == (70, 32)

    @pytest.mark.parametrize("sender", [0, 1])
    def test_another_number_of_rows_is_an_error(self, models, ends, sender):
        source, target = models[sender], models[1 - sender]
        check = unchanged(target)
        ends.sender(source).update_weights(version=1)
        rows = (r"\[128, 32\]", r"\[70, 32\]")
        words = "model.embed_tokens.weight.*sent float32{}, here float32{}"
        with pytest.raises(ws.MismatchError, match=words.format(*rows[:: 1 - 2 * sender])):
            ends.receiver(target).poll_and_apply()
        check()

    @pytest.mark.parametrize("sender", [0, 1])
    def test_pad_copies_the_rows_that_both_have(self, models, ends, sender):
        from weightsync.engines.module import ModuleEngine

        source, target = models[sender], models[1 - sender]
        before = {name: copy_of(tensor) for name, tensor in target.state_dict().items()}
        ends.sender(source).update_weights(version=1)
        ends.receiver(ModuleEngine(target, pad=True)).poll_and_apply()
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            after = target.state_dict()[name]
            assert_same(after[:70], source.state_dict()[name][:70])
            assert_same(after[70:], before[name][70:])


class Stored(Weight):
    """A weight as sharded or merged ones are: made when it is read, in memory of its own."""

    def __init__(self, tensor):
        self.dtype, self.shape = tensor.dtype, tuple(tensor.shape)
        self.reads = 0
        self.alive = weakref.WeakSet()
        self._tensor = tensor

    @property
    def identity(self):
        return id(self._tensor)

    @property
    def collective(self):
        return True

    def read(self):
        self.reads += 1
        tensor = self._tensor.detach().clone()
        self.alive.add(tensor.untyped_storage())
        return tensor


def weights_of(model, kind=Stored):
    return {name: kind(tensor) for name, tensor in state_of(model).items()}


class TestWeights:
    """Tensors of the model that do not exist before they are read."""

    @pytest.mark.parametrize("name", MODELS)
    def test_what_is_read_is_what_save_pretrained_writes(self, name, tmp_path):
        """Names, dtypes and shapes are known before; each weight is read once."""
        model = make(name)
        checkpoint = checkpoint_of(model)
        expected = saved(model, tmp_path)
        for _ in range(2):
            weights = weights_of(model)
            values = checkpoint.convert(weights)
            tied = {}
            for key, value in values.items():
                tied.setdefault(value.identity, []).append(key)
            main = {checkpoint.primary(keys): values[keys[0]] for keys in tied.values()}
            known = {key: (value.dtype, value.shape) for key, value in main.items()}
            assert known == {key: (t.dtype, t.shape) for key, t in expected.items()}
            assert all(value.collective for value in main.values())
            assert not any(weight.reads for weight in weights.values())
            assert_all_same({key: value.read() for key, value in main.items()}, expected)
            assert max(weight.reads for weight in weights.values()) == 1

    def test_nothing_is_kept_after_the_last_part(self):
        weights = weights_of(make("qwen3_moe"))
        packed = weights["model.layers.0.mlp.experts.gate_up_proj"]
        values = checkpoint_of(make("qwen3_moe")).convert(weights)
        keys = [key for key in values if "layers.0.mlp.experts" in key and "down" not in key]
        for key in keys:
            assert values[key].read().shape == (24, 32)
            assert len(packed.alive) == (key != keys[-1])
        assert packed.reads == 1

    def test_nothing_is_kept_of_parts_that_nobody_reads(self):
        """As with ``include=``: one tensor's parts wait at most."""
        weights = weights_of(make("qwen3_moe"))
        values = checkpoint_of(make("qwen3_moe")).convert(weights)
        for key in [key for key in values if "experts.0.gate_proj" in key]:
            values[key].read()
        assert sum(len(weight.alive) for weight in weights.values()) == 1

    def test_a_second_pass_reads_anew(self):
        """The first was given up half-way, and the trainer went on since."""
        model = make("qwen3_moe")
        values = checkpoint_of(model).convert(weights_of(model))
        keys = [key for key in values if "layers.0.mlp.experts" in key]
        for key in keys[:3]:
            values[key].read()
        with torch.no_grad():
            model.model.layers[0].mlp.experts.gate_up_proj.fill_(7)
        assert all(values[key].read().eq(7).all() for key in keys if "down" not in key)

    def test_a_weight_that_is_not_what_it_said(self):
        model = make("qwen3_moe")
        weights = weights_of(model)
        name = "model.layers.0.mlp.experts.gate_up_proj"
        values = checkpoint_of(model).convert(weights)
        weights[name]._tensor = torch.ones(4, 48, 31)
        with pytest.raises(ws.SourceError, match=r"float32\[4, 48, 31\].*float32\[4, 48, 32\]"):
            values["model.layers.0.mlp.experts.0.gate_proj.weight"].read()

    @pytest.mark.parametrize("cut", ["rows", "columns", "flat"])
    @pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "qwen3_next", "ernie4_5_vl_moe"])
    def test_all_ranks_together_write_each_element_once(self, name, cut):
        model = make(name)
        expected = checkpoint_of(model).convert(state_of(model))
        written = {key: torch.zeros(value.shape) for key, value in expected.items()}
        times = {key: torch.zeros(value.shape) for key, value in expected.items()}
        unknown = []
        for rank in range(3):
            ours = weights_of(model, lambda tensor, r=rank: Shard(tensor, r, 3, cut))
            values = checkpoint_of(model).convert(ours)
            pieces = {key: value.pieces() for key, value in values.items()}
            unknown.append([key for key in pieces if pieces[key] is None])
            for key, held in pieces.items():
                for piece in held or ():
                    piece.place(written[key]).copy_(piece.tensor)
                    piece.place(times[key]).add_(1)
        assert unknown[0] == unknown[1] == unknown[2]
        assert len(unknown[0]) < len(values) / 4
        assert not [key for key in unknown[0] if name == "qwen3_moe"]
        for key in set(values) - set(unknown[0]):
            assert times[key].eq(1).all()
            assert_same(written[key], expected[key])

    def test_a_part_of_another_shape_is_gathered(self):
        """A block of rows of the whole is no block of it."""
        model = converting(lambda tensor: tensor.flatten(1))
        model.model.norm.weight = nn.Parameter(torch.randn(4, 8, 2))
        ours = weights_of(model, lambda tensor: Shard(tensor, 0, 3, "rows"))
        values = checkpoint_of(model).convert(ours)
        assert values["final_norm.weight"].pieces() is None
        assert_same(values["final_norm.weight"].read(), model.model.norm.weight.flatten(1))


class Shard(Stored):
    """What one rank of several holds: rows, columns, or a range of all elements."""

    def __init__(self, tensor, rank, size, cut):
        super().__init__(tensor)
        self._rank, self._size, self._cut = rank, size, cut

    def pieces(self):
        tensor = self._tensor.detach()
        if self._cut == "flat":
            tensor = tensor.reshape(-1)
        dimension = tensor.dim() - 1 if self._cut == "columns" else 0
        step = -(-tensor.shape[dimension] // self._size)
        begin = min(step * self._rank, tensor.shape[dimension])
        length = min(step, tensor.shape[dimension] - begin)
        if length == 0:
            return []
        offsets = [0] * tensor.dim()
        offsets[dimension] = begin
        piece = tensor.narrow(dimension, begin, length)
        return [Piece(piece, tuple(tensor.shape), tuple(offsets))]


class Operation(loading.ConversionOps):
    """An operation of a model that nobody has heard of."""

    def __init__(self, function):
        self.function = function

    def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
        ((_, tensors),) = input_dict.items()
        return {target_patterns[0]: self.function(tensors[0])}

    @property
    def reverse_op(self):
        return self


def converting(function):
    """A model whose conversion does this with one of its tensors."""
    model = make("llama")
    operation = Operation(function)
    model._weight_conversions = [loading.WeightConverter("final_norm", "model.norm", [operation])]
    return model


class TestConversionsOfAnyKind:
    @pytest.mark.parametrize(
        "function",
        [
            lambda tensor: tensor * 2,
            lambda tensor: tensor.contiguous().add_(0) * 1,
            lambda tensor: tensor.clone().mul_(2),
            lambda tensor: torch.empty_like(tensor).copy_(tensor),
            lambda tensor: tensor.view(4, 8).t().contiguous().view(-1),
            lambda tensor: tensor.flip(0),
            lambda tensor: tensor.to(torch.float64),
            lambda tensor: tensor.view(torch.int32),
            lambda tensor: torch.complex(tensor[:16], tensor[16:]).conj().imag,
        ],
        ids=["*", "0", "in place", "copy_", "t", "flip", "to", "view", "conj"],
    )
    def test_values_are_those_of_the_conversion(self, function, tmp_path):
        model = converting(function)
        if "add_" in function.__code__.co_names:
            with pytest.raises(ws.SourceError, match="writes into the model's own"):
                as_source(model).manifest()
            return
        check = unchanged(model)
        tensors = sent(model)
        check()
        assert_same(tensors["final_norm.weight"], function(model.model.norm.weight.detach()))

    def test_a_conversion_that_needs_data(self):
        with pytest.raises(ws.SourceError, match=r"conversion of LlamaForCausalLM .* failed"):
            as_source(converting(lambda tensor: tensor[: int(tensor.sum())])).manifest()

    def test_a_conversion_that_needs_nothing(self):
        with pytest.raises(ws.SourceError, match=r"'final_norm.weight' is made of nothing"):
            as_source(converting(lambda tensor: torch.zeros(3))).manifest()

    def test_what_unpacks_a_quantised_checkpoint_is_not_reverted(self):
        """Such a conversion has no reverse. What is sent is not packed."""

        class Unpack(Operation):
            @property
            def reverse_op(self):
                raise NotImplementedError

        model = make("llama")
        unpack = loading.WeightConverter(["weight.scale", "weight"], "weight", [Unpack(None)])
        rename = loading.WeightRenaming("final_norm", "model.norm")
        model._weight_conversions = [unpack, rename]
        expected = {name.replace("model.norm", "final_norm") for name in model.state_dict()}
        assert set(sent(model)) == expected

    def test_a_tensor_that_is_converted_otherwise_when_it_is_alone(self, tmp_path):
        """Some names are changed only where another one is."""
        model = make("llama")
        double = Operation(lambda tensor: tensor * 2)
        model._weight_conversions = [
            loading.GroupWeightRename(
                ["model.first_embedding", "model.blocks"], ["model.embed_tokens", "model.layers"]
            ),
            loading.WeightConverter("mlp.gate_proj", "mlp.gate_proj", [double]),
        ]
        tensors = sent(model)
        assert_all_same(tensors, saved(model, tmp_path))
        weight = model.model.layers[1].mlp.gate_proj.weight
        assert_same(tensors["model.blocks.1.mlp.gate_proj.weight"], weight * 2)

    def test_a_conjugate(self):
        """Its elements are not those that lie in the model's memory."""
        model = converting(torch.conj)
        weight = torch.randn(32, dtype=torch.complex64)
        model.model.norm.weight = nn.Parameter(weight)
        assert_same(sent(model)["final_norm.weight"], weight.conj().resolve_conj())


def test_the_conversion_runs_once(monkeypatch):
    """Later updates follow what the first has learnt."""
    model = make("qwen3_moe")
    source = as_source(model)
    first = source.manifest()
    monkeypatch.setattr(loading, "revert_weight_conversion", None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.detach() + 1
    assert source.manifest() == first
    packed = model.state_dict()["model.layers.0.mlp.experts.down_proj"]
    sent_now = dict(source.tensors())["model.layers.0.mlp.experts.2.down_proj.weight"]
    assert_same(sent_now, packed[2])


def test_a_changed_model_is_looked_at_anew():
    model = make("qwen3_moe")
    source = as_source(model)
    assert source.manifest().spec("lm_head.weight").shape == (100, 32)
    model.resize_token_embeddings(70)
    assert source.manifest().spec("lm_head.weight").shape == (70, 32)
    model.half()
    assert {spec.dtype for spec in source.manifest().tensors} == {torch.float16}


def test_changed_strides_are_seen():
    model = make("qwen3_moe")
    source = as_source(model)
    before = sent(model)
    assert source.manifest()
    for layer in model.model.layers:
        packed = layer.mlp.experts.gate_up_proj.detach()
        layer.mlp.experts.gate_up_proj = nn.Parameter(packed.mT.contiguous().mT)
    assert_all_same(dict(source.tensors()), before)


def test_the_order_is_the_models():
    """What gathers its parameters unit by unit does so once."""
    names = list(as_source(make("qwen3_moe")).manifest().by_name)
    assert names[0] == "model.embed_tokens.weight"
    assert names[-1] == "lm_head.weight"
    layers = [name.split(".")[2] for name in names if ".layers." in name]
    assert layers == sorted(layers)
