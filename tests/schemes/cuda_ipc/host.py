"""The scheme with files of shared memory in the place of a GPU's, and what its processes do."""

import mmap
import os
import secrets
import time
from dataclasses import dataclass
from functools import partial

import torch

import weightsync as ws
from weightsync.deadline import Deadline
from weightsync.errors import NoRoomError, WeightSyncError
from weightsync.schemes.cuda_ipc import CUDAIPCScheme
from weightsync.schemes.cuda_ipc.handles import HANDLE_BYTES, Exchange, Room
from weightsync.testing.weights import constants, fill, value_of
from weightsync.transport import Targets

CPU = torch.device("cpu")


@ws.register_scheme
@dataclass(frozen=True)
class HostIPCScheme(CUDAIPCScheme):
    url_scheme = "host-ipc"

    def exchange(self):
        return HostExchange(self.path + ".memory")


class HostExchange(Exchange):
    """Allocations are files; only those made by ``allocate`` can be shown."""

    made: dict = {}  # noqa: RUF012
    opened: dict = {}  # noqa: RUF012
    identities: dict = {"host": CPU}  # noqa: RUF012

    def __init__(self, directory):
        self._directory = directory

    def require(self):
        pass

    def main_place(self):
        return CPU

    def shows(self, place):
        return place.type == "cpu"

    def identity(self, place):
        return "host"

    def place_of(self, identity):
        return self.identities.get(identity)

    def synchronise(self, place):
        pass

    def allocation(self, place, address):
        made = [(base, mapping) for base, (_, mapping) in self.made.items()]
        for base, mapping in [*made, *self.opened.items()]:
            if base <= address < base + len(mapping):
                return base, len(mapping)
        raise WeightSyncError("not made to be shown")

    def serials(self, place, addresses):
        return [self._serial(place, address) for address in addresses]

    def _serial(self, place, address):
        try:
            return hash(self.handle(place, self.allocation(place, address)[0]))
        except WeightSyncError:
            return None

    def handle(self, place, base):
        return self.made[base][0].encode().ljust(HANDLE_BYTES, b"\0")

    def open(self, place, handle):
        name = handle.rstrip(b"\0").decode()
        try:
            with open(f"{self._directory}/{name}", "r+b") as file:
                mapping = mmap.mmap(file.fileno(), 0)
        except FileNotFoundError:
            raise WeightSyncError("the memory is gone") from None
        address = address_of(mapping)
        self.opened[address] = mapping
        return address

    def close(self, place, address):
        self.opened.pop(address).close()

    def allocate(self, place, nbytes):
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        name = secrets.token_hex(8)
        path = f"{self._directory}/{name}"
        if nbytes > 1 << 32:
            raise NoRoomError("no room for so much")
        with open(path, "w+b") as file:
            file.truncate(nbytes)
            mapping = mmap.mmap(file.fileno(), nbytes)
        base = address_of(mapping)
        self.made[base] = name, mapping
        return Room(torch.frombuffer(mapping, dtype=torch.uint8), partial(forget, base, path))


def address_of(mapping):
    return torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()


def forget(base, path):
    HostExchange.made.pop(base, None)
    if os.path.exists(path):
        os.unlink(path)


def shown(scheme, weights):
    """The same weights, in memory that can be shown where it is; and what keeps that memory."""
    exchange, made, rooms = scheme.exchange(), {}, []
    for name, tensor in weights.items():
        room = exchange.allocate(CPU, 512 + tensor.nbytes)
        rooms.append(room)
        flat = room.tensor[256 : 256 + tensor.nbytes]
        made[name] = flat.view(tensor.dtype).view(tensor.shape)
        made[name].copy_(tensor)
    return made, rooms


# -------------------------------------------------------------------- what processes do


def send(state, scheme, in_place=True, **options):
    """Be a connected sender of constants that lie in memory that can be shown."""
    state.scheme = scheme
    state.weights = constants(0)
    if in_place:
        state.weights, state.rooms = shown(scheme, state.weights)
    state.sender = scheme.create_sender(state.weights, **options)
    state.sender.connect()


def update(state, number, timeout=20.0, then=None, **options):
    """Publish a constant, and write another one as soon as that is possible.

    Returns:
        The report, or the error's kind, words, and the states of those that failed.
    """
    fill(state.weights, number)
    try:
        report = state.sender.update_weights(version=number, timeout=timeout, **options)
        told = {r.receiver: r.state for r in report.receivers}, report.notes
    except ws.ReceiverError as error:
        told = "ReceiverError", str(error), {f.receiver: f.state for f in error.failures}
    except WeightSyncError as error:
        told = type(error).__name__, str(error), {}
    fill(state.weights, -7 if then is None else then)
    return told


def move(state):
    """Put the weights elsewhere."""
    state.weights, rooms = shown(state.scheme, state.weights)
    state.sender.register_model(state.weights)
    state.rooms = rooms


def receive(state, scheme, id, pause=0.0, fails=False):
    """Be a receiver of constants that takes its time, and follows in the background."""
    state.weights = constants(-1)
    state.errors = []
    state.engine = Slow(state.weights, pause, fails)
    state.receiver = scheme.create_receiver(state.engine, id=id)
    state.receiver.connect(timeout=20.0)
    state.receiver.follow(on_error=lambda error: state.errors.append(str(error)))


def reads(state):
    """Whether its engine has begun to read a version."""
    return state.engine.reads


class Slow(ws.Engine):
    def __init__(self, target, pause, fails):
        from weightsync.engines.module import ModuleEngine

        self._inner = ModuleEngine(target)
        self._pause = pause
        self._fails = fails
        self.reads = False

    @property
    def target(self):
        return self._inner.target

    def check(self, manifest):
        return self._inner.check(manifest)

    def stage(self, update, deadline):
        self._inner.stage(update, deadline)

    def apply(self, update, deadline):
        self._inner.apply(update, deadline)
        self.reads = True
        time.sleep(self._pause)
        if self._fails:
            raise ws.WeightSyncError("this engine was told to fail")

    def verify(self, update):
        return self._inner.verify(update)


def seen(state):
    """The version held, what the weights hold, and what went wrong."""
    with state.receiver.hold() as version:
        return version and version.number, value_of(state.weights), list(state.errors)


def mapped(state):
    """How many allocations of others this process has mapped."""
    return len(HostExchange.opened)


def lease(state, scheme):
    """Be a reader without an id that holds on to what is shown."""
    subscriber = scheme.create_subscriber()
    subscriber.open(Deadline(20.0))
    version = subscriber.wait(None, Deadline(20.0))
    state.snapshot = subscriber.snapshot(version, Deadline(20.0))
    return value_of(dict(state.snapshot))


def settle(state):
    state.snapshot.settle()


def wait_until_read(state, number):
    """Until a version was applied."""
    found = Deadline(20.0).wait(
        lambda: (state.receiver.version and state.receiver.version.number >= number) or None
    )
    assert found, state.errors


def be_worker(state, url, rank, size):
    """Be the reader in one of an engine's workers, which know nothing but a URL."""
    state.subscriber = ws.scheme_from_url(url).create_reader(rank, size)


def read_as_worker(state, version):
    with state.subscriber.snapshot(ws.Version(*version), Deadline(20.0)) as snapshot:
        snapshot.verify()
        target = constants(-1)
        snapshot.copy_into(Targets(snapshot.manifest, target))
        snapshot.settle()
    return value_of(target)
