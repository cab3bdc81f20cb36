"""Which source is chosen, and what is refused by name (promise 9)."""

import pytest
import torch
from torch import nn

from weightsync.errors import SourceError
from weightsync.manifest import DTYPES, Manifest
from weightsync.source import SourceOptions, WeightSource, as_source, as_value


class Own(WeightSource):
    def manifest(self):
        return Manifest.build([])

    def tensors(self):
        return iter(())


class Dispatching(torch.Tensor):
    """Like DTensor's relatives and torchao's: the values are not in the bytes it seems to have."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def freed():
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def placeholder():
    tensor = nn.Parameter(torch.empty(0))
    tensor.ds_id, tensor.ds_status = 3, "NOT_AVAILABLE"
    return tensor


class Params4bit(nn.Parameter):
    """As in bitsandbytes, before its first forward pass packs it."""


def packed():
    tensor = nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    tensor.quant_state = object()
    return tensor


def sharded():
    tensor = torch.ones(4)
    tensor.full_tensor = lambda: torch.ones(8)
    return tensor


UNSENDABLE = {
    "meta": (lambda: torch.empty(3, device="meta"), "meta"),
    "empty meta": (lambda: torch.empty(0, device="meta"), "meta"),
    "sparse coo": (lambda: torch.eye(3).to_sparse(), "sparse_coo"),
    "sparse csr": (lambda: torch.eye(3).to_sparse_csr(), "sparse_csr"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), ""),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "",
    ),
    "mkldnn": (lambda: torch.ones(3).to_mkldnn(), "layout"),
    "lazy parameter": (nn.UninitializedParameter, "lazy"),
    "lazy buffer": (nn.UninitializedBuffer, "lazy"),
    "quantised": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), "quint8"),
    "freed": (freed, "freed"),
    "zero-3": (placeholder, "ZeRO-3"),
    "bitsandbytes": (packed, "packed"),
    "dtensor": (sharded, "sharded"),
    "subclass": (lambda: torch.ones(3).as_subclass(Dispatching), "Dispatching"),
    "list": (lambda: [1.0, 2.0], "list"),
    "none": (lambda: None, "NoneType"),
    "numpy": (lambda: torch.ones(3).numpy(), "ndarray"),
}


@pytest.mark.parametrize("kind", UNSENDABLE)
@pytest.mark.filterwarnings("ignore:.*nested|.*CSR|.*quantiz.*")
def test_refused_by_name(kind):
    """W10 and its kind: no tensor whose bytes are not its values, and the name is said."""
    make, words = UNSENDABLE[kind]
    with pytest.raises(SourceError, match=rf"'layer\.odd'.*{words}"):
        as_value("layer.odd", make())


@pytest.mark.parametrize("kind", UNSENDABLE)
@pytest.mark.filterwarnings("ignore:.*nested|.*CSR|.*quantiz.*")
def test_refused_in_every_source(kind):
    make, _ = UNSENDABLE[kind]
    weights = {"good": torch.ones(2), "layer.odd": make()}
    for source in (as_source(weights), as_source(list(weights.items()))):
        with pytest.raises(SourceError, match=r"layer\.odd"):
            source.manifest()


def test_an_unsendable_tensor_that_comes_later_is_refused_too():
    """The checks of the last update are reused only while nothing changed."""
    weights = {"w": torch.ones(4), "v": torch.ones(4)}
    source = as_source(weights)
    source.manifest()
    for kind in UNSENDABLE:
        weights["w"] = UNSENDABLE[kind][0]()
        with pytest.raises(SourceError, match="'w'"):
            source.manifest()
    weights["w"] = torch.ones(4)
    source.manifest()
    weights["w"].untyped_storage().resize_(0)
    with pytest.raises(SourceError, match="freed"):
        source.manifest()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(()),
        torch.ones(0),
        torch.ones(0, 3),
        nn.Parameter(torch.ones(3)),
        nn.Buffer(torch.ones(3)),
        torch.ones(3, 4).t(),
        torch.ones(1).expand(5),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.ones(3).as_subclass(type("Named", (torch.Tensor,), {})),
    ],
    ids=lambda tensor: f"{type(tensor).__name__}{list(tensor.shape)}",
)
def test_sendable(tensor):
    assert as_value("w", tensor) is tensor


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_is_sendable(name):
    as_value("w", torch.zeros(16, dtype=torch.uint8).view(DTYPES[name]))


@pytest.mark.parametrize(
    "weights",
    [None, 5, 1.5, "model.pt", b"bytes", object(), torch.ones(3), nn.Linear, int],
    ids=repr,
)
def test_not_a_source(weights):
    with pytest.raises(SourceError, match="is not a source of weights"):
        as_source(weights)


@pytest.mark.parametrize(
    "weights",
    [
        [torch.ones(2), torch.ones(2)],
        [torch.ones(3)],
        [("a", torch.ones(2), 5)],
        [("a",)],
        [5],
        ["ab"],
        [(5, torch.ones(2))],
        [(None, torch.ones(2))],
        lambda: 5,
        lambda: None,
    ],
)
def test_a_stream_of_something_else(weights):
    with pytest.raises(SourceError):
        as_source(weights).manifest()


def test_chosen():
    assert as_source(own := Own()) is own
    model = nn.Linear(2, 3)
    for weights in (
        model,
        dict(model.named_parameters()),
        list(model.named_parameters()),
        model.named_parameters,
        tuple(model.named_parameters()),
    ):
        assert as_source(weights).manifest().names() == ["weight", "bias"]


def test_a_source_is_not_renamed_or_cast_behind_its_back():
    """Options that a source of the user's own could not follow are refused, not ignored."""
    with pytest.raises(SourceError, match="dtype"):
        as_source(Own(), SourceOptions(dtype=torch.bfloat16))
    with pytest.raises(SourceError, match="rename"):
        as_source(Own(), SourceOptions(rename=str.upper))


@pytest.mark.parametrize("dtype", ["bfloat16", torch.int8, torch.bool, torch.complex64, 16, float])
def test_dtype_is_a_floating_point_one(dtype):
    with pytest.raises(SourceError, match="dtype"):
        SourceOptions(dtype=dtype)


def test_only_floating_point_is_cast():
    """D1: the manifest names the dtype that is sent."""
    options = SourceOptions(dtype=torch.bfloat16)
    for dtype in DTYPES.values():
        wire = torch.bfloat16 if dtype.is_floating_point else dtype
        assert options.wire_dtype("w", dtype) == wire
    assert SourceOptions().wire_dtype("w", torch.float64) == torch.float64


def test_an_exemption_from_nothing():
    with pytest.raises(SourceError, match="keep_dtype= exempts from dtype="):
        SourceOptions(keep_dtype=["*"])
