"""What bounds the others: bytes without names, versions or protocol, by the same route.

Each moves one flat tensor, so that the number of tensors does not matter, and keeps its buffers,
pages and connections from version to version.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from weightsync.bench.measures import timed
from weightsync.bench.memory import Needs
from weightsync.bench.way import Notices, ReceivingEnd, SendingEnd, Setting, Tensors, Way
from weightsync.bench.weights import bytes_of, view_of
from weightsync.deadline import Deadline

BLOCK = 8 << 20
PIECE = 4 << 20


def flat_of(tensors: Tensors) -> torch.Tensor:
    (tensor,) = tensors.values()
    return bytes_of(tensor)


def mapped(path: Path, nbytes: int) -> torch.Tensor:
    """A file as a tensor; of that size from now on."""
    with path.open("a+b") as file:
        os.truncate(file.fileno(), nbytes)
        return torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)


@dataclass(frozen=True)
class PlainCopy(Way):
    name: ClassVar[str] = "plain copy"
    bound: ClassVar[bool] = True
    about: ClassVar[str] = (
        "one flat copy into warm shared memory, one out of it in each receiver; each in pieces of "
        "4 MiB that a thread for each core takes as it comes to them, which on a busy machine is "
        "faster than the equal shares of torch's own threads"
    )

    def needs(self, nbytes: int, receivers: int) -> Needs:
        return Needs(nbytes, nbytes)

    def send(self, weights: Tensors, setting: Setting) -> SendingEnd:
        flat = flat_of(weights)
        return _CopyIn(_Copy(mapped(Path(setting.shared, "flat"), flat.numel()), flat))

    def receive(
        self, target: Tensors, setting: Setting, index: int, notices: Notices
    ) -> ReceivingEnd:
        flat = flat_of(target)
        return _CopyOut(_Copy(flat, mapped(Path(setting.shared, "flat"), flat.numel())), notices)


class _Copy:
    """The same copy again and again."""

    def __init__(self, into: torch.Tensor, source: torch.Tensor) -> None:
        torch.set_num_threads(1)  # in each of ours
        self._pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
        self._pieces = torch.split(into, PIECE), torch.split(source, PIECE)

    def run(self) -> None:
        for _ in self._pool.map(torch.Tensor.copy_, *self._pieces):
            pass


@dataclass
class _CopyIn(SendingEnd):
    copy: _Copy

    def publish(self, version: int) -> None:
        self.copy.run()


@dataclass
class _CopyOut(ReceivingEnd):
    copy: _Copy
    notices: Notices

    def receive(self, version: int, deadline: Deadline) -> float:
        self.notices.wait(version, deadline)
        return timed(self.copy.run)


@dataclass(frozen=True)
class PlainFile(Way):
    name: ClassVar[str] = "plain file"
    bound: ClassVar[bool] = True
    about: ClassVar[str] = (
        "one file, written in blocks of 8 MiB past the page cache and synced, as "
        "`dd oflag=direct conv=fsync` does; read into the receivers' memory"
    )

    def needs(self, nbytes: int, receivers: int) -> Needs:
        return Needs(BLOCK, disk=nbytes)

    def send(self, weights: Tensors, setting: Setting) -> SendingEnd:
        return _WriteFile(flat_of(weights), Path(setting.disk, "flat"))

    def receive(
        self, target: Tensors, setting: Setting, index: int, notices: Notices
    ) -> ReceivingEnd:
        return _ReadFile(flat_of(target), Path(setting.disk, "flat"), notices)


class _WriteFile(SendingEnd):
    def __init__(self, flat: torch.Tensor, path: Path) -> None:
        self._flat = view_of(flat)
        self._path = path
        self._block = memoryview(mmap.mmap(-1, BLOCK))  # aligned, as O_DIRECT wants it

    def publish(self, version: int) -> None:
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
        try:
            for offset in range(0, len(self._flat), BLOCK):
                piece = self._flat[offset : offset + BLOCK]
                self._block[: len(piece)] = piece
                os.pwrite(fd, self._block[: -(-len(piece) // 4096) * 4096], offset)
            os.fsync(fd)
        finally:
            os.close(fd)


@dataclass
class _ReadFile(ReceivingEnd):
    flat: torch.Tensor
    path: Path
    notices: Notices

    def receive(self, version: int, deadline: Deadline) -> float:
        self.notices.wait(version, deadline)
        return timed(self._read)

    def _read(self) -> None:
        into = view_of(self.flat)
        with self.path.open("rb", buffering=0) as file:
            for offset in range(0, len(into), BLOCK):
                file.readinto(into[offset : offset + BLOCK])


@dataclass(frozen=True)
class PlainSocket(Way):
    name: ClassVar[str] = "plain socket"
    bound: ClassVar[bool] = True
    about: ClassVar[str] = "one TCP connection over loopback to each receiver, a thread for each"

    def needs(self, nbytes: int, receivers: int) -> Needs:
        return Needs(BLOCK)

    def send(self, weights: Tensors, setting: Setting) -> SendingEnd:
        return _SendSocket(flat_of(weights), setting)

    def receive(
        self, target: Tensors, setting: Setting, index: int, notices: Notices
    ) -> ReceivingEnd:
        return _ReceiveSocket(flat_of(target), setting)


class _SendSocket(SendingEnd):
    def __init__(self, flat: torch.Tensor, setting: Setting) -> None:
        self._flat = view_of(flat)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = Path(setting.shared, "port")
            port.with_suffix(".new").write_text(json.dumps(listening.getsockname()[1]))
            port.with_suffix(".new").rename(port)
            listening.settimeout(setting.timeout)
            self._links = [listening.accept()[0] for _ in range(setting.receivers)]
        for link in self._links:
            link.settimeout(setting.timeout)

    def publish(self, version: int) -> None:
        threads = [
            threading.Thread(target=link.sendall, args=(self._flat,), daemon=True)
            for link in self._links
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def close(self) -> None:
        for link in self._links:
            link.close()


class _ReceiveSocket(ReceivingEnd):
    def __init__(self, flat: torch.Tensor, setting: Setting) -> None:
        self._flat = view_of(flat)
        port = Path(setting.shared, "port")
        setting.deadline().wait(lambda: port.exists() or None)
        self._link = socket.create_connection(
            ("127.0.0.1", json.loads(port.read_text())), setting.timeout
        )

    def receive(self, version: int, deadline: Deadline) -> float:
        self._link.settimeout(deadline.remaining)
        self._link.recv_into(self._flat, 1, socket.MSG_PEEK)  # waits for the version
        return timed(self._all)

    def _all(self) -> None:
        at = 0
        while at < len(self._flat):
            got = self._link.recv_into(self._flat[at:])
            if not got:
                raise ConnectionError("the trainer closed the connection")
            at += got

    def close(self) -> None:
        self._link.close()
