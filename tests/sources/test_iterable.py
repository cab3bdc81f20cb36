import pytest
import torch

from weightsync.errors import SourceError
from weightsync.manifest import Manifest
from weightsync.source import SourceOptions, as_source


def stream():
    yield "a", torch.ones(2)
    yield "b", torch.zeros(3)


class Fresh:
    def __iter__(self):
        return stream()


@pytest.mark.parametrize("weights", [stream, Fresh(), list(stream()), tuple(stream())])
def test_starts_afresh_each_time(weights):
    source = as_source(weights)
    assert source.walked
    assert source.inventory().values == [None, None]
    for _ in range(2):
        assert source.manifest().names() == ["a", "b"]
        assert [name for name, _ in source.tensors()] == ["a", "b"]


def test_one_shot_iterators_need_a_manifest():
    with pytest.raises(SourceError, match="manifest="):
        as_source(stream())
    manifest = Manifest.build([("a", torch.float32, (2,)), ("b", torch.float32, (3,))])
    source = as_source(stream(), SourceOptions(manifest=manifest))
    assert source.manifest() == manifest
    assert [name for name, _ in source.tensors()] == ["a", "b"]


def test_a_name_twice():
    with pytest.raises(SourceError, match="'a'"):
        as_source([("a", torch.ones(2)), ("a", torch.ones(2))]).manifest()


def test_rename_and_cast():
    options = SourceOptions(dtype=torch.float16, rename=str.upper)
    source = as_source(stream, options)
    assert source.manifest().names() == ["A", "B"]
    assert source.manifest().spec("A").dtype == torch.float16
    assert [name for name, _ in source.tensors()] == ["A", "B"]


def test_an_error_of_the_stream_comes_through():
    def broken():
        yield "a", torch.ones(2)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        as_source(broken).manifest()


def test_one_tensor_is_held_at_a_time():
    """G6: describing the stream does not collect it."""
    import weakref

    alive = weakref.WeakSet()
    most = 0

    def counted():
        nonlocal most
        for index in range(50):
            tensor = torch.ones(10)
            alive.add(tensor)
            most = max(most, len(alive))
            yield f"t{index}", tensor

    as_source(counted).manifest()
    assert most <= 3
