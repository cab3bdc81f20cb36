"""What can be looked at of a process that sends or takes weights: no guess among it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from weightsync.errors import ProtocolError
from weightsync.run.process import this_process

_ANYWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses of nobody (RFC 5737, RFC 3849): the route to them is the one to other hosts."""

_GPUS = """
import ctypes
cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
cuda.cuInit(0)
cuda.cuDeviceGetCount(ctypes.byref(count))
for number in range(count.value):
    device, uuid = ctypes.c_int(0), (ctypes.c_ubyte * 16)()
    cuda.cuDeviceGet(ctypes.byref(device), number)
    cuda.cuDeviceGetUuid_v2(uuid, device)  # of a slice its own
    print(bytes(uuid).hex())
"""
"""In a process of its own: a driver that was initialised does not survive a fork."""

_ASKING = 20.0
"""Seconds for that."""


@dataclass(frozen=True)
class Place:
    """Where a process runs. Plain values: may travel as JSON, or as an argument.

    Attributes:
        machine: the kernel's boot id and the mount namespace: what is equal here has the same
            files under the same names. Two containers have different ones.
        node: the id of its Ray node, or what was given: two different ones are never held for
            one, even if they are of one machine. None: the machine says all.
        host, pid: for people.
        process: no other process has the same.
        spaces: its IPC and PID namespaces, which CUDA's handles are valid in.
        address: by which other hosts reach it; None if no route leads to any.
        gpus: UUIDs of the GPUs in question: those that its tensors lie on, or else those that the
            process sees.
        backends: of ``torch.distributed``: ``"gloo"``, ``"nccl"``.
    """

    machine: str
    node: str | None
    host: str
    pid: int
    process: str
    spaces: str
    address: str | None
    gpus: tuple[str, ...]
    backends: tuple[str, ...]

    @classmethod
    def here(cls, gpus: Iterable[str] | None = None, node: str | None = None) -> Place:
        """This process, as it is now.

        Args:
            gpus: UUIDs; None for all that the process sees.
            node: a name of your own for what must not be taken for one with others.
        """
        return cls(
            machine=f"{_boot()}/{_namespace('mnt')}",
            node=node or _ray_node(),
            host=socket.gethostname(),
            pid=os.getpid(),
            process=this_process(),
            spaces=" ".join(_namespace(kind) for kind in ("ipc", "pid")),
            address=_address(),
            gpus=tuple(sorted(gpus_seen() if gpus is None else gpus)),
            backends=_backends(),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-able values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> Place:
        """The reverse of :meth:`to_dict`, also after a way through JSON.

        Raises:
            ProtocolError: these are no such values.
        """
        try:
            address, node = values["address"], values["node"]
            return cls(
                machine=str(values["machine"]),
                node=None if node is None else str(node),
                host=str(values["host"]),
                pid=int(values["pid"]),
                process=str(values["process"]),
                spaces=str(values["spaces"]),
                address=None if address is None else str(address),
                gpus=tuple(map(str, values["gpus"])),
                backends=tuple(map(str, values["backends"])),
            )
        except (TypeError, KeyError, ValueError, OverflowError) as error:
            raise ProtocolError(f"no description of a place: {error!r:.200}") from None

    def is_with(self, other: Place) -> bool:
        """Whether both are of one machine, and of one node as far as nodes have names."""
        return self.machine == other.machine and self.node == other.node

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


def gpus_seen() -> tuple[str, ...]:
    """UUIDs of the NVIDIA GPUs that this process sees, in no particular order."""
    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return tuple(gpu_of(number) for number in range(torch.cuda.device_count()))
    with suppress(OSError, subprocess.SubprocessError):
        found = subprocess.run(
            [sys.executable, "-I", "-c", _GPUS],
            capture_output=True,
            text=True,
            timeout=_ASKING,
            check=True,
        )
        return tuple(found.stdout.split())
    return ()


def gpu_of(number: int) -> str:
    """The UUID of one of the GPUs that torch uses in this process: 32 hexadecimal digits."""
    import torch

    return str(torch.cuda.get_device_properties(number).uuid).replace("-", "")


def _ray_node() -> str | None:
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    return str(ray.get_runtime_context().get_node_id())


def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return f"unknown-{this_process()}"  # equal to no other's


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return f"{kind}:unknown-{this_process()}"


def _address() -> str | None:
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return str(ray.util.get_node_ip_address())
    from weightsync.engines.vllm.addresses import own_address_towards

    for anywhere in _ANYWHERE:
        with suppress(OSError):
            return own_address_towards(anywhere, 9)
    return None


def _backends() -> tuple[str, ...]:
    from torch import distributed

    if not distributed.is_available():
        return ()
    there = {"gloo": distributed.is_gloo_available(), "nccl": distributed.is_nccl_available()}
    return tuple(name for name, found in there.items() if found)
