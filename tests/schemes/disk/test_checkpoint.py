"""Version directories are checkpoints: for safetensors, for transformers, and for us."""

import json
import struct

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen2Config

from tests.conftest import assert_all_same, assert_same, copy_of
from weightsync.manifest import DTYPES

CARRIED = [
    "bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16",
    "bfloat16", "float32", "float64", "complex64", "float8_e4m3fn", "float8_e5m2",
]  # fmt: skip


def some_bytes(dtype, count=24):
    return torch.arange(count * dtype.itemsize).to(torch.uint8).view(dtype)


def of_every_dtype():
    return {name: some_bytes(dtype) for name, dtype in DTYPES.items()}


def llama(**changes):
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, **changes
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def qwen_with_ties():
    config = Qwen2Config(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def header_of(path):
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return length, json.loads(file.read(length))


def publish(run, weights, **options):
    report = run.sender(**options).update_weights(weights, version=1)
    return run.folder(report.version)


# -------------------------------------------------------------------- safetensors


def test_d3_safetensors_reads_every_dtype_it_has(run):
    weights = of_every_dtype()
    loaded = load_file(publish(run, weights) / "model.safetensors")
    assert set(loaded) == set(weights)
    for name in CARRIED:
        assert_same(loaded[name], weights[name])


def test_dtypes_that_safetensors_does_not_have_are_bytes_to_others_and_themselves_to_us(run):
    weights = of_every_dtype()
    folder = publish(run, weights)
    with run.lease(run.scheme().newest()) as snapshot:
        assert_all_same({n: copy_of(t) for n, t in snapshot}, weights)
    loaded = load_file(folder / "model.safetensors")
    for name in set(weights) - set(CARRIED):
        assert loaded[name].dtype == torch.uint8
        assert torch.equal(loaded[name], weights[name].view(torch.uint8).reshape(-1))


def test_tensors_begin_at_a_page_and_at_multiples_of_their_elements(run):
    weights = {f"{name}{n}": some_bytes(d, 3 + n) for name, d in DTYPES.items() for n in range(2)}
    length, header = header_of(publish(run, weights) / "model.safetensors")
    assert (8 + length) % 4096 == 0
    ends = []
    for name, entry in header.items():
        if name != "__metadata__":
            assert entry["data_offsets"][0] % weights[name].dtype.itemsize == 0
            ends.append(tuple(entry["data_offsets"]))
    ends.sort()
    assert [begin for begin, _ in ends] == [0, *(end for _, end in ends[:-1])]  # no holes


@pytest.mark.parametrize("name", ["__metadata__", "a/b", "../x", "n" * 300, "a\0b", "", "größe"])
def test_x4_names_are_only_json(run, name):
    """They never become paths; what the format does not allow has another name in it."""
    weights = {"w": torch.ones(3), name or "x": torch.zeros(2)}
    folder = publish(run, weights)
    with run.lease(run.scheme().newest()) as snapshot:
        assert_all_same({n: copy_of(t) for n, t in snapshot}, weights)
    assert_same(load_file(folder / "model.safetensors")["w"], weights["w"])
    assert {path.parent for path in run.path.rglob("*")} <= {run.path, folder}
    assert sorted(path.name for path in folder.iterdir()) == [
        "model.safetensors", "weightsync.digests", "weightsync.json", "weightsync.layout.json",
        "weightsync.lock",
    ]  # fmt: skip


def test_a_name_that_is_no_utf_8_keeps_nobody_from_reading(run):
    weights = {"w\udc80": torch.ones(3), "w\\udc80": torch.zeros(3)}
    folder = publish(run, weights)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert len(file.keys()) == 2
    with run.lease(run.scheme().newest()) as snapshot:
        assert_all_same({n: copy_of(t) for n, t in snapshot}, weights)


def test_shards_are_whole_tensors_of_at_most_so_many_bytes(run):
    weights = {f"w{n}": torch.full((200_000 + n,), float(n)) for n in range(7)}
    weights["large"] = torch.ones(1_000_000)
    folder = publish(run, weights, shard_bytes=2 << 20)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in weights.values())
    loaded = {}
    for file in sorted(set(index["weight_map"].values())):
        shard = load_file(folder / file)
        assert {name for name, where in index["weight_map"].items() if where == file} == set(shard)
        assert sum(t.nbytes for t in shard.values()) <= 2 << 20 or set(shard) == {"large"}
        loaded |= shard
    assert len(set(index["weight_map"].values())) == 5
    assert_all_same(loaded, weights)
    with run.lease(run.scheme().newest()) as snapshot:
        snapshot.verify()
        assert_all_same({n: copy_of(t) for n, t in snapshot}, weights)


# -------------------------------------------------------------------- transformers


@pytest.mark.parametrize("shard_bytes", [1 << 20, 5_000_000_000])
@pytest.mark.parametrize("make", [llama, qwen_with_ties])
def test_from_pretrained_loads_a_version(run, make, shard_bytes):
    """T1: with ties as save_pretrained leaves them."""
    model = make()
    folder = publish(run, model, shard_bytes=shard_bytes)
    again, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(again) is type(model)
    assert_all_same(again.state_dict(), model.state_dict())
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]


def test_the_files_have_the_tensors_that_save_pretrained_writes(run, tmp_path):
    model = qwen_with_ties()
    model.save_pretrained(tmp_path / "saved")
    folder = publish(run, model)
    assert_all_same(
        load_file(folder / "model.safetensors"), load_file(tmp_path / "saved/model.safetensors")
    )
    for name in ("config.json", "generation_config.json"):
        assert json.loads((folder / name).read_text()) == json.loads(
            (tmp_path / "saved" / name).read_text()
        )


def test_the_configuration_says_the_dtype_that_was_sent(run):
    model = llama()
    before = model.config.to_dict()
    sender = run.scheme().create_sender(model, dtype=torch.bfloat16)
    with sender:
        sender.connect()
        folder = run.folder(sender.update_weights(version=1).version)
    assert AutoConfig.from_pretrained(folder).dtype == torch.bfloat16
    assert model.config.to_dict() == before
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16


def test_c6_another_version_in_the_same_place_is_another_model(run, tmp_path):
    """A directory that a link leads to is loaded twice in one process."""
    link = tmp_path / "current"
    sender = run.sender()
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = llama()
        version = sender.update_weights(model, version=seed).version
        link.unlink(missing_ok=True)
        link.symlink_to(run.folder(version))
        assert_all_same(AutoModelForCausalLM.from_pretrained(link).state_dict(), model.state_dict())
