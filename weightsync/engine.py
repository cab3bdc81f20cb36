"""What an inference engine must offer to be driven by a receiver.

An engine knows nothing of transports: it is given an open snapshot, and the address under which
its own worker processes can open one themselves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from weightsync.deadline import Deadline
from weightsync.errors import EngineError
from weightsync.manifest import Manifest
from weightsync.options import require_known
from weightsync.transport import Snapshot
from weightsync.version import Version


@dataclass(frozen=True)
class Update:
    """One version, on its way into an engine.

    Attributes:
        url: the scheme's URL, for worker processes that open the snapshot themselves.
        snapshot: this process's lease; open at least until the engine holds a newer version.
    """

    url: str
    version: Version
    snapshot: Snapshot


@dataclass(frozen=True)
class Fit:
    """How the names sent and the names an engine has fit together."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verification:
    """The outcome of comparing what an engine holds with the version it claims.

    Attributes:
        different: names whose bytes differ. Of an engine that fuses or repacks weights its own
            name for them, and which tensors they were made of.
        unchecked: tensors of the version that could not be compared. What no version holds
            (rotary tables, default scales, ...) is not among them.
        answers: whether the engine answered the same before and after the version was loaded
            anew; None if it was not asked, or everything could be compared.
    """

    version: Version
    checked: int
    different: tuple[str, ...]
    unchecked: tuple[str, ...] = ()
    answers: bool | None = None

    @property
    def ok(self) -> bool:
        """Nothing differs, and what could not be compared answers as it should."""
        return not self.different and (not self.unchecked or self.answers is True)


class Engine(ABC):
    """An inference engine. The receiver calls, in this order and from one thread at a time:

    ``workers``, ``number_workers`` and ``connect`` once, and again when it is thought to be dead;
    then for each update ``check`` and ``stage`` while requests run, ``pause``,
    ``apply``, ``flush``, ``label``, and ``resume`` in any case. If anything after ``pause`` fails,
    ``apply`` is called again with the last good version.
    """

    @property
    @abstractmethod
    def target(self) -> Any:
        """The object whose weights are updated: the one the user passed."""

    @property
    def name(self) -> str:
        """How messages call it, where a receiver has several."""
        return type(self.target).__name__

    def require_thread(self) -> None:
        """
        Raises:
            EngineError: the engine answers in this very thread, so that who calls it from here
                waits for ever; says what to use instead.
        """

    def workers(self, deadline: Deadline) -> int:
        """How many processes of its own open the snapshots; 0: the receiver's process does.

        Raises:
            EngineError: it cannot be reached.
        """
        return 0

    def number_workers(self, first: int, total: int) -> None:
        """Say, before ``connect``, which of all workers of a receiver's engines are its own.

        They are ``first`` and those that follow, of ``total``; see
        :meth:`~weightsync.scheme.WeightSyncScheme.create_reader`.
        """

    def connect(self, url: str, deadline: Deadline) -> None:
        """Get ready to take updates from this scheme.

        Raises:
            EngineError: the engine is not set up for it; says what to change.
        """

    def join(self, url: str, deadline: Deadline) -> None:
        """Get ready to take updates from another scheme, beside the one it is connected to.

        One of the two is left soon, by :meth:`leave`. An engine that can have one only, which is
        what this does, is told to join the one that it is to stay with once more.

        Raises:
            EngineError: it cannot.
        """
        self.connect(url, deadline)

    def leave(self, url: str) -> None:
        """Take no more updates from a scheme, one of the two that it was connected to."""

    def check(self, manifest: Manifest) -> Fit:
        """Compare names, shapes and dtypes with what the engine has, touching nothing.

        Raises:
            MismatchError: they do not fit; lists both sides.
        """
        return Fit()

    def stage(self, update: Update, deadline: Deadline) -> None:
        """Do whatever can be done while requests still run: read, verify, prefetch."""

    def unstage(self) -> None:
        """Forget what was staged: the update failed, now or later. Raises nothing."""

    def pause(self, deadline: Deadline) -> None:
        """Let no request make progress until ``resume``."""

    @abstractmethod
    def apply(self, update: Update, deadline: Deadline) -> None:
        """Load the weights, in place. May leave a mix behind if it fails."""

    def stopped(self) -> float | None:
        """Seconds for which requests made no progress in the last update, where the engine knows
        better than who waited from ``pause`` to ``resume``."""
        return None

    def notes(self) -> Sequence[str]:
        """What people should know of how the last version was applied."""
        return ()

    def unrestored(self) -> Sequence[str]:
        """Names of tensors that the engine lost (in sleep) and that no update brings back."""
        return ()

    def flush(self, deadline: Deadline) -> None:
        """Drop every cache that was computed with the old weights, and make sure it is gone.

        Raises:
            EngineError: the engine did not confirm it.
        """

    def label(self, version: Version | None) -> None:
        """Make the version visible to whoever asks the engine. None: no whole version is held."""

    def resume(self) -> None:
        """Let requests go on."""

    def lost_weights(self) -> bool:
        """Whether the engine dropped its weights since the last ``apply``, as in deep sleep.

        Asked often. Whatever it raises means that it cannot be relied on, and is to be loaded anew.
        """
        return False

    def verify(self, update: Update) -> Verification:
        """Compare what the engine holds with a version, bit for bit."""
        return Verification(update.version, 0, (), tuple(update.snapshot.manifest.by_name))

    def answers(self) -> str | None:
        """A digest of what the engine makes of fixed inputs; None: it is not to be asked."""
        return None

    def close(self) -> None:
        """Give back what ``connect`` took. The engine itself goes on."""


EngineMaker = Callable[..., Engine]


def as_engine(target: Any, **options: Any) -> Engine:
    """Choose the engine for whatever the user passed.

    Raises:
        EngineError: nothing here can drive it, or it does not take these options.
    """
    if isinstance(target, Engine):
        if options:
            raise EngineError(f"an Engine takes no options: {', '.join(options)}")
        return target
    make = _maker_of(target)
    require_known(type(target).__name__, options, make)
    try:
        return make(target, **options)
    except TypeError as error:
        raise EngineError(f"{type(target).__name__}: {error}") from None


def require_engine(target: Any) -> None:
    """
    Raises:
        EngineError: :func:`as_engine` would not take it.
    """
    if not isinstance(target, Engine):
        _maker_of(target)


def _maker_of(target: Any) -> Callable[..., Engine]:
    from weightsync.engines import ENGINES

    plugged = [point.load() for point in entry_points(group="weightsync.engines")]
    for accepts, make in [*ENGINES, *plugged]:
        if accepts(target):
            return make  # type: ignore[no-any-return]
    raise EngineError(
        f"{type(target).__name__} is not an engine: pass an nn.Module, a mapping of names to "
        "tensors, vLLM's LLM or AsyncLLM, a ws.VLLMServer, a Ray actor's handle, ws.Replicas of "
        "such, or your own subclass of weightsync.Engine"
    )
