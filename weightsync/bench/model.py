"""The tensors of a user's model by shapes alone: of a configuration, or a checkpoint's headers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch

from weightsync.bench.weights import Spec, WeightSet, size_text, torch_dtype
from weightsync.errors import SourceError

_HEADER = 100 << 20
"""Bytes that a header of safetensors may have, as that library itself says."""

_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


def weights_of(path: Path) -> WeightSet:
    """Shapes and dtypes; no weights are read or made.

    Args:
        path: a checkpoint's folder, a ``.safetensors`` file, or a transformers ``config.json``.

    Raises:
        SourceError: it is none of these, or not readable as such.
    """
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    if path.suffix == ".safetensors":
        files = [path]
    if not files:
        path = path / "config.json" if path.is_dir() else path
    if not files and not path.is_file():
        raise SourceError(f"{path}: neither a config.json nor a checkpoint in safetensors is there")
    specs = tuple(spec for file in files for spec in _header(file)) or tuple(_configured(path))
    title = path.parent.name if path.name == "config.json" else path.name
    made = WeightSet(title or str(path), specs)
    return WeightSet(f"{title}, {size_text(made.nbytes)} in {len(specs):,} tensors", specs)


def _header(file: Path) -> Iterator[Spec]:
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 2 <= length <= _HEADER:
                raise ValueError(f"a header of {length} bytes")
            entries = json.loads(opened.read(length))
        for name, entry in entries.items():
            if name != "__metadata__":
                yield _spec(name, entry["dtype"], entry["shape"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SourceError(f"{file} is not a file of safetensors: {error!r:.200}") from None


def _spec(name: str, dtype: str, shape: list[int]) -> Spec:
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"tensor {name!r:.80} has the shape {shape!r:.80}")
    torch_dtype(_DTYPES[dtype])
    return Spec(name, tuple(shape), _DTYPES[dtype])


def _configured(path: Path) -> Iterator[Spec]:
    """What transformers would make of a configuration, on the meta device."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise SourceError(
            f"{path}: transformers is not installed, which alone knows the shapes of a "
            "configuration; a checkpoint in safetensors needs nothing"
        ) from None
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    except Exception as error:  # what comes of a foreign configuration is anybody's guess
        raise SourceError(f"{path}: transformers makes no model of it: {error!s:.300}") from None
    # Tied tensors once. Buffers that are computed from the configuration are not in checkpoints.
    kept = set(model.state_dict())
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in named:
        if name in kept and math.prod(tensor.shape):
            yield Spec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
