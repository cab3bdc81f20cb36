"""The scheme of one_file.py, broken in one place each: a class of the suite for every defect.

Not collected by itself; test_conformance.py runs it, and knows which test is to notice what.
"""

import contextlib
import json
import mmap
import os
import pickle
import socket
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import weightsync as ws
from tests.testing import one_file
from tests.testing.one_file import (
    HEAD,
    Head,
    OneFilePublisher,
    OneFileScheme,
    OneFileSnapshot,
    OneFileSubscriber,
)
from tests.testing.test_one_file import damaged
from weightsync.deadline import Deadline
from weightsync.files import Directory
from weightsync.inspection import RunStatus
from weightsync.report import ReceiverReport
from weightsync.run.membership import Membership
from weightsync.source import Looked, WeightSource, as_source
from weightsync.testing import SchemeConformance

PUBLISHERS, SUBSCRIBERS, SCHEMES = {}, {}, {}


def defect(table, *names):
    """The class is what goes wrong under these names."""

    def enter(cls):
        table.update(dict.fromkeys(names, cls))
        return cls

    return enter


@ws.register_scheme
@dataclass(frozen=True)
class BrokenScheme(OneFileScheme):
    url_scheme: ClassVar[str] = "broken"

    defect: str = ""

    def create_publisher(self):
        return PUBLISHERS.get(self.defect, OneFilePublisher)(self.path)

    def create_subscriber(self, receiver=None):
        return SUBSCRIBERS.get(self.defect, OneFileSubscriber)(self.path, receiver)


# -------------------------------------------------------------------- tensors


class Altered(WeightSource):
    """A source that gives what another one gives, altered."""

    def __init__(self, source, alter):
        self._inventory = source.inventory()
        self._alter = alter

    def manifest(self):
        return self._inventory.manifest

    def tensors(self):
        for name, tensor in self._inventory.tensors():
            yield name, self._alter(name, tensor)


class AlteringPublisher(OneFilePublisher):
    def publish(self, version, weights, *others):
        return super().publish(version, Altered(weights, self.alter), *others)


@defect(PUBLISHERS, "loses NaN payloads")
class QuietPublisher(AlteringPublisher):
    def alter(self, name, tensor):
        if tensor.dtype != torch.bfloat16:
            return tensor
        return torch.where(tensor.isnan(), torch.full_like(tensor, torch.nan), tensor)


@defect(PUBLISHERS, "reads memory as it lies")
class StridedPublisher(AlteringPublisher):
    def alter(self, name, tensor):
        if (
            tensor.is_contiguous()
            or tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes()
        ):
            return tensor
        return torch.as_strided(tensor, (tensor.numel(),), (1,), 0).view(tensor.shape)


@defect(PUBLISHERS, "drops odd bytes")
class EvenPublisher(AlteringPublisher):
    def alter(self, name, tensor):
        if tensor.nbytes % 2 == 0 or tensor.dim() == 0:
            return tensor
        tensor = tensor.clone()
        tensor.view(torch.uint8)[-1:] = 77
        return tensor


@defect(PUBLISHERS, "goes by position")
class PositionPublisher(OneFilePublisher):
    def publish(self, version, weights, *others):
        inventory = weights.inventory()
        names = [spec.name for spec in inventory.manifest.tensors]
        stream = inventory.rest
        if stream is not None:
            inventory = replace(
                inventory, rest=lambda: zip(names, (tensor for _, tensor in stream()), strict=True)
            )
        return super().publish(version, Looked(inventory), *others)


@defect(PUBLISHERS, "holds the whole stream")
class HoardingPublisher(OneFilePublisher):
    def publish(self, version, weights, *others):
        inventory = weights.inventory()
        stream = inventory.rest
        if stream is not None:
            inventory = replace(inventory, rest=lambda: iter(list(stream())))
        return super().publish(version, Looked(inventory), *others)


@defect(PUBLISHERS, "publishes what it got")
class IndifferentPublisher(OneFilePublisher):
    """A stream that breaks off leaves the rest at its old values."""

    def publish(self, version, weights, *others):
        inventory = weights.inventory()
        if inventory.rest is None:
            return super().publish(version, Looked(inventory), *others)

        def rest():
            left = dict.fromkeys(inventory.manifest.by_name)
            with contextlib.suppress(RuntimeError):
                for name, tensor in inventory.rest():
                    left.pop(name)
                    yield name, tensor
            for name in left:
                spec = inventory.manifest.spec(name)
                yield name, torch.zeros(spec.shape, dtype=spec.dtype)

        return super().publish(version, Looked(replace(inventory, rest=rest)), *others)


@defect(PUBLISHERS, "has a small bucket")
class SmallPublisher(OneFilePublisher):
    def publish(self, version, weights, *others):
        assert all(spec.nbytes <= 16 << 20 for spec in weights.inventory().manifest.tensors)
        return super().publish(version, weights, *others)


@defect(PUBLISHERS, "has a small header")
class FewPublisher(OneFilePublisher):
    def publish(self, version, weights, *others):
        assert len(weights.inventory().manifest.to_json()) < 1 << 16, "the header is too long"
        return super().publish(version, weights, *others)


@defect(PUBLISHERS, "sends ties twice")
class UntyingPublisher(OneFilePublisher):
    def publish(self, version, weights, *others):
        inventory = weights.inventory()
        manifest, values = inventory.manifest, dict(inventory.tensors())
        values |= {alias: values[name].clone() for alias, name in manifest.aliases.items()}
        return super().publish(version, as_source(values), *others)


@defect(PUBLISHERS, "takes names for files")
class FilingPublisher(OneFilePublisher):
    def publish(self, version, weights, *others):
        for spec in weights.inventory().manifest.tensors:
            (Path(self._owner.directory().path) / spec.name).touch()
        return super().publish(version, weights, *others)


@defect(PUBLISHERS, "refuses without a name")
class CurtPublisher(OneFilePublisher):
    def publish(self, *arguments):
        try:
            return super().publish(*arguments)
        except ws.SourceError:
            raise ws.SourceError("no") from None


@defect(PUBLISHERS, "keeps its first model")
class LoyalPublisher(OneFilePublisher):
    def publish(self, version, weights, *others):
        manifest = weights.inventory().manifest
        self.first = getattr(self, "first", manifest)
        if version.number > 0 and manifest.fingerprint != self.first.fingerprint:
            raise ws.WeightSyncError("there are no buffers for it")
        return super().publish(version, weights, *others)


# -------------------------------------------------------------------- versions


@defect(PUBLISHERS, "takes any number")
class AnyNumberPublisher(OneFilePublisher):
    def publish(self, *arguments):
        self._head = None
        return super().publish(*arguments)


@defect(PUBLISHERS, "has one epoch")
class OneEpochPublisher(OneFilePublisher):
    def open(self, deadline, epoch=None):
        super().open(deadline, epoch)
        self._owner.epoch = 1
        return 1


@defect(PUBLISHERS, "believes the clock")
class ClockPublisher(OneFilePublisher):
    def open(self, deadline, epoch=None):
        if not self._owner.held:
            super().open(deadline, epoch)
            self._owner.epoch = int(time.time() * 1000)
        return self._owner.epoch

    def receivers(self):
        return [record.report for record in self._receivers.records.read()]

    def wait_applied(self, version, deadline, receivers=None):
        return deadline.wait(lambda: [r for r in self.receivers() if r.version] or None)


@defect(SUBSCRIBERS, "believes the clock")
class ClockSubscriber(OneFileSubscriber):
    def wait(self, after, deadline):
        with contextlib.suppress(ws.ProtocolError):
            return super().wait(after, deadline)


@defect(PUBLISHERS, "forgets receivers=")
class ForgetfulPublisher(OneFilePublisher):
    def publish(self, version, weights, deadline, receivers=None, crew=None):
        return super().publish(version, weights, deadline)


@defect(SUBSCRIBERS, "begins at step 1")
class FirstStepSubscriber(OneFileSubscriber):
    def wait(self, after, deadline):
        version = super().wait(after, deadline)
        return version if after or version is None or version.number == 1 else None


@defect(SUBSCRIBERS, "misses what was before")
class LateSubscriber(OneFileSubscriber):
    def open(self, deadline):
        super().open(deadline)
        self.before = super().wait(None, Deadline(0))

    def wait(self, after, deadline):
        return super().wait(after or self.before, deadline)


@defect(SUBSCRIBERS, "swallows errors")
class ProudSubscriber(OneFileSubscriber):
    def acknowledge(self, report):
        super().acknowledge(replace(report, state="applied", version=report.attempted, error=None))


@defect(SUBSCRIBERS, "swallows words")
class MuteSubscriber(OneFileSubscriber):
    def acknowledge(self, report):
        super().acknowledge(replace(report, error=report.error and "it failed"))


# -------------------------------------------------------------------- leases


@defect(PUBLISHERS, "overwrites under readers")
class OverwritingPublisher(OneFilePublisher):
    def publish(self, version, weights, deadline, receivers=None, crew=None):
        run = self._owner.directory()
        self._owner.require_newer(version, None)
        inventory = weights.inventory()
        with Overwriting():
            one_file.write(run, "slot", inventory, deadline)
        run.replace(HEAD, Head(version, None, "").to_json())
        return one_file.Published(inventory.manifest.payload, len(inventory.values), None, 0.0, 0.0)


class Overwriting:
    def __enter__(self):
        os.O_TRUNC, self._truncate = 0, os.O_TRUNC

    def __exit__(self, *_):
        os.O_TRUNC = self._truncate


@defect(SUBSCRIBERS, "overwrites under readers")
class SharingSubscriber(OneFileSubscriber):
    def snapshot(self, version, deadline):
        self._member.reach(deadline)
        run = self._member.directory()
        return UncheckedSnapshot(version, run.open_file("slot", os.O_RDONLY), "slot")


class UncheckedSnapshot(OneFileSnapshot):
    def verify(self, names=None):
        pass


@defect(SUBSCRIBERS, "does not check")
class UncheckedSubscriber(OneFileSubscriber):
    def snapshot(self, version, deadline):
        snapshot = super().snapshot(version, deadline)
        snapshot.__class__ = UncheckedSnapshot
        return snapshot


@defect(SUBSCRIBERS, "loses what it saw")
class RawSubscriber(OneFileSubscriber):
    def snapshot(self, version, deadline):
        try:
            return super().snapshot(version, deadline)
        except ws.VersionGoneError:
            raise FileNotFoundError("weights") from None


# -------------------------------------------------------------------- liveness


class Endless(Deadline):
    """Never over."""

    def __init__(self):
        super().__init__(1e9)


@defect(SUBSCRIBERS, "waits for ever for a sender")
class PatientSubscriber(OneFileSubscriber):
    def open(self, deadline):
        super().open(Endless())


@defect(SUBSCRIBERS, "waits for ever for a version")
class ExpectantSubscriber(OneFileSubscriber):
    def wait(self, after, deadline):
        return super().wait(after, Endless())


@defect(PUBLISHERS, "waits for ever for receivers")
class PatientPublisher(OneFilePublisher):
    def wait_applied(self, version, deadline, receivers=None):
        return super().wait_applied(version, Endless(), receivers)


@defect(PUBLISHERS, "knows no receivers")
class LonelyPublisher(OneFilePublisher):
    def receivers(self):
        return []


@defect(PUBLISHERS, "notices no death")
class BlindPublisher(OneFilePublisher):
    def wait_applied(self, version, deadline, receivers=None):
        reports = super().wait_applied(version, deadline, receivers)
        return [replace(r, state="waiting") if r.state == "dead" else r for r in reports]


@defect(PUBLISHERS, "mourns for ever")
class MourningPublisher(OneFilePublisher):
    mourned: ClassVar[dict] = {}

    def wait_applied(self, version, deadline, receivers=None):
        reports = super().wait_applied(version, deadline, receivers)
        self.mourned.update({r.receiver: r for r in reports if r.state == "dead"})
        return list({**{r.receiver: r for r in reports}, **self.mourned}.values())


@defect(SUBSCRIBERS, "is silent about its set-up")
class SilentSubscriber(OneFileSubscriber):
    def acknowledge(self, report):
        if report.state != "failed":
            super().acknowledge(report)


@defect(SUBSCRIBERS, "never signs off")
class StayingSubscriber(OneFileSubscriber):
    def close(self):
        pass


@defect(PUBLISHERS, "asks for the newest only")
class ImpatientPublisher(OneFilePublisher):
    newest: ClassVar[dict] = {}

    def publish(self, version, *arguments):
        self.newest["version"] = version
        return super().publish(version, *arguments)

    def wait_applied(self, version, deadline, receivers=None):
        return super().wait_applied(self.newest["version"], deadline, receivers)


@defect(PUBLISHERS, "waits for who has left")
class AttachedPublisher(OneFilePublisher):
    known: ClassVar[set] = set()

    def wait_applied(self, version, deadline, receivers=None):
        self.known.update(report.receiver for report in self.receivers())
        return super().wait_applied(version, deadline, receivers or sorted(self.known))


@defect(SUBSCRIBERS, "leaves its name taken")
class LockingSubscriber(OneFileSubscriber):
    def open(self, deadline):
        super().open(deadline)
        if self._member._receiver:
            os.mkdir(f"{self._member.path}/taken-{self._member._receiver}")


@defect(PUBLISHERS, "labels before it writes")
class HastyPublisher(OneFilePublisher):
    def publish(self, version, weights, deadline, receivers=None, crew=None):
        inventory = weights.inventory()
        if inventory.rest is not None:
            nothing = Altered(
                Looked(replace(inventory, rest=self.zeros(inventory))), lambda _, t: t
            )
            super().publish(version, nothing, deadline, receivers)
            self._head = None
        return super().publish(version, Looked(inventory), deadline, receivers)

    def zeros(self, inventory):
        def rest():
            for spec in inventory.manifest.tensors:
                yield spec.name, torch.zeros(spec.shape, dtype=spec.dtype)

        return rest


@defect(PUBLISHERS, "stays the owner")
class StayingPublisher(OneFilePublisher):
    kept: ClassVar[list] = []

    def close(self):
        self.kept.append(self._owner)


@defect(PUBLISHERS, "asks for no lock")
class RecklessPublisher(OneFilePublisher):
    def open(self, deadline, epoch=None):
        try:
            return super().open(deadline, epoch)
        except ws.SenderBusyError:
            return int(time.time() * 1000)


@defect(PUBLISHERS, "leaves a thread")
class ThreadedPublisher(OneFilePublisher):
    def open(self, deadline, epoch=None):
        threading.Thread(target=time.sleep, args=(60,)).start()
        return super().open(deadline, epoch)


# -------------------------------------------------------------------- hostile


class UnpicklingHead(Head):
    @classmethod
    def from_json(cls, data, where):
        if data.startswith(b"\x80"):
            with contextlib.suppress(Exception):
                pickle.loads(data)
        return Head.from_json(data, where)


@defect(SUBSCRIBERS, "unpickles")
class UnpicklingSubscriber(OneFileSubscriber):
    def __init__(self, path, receiver):
        super().__init__(path, receiver)
        self._member = Membership(path, receiver, HEAD, UnpicklingHead.from_json)


@defect(PUBLISHERS, "unpickles what strangers say")
class ListeningPublisher(OneFilePublisher):
    def open(self, deadline, epoch=None):
        server = socket.create_server(("127.0.0.1", 0))
        Path(f"{self._owner.path}.port").write_text(str(server.getsockname()[1]))
        threading.Thread(target=self.listen, args=(server,), daemon=True).start()
        return super().open(deadline, epoch)

    def listen(self, server):
        while True:
            with server.accept()[0] as link, contextlib.suppress(Exception):
                pickle.loads(link.recv(1 << 20))


@defect(SUBSCRIBERS, "trips over garbage")
class NaiveSubscriber(OneFileSubscriber):
    def snapshot(self, version, deadline):
        self._member.reach(deadline)
        path = f"{self._member.path}/{one_file.file_of(version)}"
        with open(path, "rb") as file:
            data = file.read()
        json.loads(data[-8 - int.from_bytes(data[-8:], "big") : -8])
        return super().snapshot(version, deadline)


@defect(SUBSCRIBERS, "trips over permissions")
class PermittedSubscriber(OneFileSubscriber):
    def open(self, deadline):
        os.listdir(self._member.path)
        super().open(deadline)


@defect(PUBLISHERS, "trusts what was left")
class TrustingPublisher(OneFilePublisher):
    def open(self, deadline, epoch=None):
        with contextlib.suppress(FileNotFoundError):
            run = Directory.open(self._owner.path)
            Head.from_json(run.read(HEAD, 1 << 20), HEAD)
        return super().open(deadline, epoch)


@defect(SUBSCRIBERS, "takes any id")
class AnyIdSubscriber(OneFileSubscriber):
    def __init__(self, path, receiver):
        Path(f"{path}.{receiver}").touch()
        super().__init__(path, receiver)


# -------------------------------------------------------------------- room


@defect(PUBLISHERS, "raises raw errors")
class RawPublisher(OneFilePublisher):
    def publish(self, *arguments):
        try:
            return super().publish(*arguments)
        except ws.NoRoomError as error:
            raise OSError(str(error)) from None


@defect(PUBLISHERS, "leaves half a file")
class UntidyPublisher(OneFilePublisher):
    def publish(self, *arguments):
        try:
            return super().publish(*arguments)
        except ws.NoRoomError:
            self._owner.directory().replace("half", b"")
            raise


@defect(PUBLISHERS, "maps what is not there")
class SparsePublisher(OneFilePublisher):
    def publish(self, version, weights, *others):
        size = max(1, weights.inventory().manifest.nbytes)
        fd = self._owner.directory().open_file("sparse", os.O_RDWR | os.O_CREAT)
        os.ftruncate(fd, size)
        with mmap.mmap(fd, size) as room:
            for page in range(0, size, 4096):
                room[page] = 1
        self._owner.directory().remove("sparse")
        return super().publish(version, weights, *others)


# -------------------------------------------------------------------- configuration


@ws.register_scheme
@dataclass(frozen=True)
class ForgettingScheme(BrokenScheme):
    url_scheme: ClassVar[str] = "forgetting"

    def to_url(self):
        return super().to_url().partition("?")[0]


@ws.register_scheme
@dataclass(frozen=True)
class LenientScheme(BrokenScheme):
    url_scheme: ClassVar[str] = "lenient"

    @classmethod
    def from_url(cls, url):
        return super().from_url(url.replace("colour=red", "defect="))


@ws.register_scheme
@dataclass(unsafe_hash=True)
class MutableScheme(ws.WeightSyncScheme):
    url_scheme: ClassVar[str] = "mutable"

    path: str
    defect: str = ""

    create_publisher = BrokenScheme.create_publisher
    create_subscriber = BrokenScheme.create_subscriber
    address = OneFileScheme.address
    from_address = (
        BrokenScheme.__dict__["from_address"]
        if False
        else classmethod(lambda cls, host, path, options: cls(path, **options))
    )


@ws.register_scheme
@dataclass(frozen=True)
class EagerScheme(BrokenScheme):
    url_scheme: ClassVar[str] = "eager"

    def create_subscriber(self, receiver=None):
        subscriber = super().create_subscriber(receiver)
        subscriber.open(Deadline(0.1))
        return subscriber


@ws.register_scheme
@dataclass(frozen=True)
class NarrowScheme(BrokenScheme):
    url_scheme: ClassVar[str] = "narrow"

    def create_reader(self, rank, size):
        if rank:
            raise ws.SchemeError("one worker only")
        return super().create_reader(rank, size)


class FlatteringScheme(BrokenScheme):
    """Shows nothing but the best."""

    def inspect(self):
        report = ReceiverReport("engine", "applied", ws.Version(0, 99))
        return RunStatus("onefile", self.path, ws.Version(0, 99), True, receivers=(report,))


SCHEMES = {
    "shows what is not there": FlatteringScheme,
    "forgets options in its URL": ForgettingScheme,
    "ignores unknown options": LenientScheme,
    "can be changed": MutableScheme,
    "connects when it is made": EagerScheme,
    "reads in one worker": NarrowScheme,
}


@defect(PUBLISHERS, "closes once")
class OncePublisher(OneFilePublisher):
    def close(self):
        if not self._owner.held:
            raise ws.WeightSyncError("it is closed already")
        self._owner.release()


# -------------------------------------------------------------------- reports


@defect(PUBLISHERS, "counts the padding")
class PaddingPublisher(OneFilePublisher):
    def publish(self, *arguments):
        published = super().publish(*arguments)
        return replace(published, nbytes=published.nbytes + 64)


@defect(PUBLISHERS, "counts too many seconds")
class SlowPublisher(OneFilePublisher):
    def publish(self, *arguments):
        return replace(super().publish(*arguments), transfer=1e6)


@defect(PUBLISHERS, "says that nothing changed")
class UnchangedPublisher(OneFilePublisher):
    def publish(self, *arguments):
        return replace(super().publish(*arguments), changed=0)


@defect(PUBLISHERS, "reports what cannot be written")
class StrangePublisher(OneFilePublisher):
    def publish(self, *arguments):
        return replace(super().publish(*arguments), notes=(b"bytes",))


@defect(SUBSCRIBERS, "has no pid")
class AnonymousSubscriber(OneFileSubscriber):
    def acknowledge(self, report):
        super().acknowledge(ReceiverReport(report.receiver, report.state, report.version))


# -------------------------------------------------------------------- the suite, for each of them


class Broken(SchemeConformance):
    __test__ = False

    patience = 1.0
    race_seconds = 0.3
    defect: ClassVar[str]

    @pytest.fixture
    def scheme(self, tmp_path):
        kind = SCHEMES.get(self.defect, BrokenScheme)
        return kind(str(tmp_path / "run"), defect=self.defect)

    def stored_files(self, scheme):
        return [path for path in Path(scheme.path).iterdir() if path.name.startswith(("head", "w"))]

    def damage(self):
        return damaged

    def endpoints(self, scheme):
        port = Path(f"{scheme.path}.port")
        return [("127.0.0.1", int(port.read_text()))] if port.exists() else []

    def scheme_at(self, path):
        return BrokenScheme(str(path / "run"), defect=self.defect)


def class_name(defect):
    return "Test" + "".join(word.capitalize() for word in defect.replace("=", "").split())


for one in {**PUBLISHERS, **SUBSCRIBERS, **SCHEMES}:
    name = class_name(one)
    globals()[name] = type(name, (Broken,), {"__test__": True, "defect": one})
