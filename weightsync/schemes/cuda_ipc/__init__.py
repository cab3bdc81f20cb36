"""CUDA IPC: trainer and engine on one GPU, where the engine reads the trainer's own tensors.

Nothing is copied but what the engine takes. The protocol is in docs/architecture.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from weightsync.errors import SchemeError
from weightsync.files import Directory
from weightsync.inspection import RunStatus
from weightsync.run.path import run_path
from weightsync.scheme import WeightSyncScheme, register_scheme
from weightsync.schemes.cuda_ipc.handles import CUDAExchange, Exchange
from weightsync.schemes.cuda_ipc.inspection import ShownRuns
from weightsync.schemes.cuda_ipc.publisher import CUDAIPCPublisher
from weightsync.schemes.cuda_ipc.subscriber import CUDAIPCSubscriber
from weightsync.transport import Publisher, Subscriber

__all__ = ["CUDAIPCScheme"]


@register_scheme
@dataclass(frozen=True)
class CUDAIPCScheme(WeightSyncScheme):
    """The trainer's tensors, where they are. URL: ``cuda-ipc:///dev/shm/run42?release=1``.

    For trainer and engine on one GPU, in one process or in two of one host. ``update_weights``
    returns when every live receiver has answered, and so has read, or at its deadline, when the
    version is taken back: no copy is kept.

    Attributes:
        path: a directory of this run's own for small files, made by the sender; its parent exists.
        release: engines unmap the trainer's memory after every update, so that the trainer can
            free it (offloading, sleep). Otherwise they keep it mapped, which saves a little time.
    """

    url_scheme: ClassVar[str] = "cuda-ipc"
    run_kind: ClassVar[ShownRuns] = ShownRuns()

    path: str
    release: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", run_path("path", self.path))
        if type(self.release) is not bool:
            raise SchemeError(f"release={self.release!r}: True or False")

    def exchange(self) -> Exchange:
        """How memory is shown to another process."""
        return CUDAExchange()

    def create_publisher(self) -> Publisher:
        return CUDAIPCPublisher(self)

    def create_subscriber(self, receiver: str | None = None) -> Subscriber:
        return CUDAIPCSubscriber(self, receiver)

    def create_reader(self, rank: int, size: int) -> Subscriber:
        self.exchange().require()
        return self.create_subscriber()

    def inspect(self) -> RunStatus:
        """What is in the run's directory now; changes nothing, and needs no GPU.

        Raises:
            FileNotFoundError: there is no such directory.
        """
        return self.run_kind.inspect(Directory.open(self.path))

    def address(self) -> tuple[str, str]:
        return "", self.path

    @classmethod
    def from_address(cls, host: str, path: str, options: dict[str, Any]) -> CUDAIPCScheme:
        if host:
            raise SchemeError(
                f"cuda-ipc://{host}{path}: a path has three slashes, cuda-ipc:///{host}{path}"
            )
        return cls(path, **options)
