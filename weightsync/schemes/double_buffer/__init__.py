"""Double-buffered shared storage: the trainer writes one slot while engines read another.

For a trainer and engines on one host, over memory-backed storage (``/dev/shm``), or on several
hosts with one mount. The format and the protocol are in docs/architecture.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from weightsync.errors import SchemeError
from weightsync.files import Directory
from weightsync.inspection import RunStatus
from weightsync.run.path import run_path
from weightsync.scheme import WeightSyncScheme, register_scheme, require_int
from weightsync.schemes.double_buffer import layout
from weightsync.schemes.double_buffer.inspection import SlotRuns
from weightsync.schemes.double_buffer.publisher import DoubleBufferPublisher
from weightsync.schemes.double_buffer.subscriber import DoubleBufferSubscriber
from weightsync.transport import Publisher, Subscriber

__all__ = ["DoubleBufferScheme", "RunStatus"]


@register_scheme
@dataclass(frozen=True)
class DoubleBufferScheme(WeightSyncScheme):
    """Weights through two or more slots of shared storage. URL: ``shm:///dev/shm/run42?slots=3``.

    Attributes:
        path: a directory of this run's own, made by the sender; its parent exists. Use
            ``/dev/shm/...`` on one host.
        slots: buffers, each as long as the weights. With two, the trainer can be at most one
            version ahead of the slowest receiver; each further one lets it go one further.
        on_busy: when every slot is in use, ``"wait"`` until the deadline or ``"skip"`` the version.
        verify: readers compare every byte with its digest before it is used.
        reader_path: where receivers find the directory, if the mount point differs there.
        keep_files: leave the last version in place when the sender ends. Otherwise its files are
            removed; engines keep what they hold.
        threads: for copies and digests; by default one for each core, at most 8.
    """

    url_scheme: ClassVar[str] = "shm"
    run_kind: ClassVar[SlotRuns] = SlotRuns()

    path: str
    slots: int = 2
    on_busy: Literal["wait", "skip"] = "wait"
    verify: bool = True
    reader_path: str | None = None
    keep_files: bool = False
    threads: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", run_path("path", self.path))
        if self.reader_path is not None:
            object.__setattr__(self, "reader_path", run_path("reader_path", self.reader_path))
        require_int("slots", self.slots, 2, layout.MAX_SLOTS)
        if self.on_busy not in ("wait", "skip"):
            raise SchemeError(f"on_busy={self.on_busy!r}: 'wait' or 'skip'")
        for name in ("verify", "keep_files"):
            if type(getattr(self, name)) is not bool:
                raise SchemeError(f"{name}={getattr(self, name)!r}: True or False")
        if self.threads is not None:
            require_int("threads", self.threads)

    def create_publisher(self) -> Publisher:
        return DoubleBufferPublisher(self)

    def create_subscriber(self, receiver: str | None = None) -> Subscriber:
        return DoubleBufferSubscriber(self, receiver)

    def inspect(self) -> RunStatus:
        """What is in the run's directory now; changes nothing, and needs no sender.

        Raises:
            FileNotFoundError: there is no such directory.
        """
        return self.run_kind.inspect(Directory.open(self.path))

    def address(self) -> tuple[str, str]:
        return "", self.path

    @classmethod
    def from_address(cls, host: str, path: str, options: dict[str, Any]) -> DoubleBufferScheme:
        if host:
            raise SchemeError(f"shm://{host}{path}: a path has three slashes, shm:///{host}{path}")
        return cls(path, **options)
