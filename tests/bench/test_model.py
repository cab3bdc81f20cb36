"""The shapes of a user's model."""

import json

import pytest
import torch
from safetensors.torch import save_file

from weightsync.bench.model import weights_of
from weightsync.errors import SourceError


def test_a_configuration_gives_the_shapes_of_its_checkpoint(tmp_path):
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=100, tie_word_embeddings=True, dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path / "model")
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "saved")
    configured = weights_of(tmp_path / "model" / "config.json")
    assert configured == weights_of(tmp_path / "model")
    assert sorted(configured.specs, key=str) == sorted(
        weights_of(tmp_path / "saved").specs, key=str
    )
    assert configured.title.startswith("model, ")


def test_headers_of_a_checkpoint_give_its_shapes(tmp_path):
    save_file({"a": torch.zeros(3, 2, dtype=torch.float8_e4m3fn)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros((), dtype=torch.int64)}, tmp_path / "two.safetensors")
    found = weights_of(tmp_path)
    assert [(s.name, s.shape, s.dtype, s.nbytes) for s in found.specs] == [
        ("a", (3, 2), "float8_e4m3fn", 6),
        ("b", (), "int64", 8),
    ]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        b"\2\0\0\0\0\0\0\0[]",
        b"\x0d\0\0\0\0\0\0\0" + b'{"a":{"x":1}}',
        (lambda text: len(text).to_bytes(8, "little") + text)(
            json.dumps({"a": {"dtype": "F32", "shape": [-1]}}).encode()
        ),
    ],
)
def test_garbage_is_refused_by_its_name(tmp_path, content):
    (tmp_path / "bad.safetensors").write_bytes(content)
    with pytest.raises(SourceError, match=r"bad\.safetensors is not a file of safetensors"):
        weights_of(tmp_path)


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(SourceError, match=r"neither a config\.json nor a checkpoint"):
        weights_of(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SourceError, match="transformers makes no model of it"):
        weights_of(tmp_path)
