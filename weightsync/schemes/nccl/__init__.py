"""Collectives over replicas and GPUs: the trainer broadcasts each version to all that generate.

For trainers and engines on different GPUs or hosts; on gloo, for CPUs too. Rank 0 is the trainer,
the processes of each replica follow. The protocol is in docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch

from weightsync.errors import SchemeError
from weightsync.inspection import RunStatus
from weightsync.scheme import WeightSyncScheme, register_scheme, require_int
from weightsync.schemes.nccl.endpoint import Endpoint, reserve_port
from weightsync.schemes.nccl.topology import ranks_of, size_of
from weightsync.transport import Publisher, Subscriber

__all__ = ["NCCLScheme", "ranks_of"]

_MB = 1 << 20


@register_scheme
@dataclass(frozen=True)
class NCCLScheme(WeightSyncScheme):
    """Weights by broadcast. URL: ``nccl://10.0.0.5:29500?num_replicas=2&gpus_per_replica=4``.

    Receivers take a version into their memory while their engine generates, and apply it when they
    poll. One that connects later, or comes back, gets the next version.

    Attributes:
        master_address: where the trainer listens: an address of its host by which the receivers
            reach it. IPv6 works, without brackets here.
        master_port: None takes a free port, which is this scheme's from then on; make the scheme
            once and hand it, or its URL, to both sides.
        num_replicas: how many receivers the first update waits for; None for one.
        gpus_per_replica: processes of each, a number or one for each replica; checked when they
            connect. None: not checked.
        backend: ``"nccl"`` for GPUs, ``"gloo"`` for CPUs.
        bucket_mb: MiB that travel at a time, four of them under way; by default 8 with gloo, and
            with NCCL a sixteenth of the weights, from 64 to 256.
        buffers: versions that a receiving process has room for. With two it can go back to the
            last one if an update fails; with one it needs half the memory.
        memory: whose: ``"gpu"``, so that weights never leave the GPUs; ``"host"``, through which
            they take several times as long; ``"auto"`` takes the GPU's if a sixteenth of it stays
            free. Of no meaning with gloo.
        verify: compare what arrives with its digests.
        peer_timeout: seconds after which a process that does not answer is given up.
        token: a secret that both sides share; without it whoever reaches the port may receive.
        threads: for copies and digests; by default one for each core, at most 8.
        receiver: filled in by a receiver for its engine's workers.
    """

    url_scheme: ClassVar[str] = "nccl"
    address_fields: ClassVar[tuple[str, ...]] = ("master_address", "master_port")

    master_address: str = "127.0.0.1"
    master_port: int | None = None
    num_replicas: int | None = None
    gpus_per_replica: int | tuple[int, ...] | None = None
    backend: Literal["nccl", "gloo"] = "nccl"
    bucket_mb: int | None = None
    buffers: int = 2
    memory: Literal["auto", "gpu", "host"] = "auto"
    verify: bool = True
    peer_timeout: float = 10.0
    token: str | None = field(default=None, repr=False)
    threads: int | None = None
    receiver: str | None = None

    def __post_init__(self) -> None:
        host = self.master_address
        if not isinstance(host, str) or not host or any(c in host for c in "[]/@?# \0"):
            raise SchemeError(f"master_address={host!r}: a host name or an IP address was expected")
        if host in ("0.0.0.0", "::", "*"):
            raise SchemeError(
                f"master_address={host!r} is no address that receivers could connect to: give one "
                "of the trainer's host"
            )
        if self.backend not in ("nccl", "gloo"):
            raise SchemeError(f"backend={self.backend!r}: 'nccl' or 'gloo'")
        for name in ("num_replicas", "bucket_mb", "buffers", "threads"):
            value = getattr(self, name)
            if value is None and name != "buffers":
                continue
            require_int(name, value)
        if self.memory not in ("auto", "gpu", "host"):
            raise SchemeError(f"memory={self.memory!r}: 'auto', 'gpu' or 'host'")
        if type(self.verify) is not bool:
            raise SchemeError(f"verify={self.verify!r}: True or False")
        if type(self.peer_timeout) not in (int, float) or not self.peer_timeout > 0:
            raise SchemeError(f"peer_timeout={self.peer_timeout!r}: seconds, more than 0")
        for name in ("token", "receiver"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise SchemeError(f"{name}={value!r:.80}: a text was expected")
        self._check_replicas()
        port = 0 if self.master_port is None else self.master_port
        require_int("master_port", port, 0, 65535)
        object.__setattr__(self, "master_port", port or reserve_port(host))

    def _check_replicas(self) -> None:
        each = self.gpus_per_replica
        if each is None:
            return
        if isinstance(each, Sequence) and not isinstance(each, str):
            sizes = tuple(size_of(one) for one in each)
            if not sizes:
                raise SchemeError(f"gpus_per_replica={each!r}: a number, or one for each replica")
            if self.num_replicas is not None and len(sizes) != self.num_replicas:
                raise SchemeError(
                    f"gpus_per_replica={each!r} is for {len(sizes)} replicas, num_replicas="
                    f"{self.num_replicas}"
                )
            # One is written as a number: the same in a URL.
            object.__setattr__(self, "gpus_per_replica", sizes if len(sizes) > 1 else sizes[0])
        elif type(each) is int:
            size_of(each)
        else:
            raise SchemeError(f"gpus_per_replica={each!r}: a number, or one for each replica")

    @property
    def port(self) -> int:
        assert self.master_port is not None
        return self.master_port

    @property
    def workers(self) -> tuple[int, ...] | None:
        """How many processes the replicas may have; None: any number."""
        each = self.gpus_per_replica
        return (each,) if isinstance(each, int) else each

    @property
    def bucket_size(self) -> int:
        """Bytes, at most."""
        return (self.bucket_mb or (8 if self.backend == "gloo" else 256)) * _MB

    def device_here(self) -> torch.device:
        """What collectives of this process move.

        Raises:
            SchemeError: NCCL needs a GPU, and there is none.
        """
        if self.backend == "gloo":
            return torch.device("cpu")
        if not torch.cuda.is_available():
            raise SchemeError(
                "backend='nccl' needs a CUDA device, and this process sees none; "
                "backend='gloo' works without"
            )
        return torch.device("cuda", torch.cuda.current_device())

    def create_publisher(self) -> Publisher:
        from weightsync.schemes.nccl.publisher import NCCLPublisher

        return NCCLPublisher(self)

    def create_subscriber(self, receiver: str | None = None) -> Subscriber:
        from weightsync.schemes.nccl.subscriber import NCCLSubscriber

        return NCCLSubscriber(self, receiver)

    def for_workers(self, receiver: str) -> NCCLScheme:
        return replace(self, receiver=receiver)

    def create_reader(self, rank: int, size: int) -> Subscriber:
        from weightsync.schemes.nccl.subscriber import WorkerReader

        if self.receiver is None:
            raise SchemeError("this is not the scheme that a receiver made for its workers")
        return WorkerReader(self, self.receiver, rank, size)

    def purpose(self) -> str:
        # Each rank may have taken a free port of its own; rank 0's is the one that counts.
        return f"nccl://{self.master_address}"

    def inspect(self) -> RunStatus:
        """What the sender at this address tells a visitor; it sends and waits for nobody more.

        Nothing but the sender knows of such a run: without one there is nothing to see.
        """
        from weightsync.schemes.nccl.inspection import inspect_sender

        return inspect_sender(self)

    def address(self) -> tuple[str, str]:
        return str(Endpoint(self.master_address, self.port)), ""

    @classmethod
    def from_address(cls, host: str, path: str, options: dict[str, Any]) -> NCCLScheme:
        if path not in ("", "/"):
            raise SchemeError(f"nccl://{host}{path}: there is no path, only host and port")
        where = Endpoint.parse(host) if host else Endpoint("127.0.0.1", 0)
        return cls(master_address=where.host, master_port=where.port or None, **options)
