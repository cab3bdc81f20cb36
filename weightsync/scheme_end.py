"""What sender and receivers have in common: a ``with`` block ends them, listeners hear of them."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import Self

from weightsync.listeners import Call, Listener, Listeners, Side, everywhere
from weightsync.version import Version

if TYPE_CHECKING:
    from weightsync.scheme import WeightSyncScheme

log = logging.getLogger("weightsync")


class SchemeEnd(ABC):
    """One end of a scheme.

    Args:
        id: how the sender knows this end; empty of a sender.
        listeners: see :meth:`subscribe`.
    """

    side: ClassVar[Side]

    def __init__(
        self, scheme: WeightSyncScheme, id: str = "", listeners: Iterable[Listener] = ()
    ) -> None:
        self.scheme = scheme
        self.id = id
        self._listeners = Listeners(listeners)

    @property
    @abstractmethod
    def connected(self) -> bool:
        """Whether it is between ``connect`` and ``shutdown``."""

    @property
    @abstractmethod
    def version(self) -> Version | None:
        """The version that was published last, or that is held."""

    @abstractmethod
    def shutdown(self) -> None:
        """Give everything back. Idempotent."""

    # ---------------------------------------------------------------- who is told

    def subscribe(self, listener: Listener) -> None:
        """Have a callable hear of each update from now on, failed ones included.

        It is called with an :class:`~weightsync.listeners.Outcome`, in the thread that made the
        update, which waits for it. What it raises is logged, once, and fails no update. One that is
        subscribed already is not called twice.
        """
        self._listeners.add(listener)

    def unsubscribe(self, listener: Listener) -> None:
        """The reverse of :meth:`subscribe`. Idempotent."""
        self._listeners.remove(listener)

    @contextmanager
    def _telling(self) -> Iterator[Call]:
        """Around a call: whoever listens hears of the update that it makes, or does not."""
        call = Call()
        try:
            yield call
        except BaseException as error:
            # An interrupt of a wait is no failed update; of an update under way it is.
            if isinstance(error, Exception) or call.version is not None:
                self._tell(call, error)
            raise
        if call.report is not None:
            self._tell(call)

    def _tell(self, call: Call, error: BaseException | None = None) -> None:
        """Failures are the caller's to log: they are raised as well."""
        logs = error is None and log.isEnabledFor(logging.INFO)
        if logs or self._listeners or everywhere:
            outcome = call.outcome(self, error)
            if logs:
                log.info("%s", outcome)
            self._listeners.tell(outcome)
            everywhere.tell(outcome)

    # ---------------------------------------------------------------- the end

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()
