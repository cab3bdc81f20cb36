"""X1's kind: numbers in files that would become addresses. Another process reads them, so that one
which does end up outside of the memory that is there fails a test, and does not end them all."""

import json
import os
import random
import struct

import pytest
import torch

import weightsync as ws
from tests.conftest import WAIT
from tests.schemes.cuda_ipc.host import CPU, HostExchange
from weightsync.chunks import Geometry
from weightsync.deadline import Deadline
from weightsync.device import device_of
from weightsync.manifest import Manifest
from weightsync.run.process import this_process
from weightsync.schemes.cuda_ipc.layout import Allocation, Table
from weightsync.schemes.cuda_ipc.mapped import Mapped
from weightsync.schemes.double_buffer import layout
from weightsync.selection import Selection
from weightsync.transport import Targets
from weightsync.upload import Staging

SIZE = 8192
LARGE = [SIZE + 1, 1 << 32, 1 << 47, 1 << 50, 1 << 62]


# -------------------------------------------------------------------- a trainer's own memory


def map_what_is_not_there(state, directory, own, claimed, offset, address=None):
    """Copy a tensor out of memory that is shown, where a table says that it lies.

    Returns:
        The words of the error, or whether the bytes were right.
    """
    exchange = HostExchange(directory)
    room = exchange.allocate(CPU, 2 * SIZE)
    room.tensor.fill_(7)
    base = room.tensor.data_ptr()
    shown = Allocation(exchange.handle(CPU, base), claimed, base if address is None else address)
    process = this_process() if own else "another"
    manifest = Manifest.build([("w", torch.uint8, (SIZE,))])
    table = Table(manifest, "host", process, (shown,), ((0, offset),))
    target = torch.zeros(SIZE, dtype=torch.uint8)
    try:
        mapped = Mapped(exchange, Table.from_json(table.to_json(), "the table"), keep=True)
        mapped.move_into(Targets(manifest, {"w": target}))
    except ws.WeightSyncError as error:
        assert not target.any()
        return str(error)
    return bool((target == 7).all())


@pytest.fixture
def mapper(peers, run_dir):
    (peer,) = peers(1)
    return lambda *arguments: peer.call(map_what_is_not_there, run_dir, *arguments)


@pytest.mark.parametrize("own", [True, False], ids=["of this process", "of another"])
def test_a_table_that_claims_more_memory_than_is_shown(mapper, own):
    assert mapper(own, 2 * SIZE, SIZE) is True
    for offset in LARGE:
        assert "were announced, 16,384 are there" in mapper(own, offset + SIZE, offset)


def test_a_table_that_says_it_is_of_this_process(mapper):
    """And has addresses of its own making."""
    for address in (1, 1 << 46, (1 << 48) + 5, (1 << 63) - 1):
        assert "cannot be mapped" in mapper(True, SIZE, 0, address)


# -------------------------------------------------------------------- a slot


def forge(files, manifest, digests=b""):
    """A commit of a manifest that promises what it likes."""
    for name in ("head", "record"):
        with open(files[name], "rb") as file:
            document = json.load(file)
        document.update(nbytes=manifest.nbytes)
        replace(files[name], json.dumps(document).encode())
    replace(files["manifest"], manifest.to_json())
    replace(files["digests"], digests)
    with open(files["bytes"], "r+b") as file:
        file.truncate(-(-manifest.nbytes // 4096) * 4096)  # sparse: it costs nothing


def replace(path, data):
    with open(path + ".new", "wb") as file:
        file.write(data)
    os.rename(path + ".new", path)


def read_all(state, path, verify):
    """Read a version in each way that there is, and follow what is being written.

    Returns:
        What went wrong, each kind once.
    """
    scheme = ws.DoubleBufferScheme(path, verify=verify)
    subscriber = scheme.create_subscriber()
    kinds = set()
    try:
        subscriber.open(Deadline(WAIT))
        version = subscriber.wait(None, Deadline(WAIT))
        with subscriber.snapshot(version, Deadline(0.1)) as snapshot:
            kinds |= use(subscriber, snapshot)
    except ws.WeightSyncError as error:
        kinds.add(type(error).__name__)
    finally:
        subscriber.close()
    return kinds


def use(subscriber, snapshot):
    manifest, device = snapshot.manifest, device_of(CPU)
    if manifest.nbytes > 1 << 24:
        return {"believed"}
    targets = Targets(manifest, {n: torch.empty_like(t) for n, t in snapshot})
    selections = [
        Selection.everything(manifest.nbytes),
        Selection.of(*([Geometry(manifest).offsets[:1], Geometry(manifest).sizes[:1] // 2]),
                     manifest.nbytes),
    ]  # fmt: skip
    kinds = set()
    for selection in selections:
        staging = Staging(device, Geometry(manifest), selection)
        steps = [
            lambda: snapshot.copy_into(targets),
            lambda staging=staging: follow(subscriber, staging),
            lambda staging=staging: staging.take(snapshot.memory(), snapshot.version, Deadline(1)),
        ]
        for step in steps:
            try:
                step()
            except ws.WeightSyncError as error:
                kinds.add(type(error).__name__)
    return kinds


def follow(subscriber, staging):
    arriving = subscriber.arriving()
    if arriving is not None:
        left = iter(range(20))
        staging.follow(arriving, lambda: next(left, None) is None)


@pytest.fixture
def run(ends):
    """The files of a version, and a peer that reads it."""
    weights = {"a": torch.arange(100_000.0), "b": torch.arange(1000)}
    scheme = ends.scheme()
    sender = ends.sender(weights, scheme=scheme)
    version = sender.update_weights(version=1).version
    slot = next(s for s in scheme.inspect().slots if s.version == version)
    base = f"{ends.path}/{slot.generation}"
    return {
        "head": f"{ends.path}/head.json",
        "manifest": f"{base}/manifest.json",
        "record": f"{base}/slot{slot.slot}.json",
        "digests": f"{base}/slot{slot.slot}.digests",
        "bytes": f"{base}/slot{slot.slot}.bin",
        "progress": [f"{base}/{layout.slot_progress(n)}" for n in range(2)],
    }


@pytest.mark.parametrize(
    ("bits", "verify"), [(35, True), (44, True), (46, True), (50, True), (50, False)]
)
def test_a_manifest_that_promises_more_than_there_can_be(ends, run, peers, bits, verify):
    """In a file that is as long, which costs nothing: neither mapped in vain, nor planned for with
    more memory than there is."""
    manifest = Manifest.build([("a", torch.uint8, (1 << bits,))])
    try:
        forge(run, manifest)
    except OSError:
        pytest.skip("files cannot be so long here")
    (peer,) = peers(1)
    kinds = peer.call(read_limited, ends.path, verify)
    assert kinds <= {"CorruptError", "NoRoomError", "ProtocolError"}, kinds
    assert kinds


def read_limited(state, path, verify):
    """With little memory beyond what is mapped: a plan for so much fails here, not the machine."""
    import resource

    resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))
    return read_all(state, path, verify)


@pytest.mark.parametrize("verify", [True, False])
def test_a_progress_that_says_anything(ends, run, peers, verify):
    (peer,) = peers(1)
    words = [0, 1, 4096, 408_000, 1 << 31, 1 << 47, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
    chance = random.Random(0)
    for _ in range(40):
        for progress in run["progress"]:
            said = [chance.choice(words) for _ in range(4)]
            with open(progress, "r+b") as file:  # in place: it is mapped
                file.write(struct.pack("<4Q", *said))
        assert peer.call(read_all, ends.path, verify) == set()


def test_digests_of_anything_are_refused_and_bytes_stay_within_the_slot(ends, run, peers):
    (peer,) = peers(1)
    with open(run["digests"], "rb") as file:
        right = file.read()
    for data in (b"", right[:-1], right + right, bytes(len(right)), b"\xff" * len(right)):
        replace(run["digests"], data)
        (kind,) = peer.call(read_all, ends.path, True)
        assert kind in ("CorruptError", "ProtocolError")
    replace(run["digests"], right)
    assert peer.call(read_all, ends.path, True) == set()
