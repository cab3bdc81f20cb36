"""A receiving process's connection to the sender, kept up for as long as the process wants it."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from weightsync.deadline import Deadline
from weightsync.errors import DeadlineError, WeightSyncError
from weightsync.schemes.nccl.control import Connection, Message, Refused, join
from weightsync.schemes.nccl.endpoint import Endpoint
from weightsync.words import one_line

log = logging.getLogger("weightsync")

_RETRY = 0.2
_CONNECT_SECONDS = 10.0

_LAST_WORD_SECONDS = 1.0


class Link:
    """Connects in the background, again and again, until it is closed.

    Args:
        hello: makes the words to introduce oneself with, anew for each connection.
        on_message: called in the link's thread with the connection and each message.
        on_lost: called in the link's thread when a connection is over.

    All three are methods of one object, which the link does not keep alive.
    """

    def __init__(
        self,
        where: Endpoint,
        token: str | None,
        hello: Callable[[], Message],
        on_message: Callable[[Connection, Message], None],
        on_lost: Callable[[Connection], None] | None = None,
    ) -> None:
        self._where = where
        self._token = token
        self._hello = weakref.WeakMethod(hello)
        self._on_message = weakref.WeakMethod(on_message)
        self._on_lost = None if on_lost is None else weakref.WeakMethod(on_lost)
        self._connection: Connection | None = None
        self._trouble: Exception | None = None
        self._changed = threading.Condition()
        self._closed = False
        threading.Thread(target=self._run, name="weightsync link", daemon=True).start()

    def _run(self) -> None:
        pause = _RETRY
        while not self._closed:
            hello = self._hello()
            if hello is None:
                return
            try:
                words = hello()
                del hello  # or it would keep its object
                connection, _ = join(self._where, self._token, words, Deadline(_CONNECT_SECONDS))
            except (OSError, EOFError, WeightSyncError) as error:
                with self._changed:
                    self._trouble = error
                    self._changed.notify_all()
                    if not self._closed:
                        self._changed.wait(pause)
                pause = min(1.0, pause * 1.5)
                continue
            pause = _RETRY
            with self._changed:
                self._connection, self._trouble = connection, None
                if self._closed:
                    connection.close()
                self._changed.notify_all()
            try:
                while True:
                    message = connection.receive()
                    heard = self._on_message()
                    if heard is None:
                        return
                    heard(connection, message)
                    del heard
            except (OSError, EOFError):
                pass
            except Exception as error:  # a sender that speaks another language
                log.warning("%s: %s", self._where, one_line(error))
                time.sleep(_RETRY)
            finally:
                connection.close()
                with self._changed:
                    self._connection = None
                    self._changed.notify_all()
                lost = None if self._on_lost is None else self._on_lost()
                if lost is not None:
                    lost(connection)
                del lost

    def wait_connected(self, deadline: Deadline) -> None:
        """
        Raises:
            Refused: the sender does not want this. DeadlineError: there is none; says why.
        """
        with self._changed:
            while self._connection is None:
                if isinstance(self._trouble, Refused):
                    raise self._trouble
                if self._closed:
                    raise WeightSyncError("the connection was closed")
                if deadline.expired:
                    raise DeadlineError(
                        f"no live sender at {self._where} within {deadline.seconds:.1f} s "
                        f"({self._trouble or 'no answer'}): is its connect() done, and are address "
                        "and port the same on both sides?"
                    )
                self._changed.wait(min(0.1, max(deadline.remaining, 0.001)))

    def tell(self, message: dict[str, Any]) -> bool:
        """Whether it went out; False also while there is no connection."""
        connection = self._connection
        return connection is not None and connection.tell(message)

    def end(self, last: dict[str, Any]) -> None:
        """Close it with a last word, once that was heard: the other side hangs up then."""
        with self._changed:
            self._closed = True  # so that it does not come back
            self._changed.notify_all()
            if self.tell(last):
                self._changed.wait_for(lambda: self._connection is None, _LAST_WORD_SECONDS)
        self.close()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            connection = self._connection
            self._changed.notify_all()
        if connection is not None:
            connection.close()
