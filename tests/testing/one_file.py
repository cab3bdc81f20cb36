"""A scheme in miniature, one file for each version: the example of docs/writing-a-scheme.md."""

import json
import mmap
import os
import time
from dataclasses import dataclass
from typing import ClassVar

import torch
import xxhash

import weightsync as ws
from weightsync.files import Directory
from weightsync.run.membership import Membership
from weightsync.run.ownership import Ownership
from weightsync.run.receivers import Receivers, RecordFiles
from weightsync.run.records import addressees, read_addressees, reading
from weightsync.run.removal import remove_rest
from weightsync.transport import Published

HEAD, NEW = "head.json", "new"


@ws.register_scheme
@dataclass(frozen=True)
class OneFileScheme(ws.WeightSyncScheme):
    url_scheme: ClassVar[str] = "onefile"

    path: str

    def create_publisher(self):
        return OneFilePublisher(self.path)

    def create_subscriber(self, receiver=None):
        return OneFileSubscriber(self.path, receiver)

    def address(self):
        return "", self.path

    @classmethod
    def from_address(cls, host, path, options):
        return cls(path, **options)


@dataclass(frozen=True)
class Head:
    """What is newest, and whom it is for. Versions become visible by its replacement."""

    version: ws.Version
    receivers: tuple[str, ...] | None
    digest: str

    def to_json(self):
        return json.dumps([self.version, self.receivers, self.digest]).encode()

    @classmethod
    def from_json(cls, data, where):
        with reading(where):
            version, receivers, digest = json.loads(data)
            return cls(ws.Version.parse(version), read_addressees(receivers), str(digest))


class OneFilePublisher(ws.Publisher):
    """Writes a file, gives it the version's name, and then says so in the head."""

    def __init__(self, path):
        self._owner = Ownership(path, remove_all)
        self._receivers = Receivers(RecordFiles(self._owner.directory), lambda: self._owner.epoch)
        self._head = None

    def open(self, deadline, epoch=None):
        if not self._owner.held:
            with self._owner.taking(deadline):
                self._owner.begin(epoch)
            self._head = None
        elif epoch not in (None, self._owner.epoch):
            self._owner.begin(epoch)
        return self._owner.epoch

    def prepare(self, manifest, deadline):
        pass  # a file takes its room when it is written

    def publish(self, version, weights, deadline, receivers=None, crew=None):
        began = time.perf_counter()
        run, last = self._owner.directory(), self._head
        self._owner.require_newer(version, last and last.version)
        self._receivers.records.forget_signed_off()
        inventory = weights.inventory()
        try:
            head = Head(version, addressees(receivers), write(run, NEW, inventory, deadline))
            if last and last.version == version and last.digest != head.digest:
                raise ws.VersionError(f"{version.number} was published before, with other weights")
            run.rename(NEW, file_of(version))
            run.replace(HEAD, head.to_json())
        except OSError as error:
            raise ws.NoRoomError(f"{run.path}: {error.strerror or error}") from None
        finally:
            run.remove(NEW)
        self._head = head
        remove_files(run, but=file_of(version))
        manifest, seconds = inventory.manifest, time.perf_counter() - began
        return Published(manifest.payload, len(manifest.tensors), None, 0.0, seconds)

    def receivers(self):
        return self._receivers.reports()

    def wait_applied(self, version, deadline, receivers=None):
        return self._receivers.wait_applied(version, deadline, receivers, {})

    def close(self):
        self._owner.release()


class OneFileSubscriber(ws.Subscriber):
    """Watches the head, and opens the file of which it tells."""

    def __init__(self, path, receiver):
        self._member = Membership(path, receiver, HEAD, Head.from_json)

    def open(self, deadline):
        self._member.open(deadline)

    def wait(self, after, deadline):
        return self._member.wait(after, deadline)

    def snapshot(self, version, deadline):
        self._member.reach(deadline)
        run = self._member.directory()
        try:
            fd = run.open_file(file_of(version), os.O_RDONLY)
        except FileNotFoundError:
            raise ws.VersionGoneError(f"{run.path} no longer holds {version}") from None
        return OneFileSnapshot(version, fd, f"{run.path}/{file_of(version)}")

    def acknowledge(self, report):
        self._member.acknowledge(report)

    def close(self):
        self._member.leave()


class OneFileSnapshot(ws.Snapshot):
    """The lease is the mapping: an unlinked file stays for as long as somebody has it open."""

    def __init__(self, version, fd, where):
        self.version = version
        self._where = where
        with open(fd, "rb") as file, reading(where):
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            end = len(self._data) - 8
            begin = end - int.from_bytes(self._data[end:], "big")
            if begin < 0:
                raise ValueError("it was cut off")
            manifest, self._digests = json.loads(self._data[begin:end])
            self.manifest = ws.Manifest.from_json(manifest.encode())
            if (
                self.manifest.nbytes != begin
                or self._digests.keys() != self.manifest.by_name.keys()
            ):
                raise ValueError("its parts do not fit together")

    def _bytes(self, name):
        spec = self.manifest.spec(name)
        if not spec.nbytes:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(
            self._data, dtype=torch.uint8, count=spec.nbytes, offset=spec.offset
        )

    def tensor(self, name):
        spec = self.manifest.spec(name)
        return self._bytes(name).view(spec.dtype).view(spec.shape)

    def verify(self, names=None):
        for name in self.manifest.by_name if names is None else names:
            name = self.manifest.spec(name).name
            if digest_of(self._bytes(name)) != self._digests[name]:
                raise ws.CorruptError(f"{self._where}: tensor {name!r} is not what was written")

    def copy_into(self, targets):
        self.verify(targets.tensors)
        for name, tensor in targets.tensors.items():
            tensor.data.copy_(self.tensor(name))

    def close(self):
        self._data = None


def write(run, file_name, inventory, deadline):
    """Write all tensors, what they are, and their digests; returns the digest of it all."""
    manifest = inventory.manifest
    digests = {}
    with open(run.open_file(file_name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
        for name, tensor in inventory.tensors():
            spec = manifest.by_name.get(name)
            if spec is None or name in digests or tensor.shape != spec.shape:
                raise ws.SourceError(f"tensor {name!r} comes twice, or is not what was announced")
            data = bytes_of(name, tensor, spec.dtype)
            digests[name] = digest_of(data)
            file.seek(spec.offset)
            file.write(data.numpy())
            if deadline.expired:
                raise ws.DeadlineError(f"the weights were not written in time; came to {name!r}")
        if len(digests) != len(manifest.tensors):
            raise ws.SourceError(f"only {len(digests)} tensors came")
        trailer = json.dumps([manifest.to_json().decode(), digests], sort_keys=True).encode()
        file.seek(manifest.nbytes)
        file.write(trailer + len(trailer).to_bytes(8, "big"))
    return digest_of(trailer)


def bytes_of(name, tensor, dtype):
    try:
        whole = tensor.detach().to("cpu", dtype).resolve_conj().resolve_neg().contiguous()
        torch.empty_like(whole).copy_(whole)  # a receiver will have to
    except (NotImplementedError, RuntimeError) as error:
        raise ws.SourceError(f"tensor {name!r} cannot be sent: {error}") from None
    return whole.reshape(-1).view(torch.uint8)


def digest_of(data):
    return xxhash.xxh3_128_hexdigest(data.numpy() if isinstance(data, torch.Tensor) else data)


def file_of(version):
    return f"weights-{version.epoch}-{version.number}"


def remove_files(run: Directory, but: str = ""):
    for name in run.names():
        if name.startswith("weights-") and name != but:
            run.remove(name)


def remove_all(run: Directory):
    run.remove(HEAD)
    remove_files(run)
    remove_rest(run)
