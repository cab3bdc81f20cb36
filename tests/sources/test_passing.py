"""Streams that can be walked once, a new one for each update."""

import weakref

import pytest
import torch

import weightsync as ws
from tests.conftest import assert_all_same, read
from weightsync.sources.passing import PassingStreams


class Streams:
    """Generators of some tensors, which remember how far they were walked and what is alive."""

    def __init__(self, count=4):
        self.count = count
        self.made = []
        self.most = 0

    def __call__(self, value):
        for number in range(self.count):
            tensor = torch.full((1000,), float(value + number), requires_grad=True)
            self.made.append(weakref.ref(tensor))
            self.most = max(self.most, sum(made() is not None for made in self.made))
            yield f"t{number}", tensor
            del tensor

    def expected(self, value):
        return {f"t{n}": torch.full((1000,), float(value + n)) for n in range(self.count)}


def publish(sender, streams, stream, version=None):
    with torch.no_grad(), streams.source(stream) as source:
        return sender.update_weights(source, version=version)


def test_what_is_streamed_arrives_the_first_time_and_after(ends):
    sender, streams, make = ends.sender(), PassingStreams(), Streams()
    for step in (1, 2, 3):
        assert publish(sender, streams, make(step), step).version.number == step
        assert_all_same(read(ends)[1], make.expected(step))


def test_only_the_first_stream_is_held(ends):
    """G6."""
    sender, streams, make = ends.sender(), PassingStreams(), Streams(20)
    publish(sender, streams, make(0))
    make.most = 0
    publish(sender, streams, make(1))
    assert make.most <= 2


def test_values_are_cast_the_first_time_and_after(ends):
    sender, streams, make = ends.sender(), PassingStreams(torch.bfloat16), Streams()
    for step in (1, 2):
        publish(sender, streams, make(step), step)
        expected = {name: t.bfloat16() for name, t in make.expected(step).items()}
        assert_all_same(read(ends)[1], expected)


def test_after_other_tensors_came_once_they_are_what_is_expected(ends):
    sender, streams = ends.sender(), PassingStreams()
    publish(sender, streams, Streams(4)(0))
    with pytest.raises(ws.SourceError, match="'t4' is not in the manifest"):
        publish(sender, streams, Streams(5)(1))
    more = Streams(5)
    publish(sender, streams, more(2))
    assert_all_same(read(ends)[1], more.expected(2))


@pytest.mark.parametrize("before", [0, 1])
def test_a_stream_is_walked_to_its_end_when_its_update_fails(ends, before):
    """H6: the other ranks make the rest together with this one."""
    sender, streams, make = ends.sender(), PassingStreams(), Streams()
    for step in range(before):
        publish(sender, streams, make(0), step)
    done = []

    def stream():
        yield "t0", torch.zeros(1000)
        yield "t1", torch.empty(7, device="meta")
        yield from make(2)
        done.append(True)

    with pytest.raises(ws.SourceError, match="'t1'"):
        publish(sender, streams, stream())
    assert done


def test_what_a_stream_raises_is_raised(ends):
    def stream():
        yield "t0", torch.zeros(2)
        raise OSError("a cable")

    with pytest.raises(OSError, match="a cable"):
        publish(ends.sender(), PassingStreams(), stream())


def test_two_tensors_of_one_name_are_refused(ends):
    stream = iter([("a", torch.zeros(1)), ("a", torch.zeros(2))])
    with pytest.raises(ws.SourceError, match="two tensors would be called 'a'"):
        publish(ends.sender(), PassingStreams(), stream)


@pytest.mark.parametrize("entry", [3, ("a",), (1, torch.zeros(1)), "ab"])
def test_an_entry_that_is_no_name_with_a_tensor_is_refused_in_words(entry):
    streams = PassingStreams()
    rest = iter([entry])
    with pytest.raises(ws.SourceError, match="the stream holds"), streams.source(rest):
        pass
