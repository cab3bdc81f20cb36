"""Sets of weights that are hard to carry, and the comparison of what arrived with what was sent.

Each function makes the same set every time, so that two processes can agree on it without a word.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from weightsync.manifest import DTYPE_NAMES

Weights = dict[str, torch.Tensor]

_EVERYDAY = (
    "float32", "float64", "float16", "bfloat16",
    "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "bool", "complex64", "complex128",
)  # fmt: skip


# -------------------------------------------------------------------- weights that show tearing


def constants(value: int, nbytes: int = 1 << 20, tensors: int = 4) -> Weights:
    """Tensors that all hold one number, in every element."""
    count = max(1, nbytes // tensors // 4)
    return {f"layer{n}": torch.full((count,), value, dtype=torch.int32) for n in range(tensors)}


def fill(weights: Mapping[str, torch.Tensor], value: int) -> None:
    for tensor in weights.values():
        tensor.fill_(value)


def value_of(weights: Mapping[str, torch.Tensor]) -> int | str:
    """The one number that they hold; a text that shows the mix if they are torn."""
    found = sorted({int(n) for t in weights.values() for n in (t.min(), t.max())})
    return found[0] if len(found) == 1 else f"torn: {found}"


# -------------------------------------------------------------------- dtypes and values


def patterns(dtype: torch.dtype) -> torch.Tensor:
    """A tensor with every pattern of the bits that matter most: exponents, signs, NaN payloads."""
    if dtype == torch.bool:
        return torch.arange(1000) % 3 == 0
    size = dtype.itemsize
    steps = torch.arange(1 << (8 * min(size, 2)), dtype=torch.int64)
    columns = [(steps >> (8 * min(n, 1))) & 0xFF for n in range(size)]
    data = torch.stack(columns, dim=1).to(torch.uint8).reshape(-1)
    return data.view(dtype)


def every_dtype() -> Weights:
    """Every everyday dtype that this torch has, in every bit pattern of two bytes."""
    dtypes = {name: getattr(torch, name) for name in _EVERYDAY if hasattr(torch, name)}
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, 5e-324]
    return {
        **{name: patterns(dtype) for name, dtype in dtypes.items()},
        **{f"special {n}": torch.tensor(special, dtype=dtypes[n]) for n in ("float32", "float64")},
    }


def odd_dtypes() -> list[str]:
    """Dtypes that torch has and few can carry: bits, packed halves of bytes, half complex."""
    return sorted({*DTYPE_NAMES.values()} - {*_EVERYDAY})


def of_odd_dtypes(*names: str) -> Weights:
    odd = {name: torch.arange(64, dtype=torch.uint8).view(getattr(torch, name)) for name in names}
    return {"before": torch.arange(7.0), **odd, "after": torch.arange(5)}


# -------------------------------------------------------------------- shapes


def shapes() -> Weights:
    """0-dim, empty, of one element, of odd length, of many dimensions; small ones between."""
    sizes: list[tuple[int, ...]] = [
        (), (0,), (1,), (0, 3), (3, 0), (63,), (64,), (65,), (2, 0, 4), (1, 1), (),
        (3, 5, 7), (1,) * 20 + (2, 3), (4097,), ((1 << 20) + 3,), (1,),
    ]  # fmt: skip
    weights = {}
    for number, size in enumerate(sizes):
        count = math.prod(size)
        dtype = (torch.uint8, torch.float32, torch.bfloat16)[number % 3]
        weights[f"{number} {size}"] = (torch.arange(count) % 251 + number).to(dtype).view(size)
    return weights


def strided() -> Weights:
    """Views whose elements do not lie one after the other."""

    def numbers(*shape: int) -> torch.Tensor:
        return torch.arange(float(math.prod(shape))).reshape(shape)

    return {
        "transposed": numbers(5, 7).t(),
        "columns": numbers(6, 8)[:, ::2],
        "convolution": numbers(2, 3, 4, 5).permute(2, 0, 3, 1),
        "expanded": numbers(4, 1).expand(4, 6),
        "scalar": torch.tensor(3.5).expand(3, 3),
        "overlapping": numbers(10).unfold(0, 4, 2),
        "offset": numbers(100)[3:23].view(4, 5),
        "misaligned": torch.arange(41, dtype=torch.uint8)[1:],
        "conjugated": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "negated": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    }


def large(nbytes: int) -> Weights:
    """One tensor of that many bytes between small ones."""
    return {
        "before": torch.tensor(1.5),
        "large": (torch.arange(nbytes, dtype=torch.int32) * 31).to(torch.uint8),
        "after": torch.arange(3),
    }


def many(count: int) -> Weights:
    """Tensors of 1 kB each."""
    return {f"layers.{n}.weight": torch.full((256,), float(n)) for n in range(count)}


# -------------------------------------------------------------------- names


HOSTILE_NAMES = (
    "a/b", "../x", "../../../x", "/etc/x", "n" * 300, "a\0b", "CON", "größe 日本", ".", "..", " ",
    "\n", "*", "~", "%s%n", "${HOME}", "a\\b", "\x1b[31m", "__class__", "__metadata__", "tensors",
    "model.safetensors", "head.json", "a", "A",
)  # fmt: skip


def named(*names: str) -> Weights:
    return {name: torch.full((3,), float(n)) for n, name in enumerate(names)}


# -------------------------------------------------------------------- ties


class Tied(nn.Module):
    """An embedding and the output layer that is the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 32, bias=False)
        self.head.weight = self.embedding.weight
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) + number)


# -------------------------------------------------------------------- streams


class Reordered:
    """A stream that comes in another order each time: names count, and never the position."""

    def __init__(self) -> None:
        self.weights = {f"t{n}": torch.full((16,), float(n)) for n in range(10)}
        self._passes = 0

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._passes += 1
        names = sorted(self.weights, reverse=self._passes % 2 == 0)
        return ((name, self.weights[name]) for name in names)


class Counted:
    """A stream of tensors made one by one, which counts how many of them are alive.

    Attributes:
        most: bytes alive at one time, at most.
    """

    def __init__(self, tensors: int, nbytes: int) -> None:
        self._tensors = tensors
        self._nbytes = nbytes
        self._alive = 0
        self.most = 0

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(self._tensors):
            tensor = torch.full((self._nbytes,), number % 251, dtype=torch.uint8)
            self._alive += self._nbytes
            self.most = max(self.most, self._alive)
            weakref.finalize(tensor.untyped_storage(), self._gone)
            yield f"t{number}", tensor
            del tensor

    def _gone(self) -> None:
        self._alive -= self._nbytes


def counted(tensors: int, nbytes: int) -> Weights:
    return dict(Counted(tensors, nbytes)())


class Breaking:
    """A stream that breaks off half-way, when it is read for its values."""

    def __init__(self, weights: Weights, words: str = "the disk of the trainer is gone") -> None:
        self._weights = weights
        self._words = words
        self._passes = 0

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._passes += 1
        for number, entry in enumerate(self._weights.items()):
            if self._passes > 1 and number == len(self._weights) // 2:
                raise RuntimeError(self._words)
            yield entry


# -------------------------------------------------------------------- comparison


def room_for(weights: Mapping[str, torch.Tensor]) -> Weights:
    """Tensors of the same names, shapes and dtypes, all bytes of which are wrong."""
    return {name: _blank(tensor) for name, tensor in weights.items()}


def _blank(tensor: torch.Tensor) -> torch.Tensor:
    data = ~bytes_of(tensor)
    if tensor.dtype == torch.bool:
        data &= 1
    return data.view(tensor.dtype).view(tensor.shape)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor in row-major order, whatever its dtype and strides."""
    tensor = tensor.detach()
    if tensor.dtype.itemsize == 1:  # some of them have no copy kernel of their own
        tensor = tensor.view(torch.uint8)
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def differences(
    one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]
) -> dict[str, str]:
    """In which names two sets differ, and how; bit by bit, NaN payloads and signs of zero too."""
    found = {}
    for name in {**one, **other}:
        if name not in one or name not in other:
            found[name] = "only one has it"
        elif (one[name].dtype, one[name].shape) != (other[name].dtype, other[name].shape):
            found[name] = f"{_kind(one[name])} here, {_kind(other[name])} there"
        elif not torch.equal(bytes_of(one[name]), bytes_of(other[name])):
            found[name] = "other bytes"
    return found


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}"
