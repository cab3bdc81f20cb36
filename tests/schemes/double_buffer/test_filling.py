"""A version on its way into a slot, from a GPU and from memory.

The processor stands for the GPU: some of its tensors are taken for tensors of a device.
"""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import weightsync as ws
from tests.conftest import WAIT, assert_all_same, read
from weightsync.chunks import CHUNK
from weightsync.deadline import Deadline
from weightsync.device.host import HostDevice
from weightsync.download import Download, Downloads
from weightsync.errors import SourceError, WeightSyncError
from weightsync.schemes.double_buffer import generation
from weightsync.schemes.double_buffer.generation import flow_into
from weightsync.source import Inventory, Looked, as_source
from weightsync.transport import Crew
from weightsync.version import Version
from weightsync.weight import Piece, Weight


class Some(Downloads):
    """Takes one of so many tensors for a device's: with 1 all of them, with 0 none."""

    def __init__(self, each):
        super().__init__()
        self.download = Download(HostDevice(), 2 * CHUNK)
        self.each, self.number = each, itertools.count()

    def of(self, place, nbytes):
        return self.download if self.each and next(self.number) % self.each == 0 else None


def use(publisher, downloads):
    publisher._downloads = publisher._rows._downloads = downloads


@pytest.fixture
def publisher(run_dir):
    made = ws.DoubleBufferScheme(run_dir).create_publisher()
    made.open(Deadline(WAIT))
    yield made
    made.close()


def weights(value=0):
    generator = torch.Generator().manual_seed(value)
    sizes = [3, 0, 700, 1 << 18, 1 << 20, 5, 1 << 19, 0, 100, 33]
    made = {f"t{n}": torch.randn(size, generator=generator) for n, size in enumerate(sizes)}
    made["strided"] = torch.randn(400, 700, generator=generator).t()
    made["scalar"] = torch.tensor(value)
    return made


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("each", [0, 1, 2, 3])
def test_what_is_sent_arrives_wherever_it_lies(ends, publisher, run_dir, each, streamed):
    use(publisher, Some(each))
    held = weights()
    source = as_source((lambda: iter(held.items())) if streamed else held)
    for number in range(1, 5):
        version = Version(publisher.open(Deadline(1)), number)
        published = publisher.publish(version, source, Deadline(WAIT))
        assert published.notes == ()
        assert_all_same(read(ends)[1], held)  # verified, too
        for name, tensor in weights(number).items():
            held[name].copy_(tensor)
        if number == 3:
            held["t4"] = torch.randn(1 << 20)  # elsewhere, from now on


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("each", [0, 1, 2])
def test_readers_hear_how_far_it_is(publisher, each, streamed, monkeypatch):
    monkeypatch.setattr(generation, "PORTION", CHUNK)
    use(publisher, Some(each))
    held = weights()
    source = as_source((lambda: iter(held.items())) if streamed else held)
    heard = []
    monkeypatch.setattr(generation.Progress, "wrote", lambda _, upto: heard.append(upto))
    publisher.publish(Version(publisher.open(Deadline(1)), 1), source, Deadline(WAIT))
    nbytes = source.manifest().nbytes
    assert heard == sorted(heard)
    assert len(set(heard)) > 3
    assert max(heard) == nbytes


def test_a_tensor_that_cannot_be_copied_gives_the_version_up(ends, publisher):
    use(publisher, Some(1))
    version = publisher.open(Deadline(1))
    publisher.publish(Version(version, 1), as_source({"a": torch.ones(3)}), Deadline(WAIT))
    good = {"a": torch.zeros(1 << 20), "b": torch.zeros(4)}
    inventory = as_source(good).inventory()
    values = [good["a"], torch.zeros(4, dtype=torch.uint8).view(torch.int4)]
    broken = Inventory(inventory.manifest, values, inventory.addresses)
    with pytest.raises(SourceError, match="'b'"):
        publisher.publish(Version(version, 2), Looked(broken), Deadline(WAIT))
    assert read(ends)[1]["a"].eq(1).all()
    publisher.publish(Version(version, 3), as_source(good), Deadline(WAIT))
    assert_all_same(read(ends)[1], good)


class Rows(Weight):
    """Rows of a tensor, as one of two ranks holds them."""

    dtype = torch.float32

    def __init__(self, whole, upto, rank):
        self.shape = tuple(whole.shape)
        part, begin = (whole[:upto], 0) if rank == 0 else (whole[upto:], upto)
        self.piece = Piece(part.clone(), self.shape, (begin, *[0] * (whole.dim() - 1)))

    def read(self):
        raise AssertionError("rows are not gathered")

    def pieces(self):
        return [self.piece]


class Other(Crew):
    """The second rank, in this process."""

    def __init__(self, publisher, inventory):
        self.publisher, self.inventory = publisher, inventory

    def start(self, ticket):
        self.answer = self.publisher.contribute(ticket, self.inventory, Deadline(WAIT))

    def finish(self, deadline):
        return [self.answer]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("each", [0, 1, 2])
def test_ranks_write_their_rows(ends, publisher, run_dir, each, dtype):
    other = ws.DoubleBufferScheme(run_dir).create_publisher()
    use(publisher, Some(each))
    use(other, Some(each))
    sizes = [(8, 4), (7, 3), (1500, 1000), (5, 1), (3,), (900, 333)]
    for number in range(1, 4):
        generator = torch.Generator().manual_seed(number)
        held = {f"t{n}": torch.randn(size, generator=generator) for n, size in enumerate(sizes)}
        of_ranks = []
        for rank in range(2):
            rows = {name: Rows(t, max(1, len(t) // 3), rank) for name, t in held.items()}
            options = ws.source.SourceOptions(dtype)
            looked = as_source(rows, options).inventory()
            of_ranks.append(replace(looked, rest=lambda: iter(())))  # nothing is gathered
        version = Version(publisher.open(Deadline(1)), number)
        crew = Other(other, of_ranks[1])
        publisher.publish(version, Looked(of_ranks[0]), Deadline(WAIT), crew=crew)
        wanted = {name: tensor.to(dtype or torch.float32) for name, tensor in held.items()}
        assert_all_same(read(ends)[1], wanted)
    other.close()


def test_where_memory_cannot_be_page_locked_the_report_says_so_once():
    place = torch.device("cuda", 3)
    download = SimpleNamespace(device=SimpleNamespace(place=place), flow=lambda *_: None)
    downloads = Downloads()
    for _ in range(2):
        slot = SimpleNamespace(page_lock=lambda device: False, address=0)
        flow_into(slot, download, None, None, downloads)
    (note,) = downloads.notes()
    assert "cuda:3" in note
    assert "slower" in note
    assert downloads.notes() == ()


def test_the_memory_of_a_device_is_given_back_at_the_end(publisher):
    downloads = Some(1)
    use(publisher, downloads)
    downloads._known["here"] = downloads.download
    publisher.close()
    assert not downloads._known
    with pytest.raises(WeightSyncError):
        publisher.publish(Version(1, 1), as_source({"a": torch.ones(1)}), Deadline(0.1))
