"""Being alive in an object store, where nobody can hold a lock: by a beat that others see change.

An object of each end says what it has to say, and a beat that grows. Whoever watches goes by its
own monotonic clock: what has not changed for some seconds is dead, whatever the time of day is.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import time
from dataclasses import dataclass
from multiprocessing.util import Finalize
from typing import Any

from weightsync.deadline import Deadline
from weightsync.errors import ProtocolError, WeightSyncError
from weightsync.run.records import MAX_RECORD, number, reading, text
from weightsync.schemes.disk.store import Store
from weightsync.words import address_of, one_line

log = logging.getLogger("weightsync")

_BEATS = 5
"""In the time after which who shows none is held for dead."""


@dataclass(frozen=True)
class Sign:
    """One end's object.

    Attributes:
        token: which life of it.
        ended: it has gone on purpose.
        words: what it says.
    """

    token: str
    beat: int
    ended: bool
    words: dict[str, Any]

    def to_json(self) -> bytes:
        fields = {"token": self.token, "beat": self.beat, "ended": self.ended, "words": self.words}
        return json.dumps(fields).encode()

    @classmethod
    def from_json(cls, data: bytes, what: str) -> Sign:
        """
        Raises:
            ProtocolError: it is none; says which object and why.
        """
        with reading(what):
            fields = json.loads(data)
            if type(fields["ended"]) is not bool or not isinstance(fields["words"], dict):
                raise TypeError("true or false, and an object, were expected")
            return cls(
                text(fields["token"]), number(fields["beat"]), fields["ended"], fields["words"]
            )


def read_sign(store: Store, name: str, deadline: Deadline) -> Sign | None:
    """
    Raises:
        ProtocolError: the object is not a sign.
    """
    try:
        data = store.read(name, MAX_RECORD, deadline)
    except FileNotFoundError:
        return None
    return Sign.from_json(data, f"{store.where}/{name}")


class Pulse:
    """Keeps an object of this process's own fresh, in a thread, until it ends.

    Args:
        patience: seconds after which others hold this end for dead.
        owns: a removed object means that the run is over; otherwise it is written again, as for
            one that was held for dead.
        remove: the object goes when this ends; otherwise it says so.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        words: dict[str, Any],
        patience: float,
        *,
        owns: bool = False,
        remove: bool = False,
    ) -> None:
        self._life = _Life(store, name, words, patience, owns, remove)
        self._life.tell(Deadline(patience))
        threading.Thread(
            target=self._life.beat, name=f"weightsync beat {name}", daemon=True
        ).start()
        # Also when the process ends without close(), or lets go of this.
        self._end = Finalize(self, self._life.end, exitpriority=0)

    def say(self, words: dict[str, Any], deadline: Deadline) -> None:
        """Say something else from now on.

        Raises:
            WeightSyncError: another end has taken the name.
        """
        self.require_ours(deadline)
        self._life.words = words
        self._life.tell(deadline)

    def require_ours(self, deadline: Deadline) -> None:
        """
        Raises:
            WeightSyncError: another end has taken the name, or the object is gone.
        """
        self._life.look(deadline)
        if self._life.lost:
            raise WeightSyncError(self._life.lost)

    @property
    def lost(self) -> bool:
        return bool(self._life.lost)

    def close(self) -> None:
        """End. Idempotent."""
        self._end()


class _Life:
    """What a pulse's thread needs, which must not keep the pulse itself."""

    def __init__(
        self,
        store: Store,
        name: str,
        words: dict[str, Any],
        patience: float,
        owns: bool,
        remove: bool,
    ) -> None:
        self._owns = owns
        self.words = words
        self.lost = ""
        self._store = store
        self._name = name
        self._patience = patience
        self._remove = remove
        self._token = secrets.token_hex(8)
        self._beat = 0
        self._over = threading.Event()
        self._writing = threading.Lock()
        self._pid = os.getpid()

    def tell(self, deadline: Deadline, ended: bool = False) -> None:
        with self._writing:
            if self._over.is_set() and not ended:
                return
            self._beat += 1
            sign = Sign(self._token, self._beat, ended, self.words)
            self._store.write(self._name, sign.to_json(), deadline)

    def look(self, deadline: Deadline) -> None:
        try:
            sign = read_sign(self._store, self._name, deadline)
        except ProtocolError:
            return  # it is written over
        if sign is None:
            if self._owns:
                self.lost = f"{self._store.where}/{self._name} was removed while it was used"
        elif sign.token != self._token:
            who = f"pid {sign.words.get('pid')!s:.20} on {sign.words.get('host')!s:.80}"
            self.lost = (
                f"{self._store.where}: another process ({who}) has taken the place of this one, "
                f"which has shown no life for {self._patience:.1f} s"
            )

    def beat(self) -> None:
        while not self._over.wait(self._patience / _BEATS):
            try:
                self.look(Deadline(self._patience))
                if self.lost:
                    return
                self.tell(Deadline(self._patience))
            except Exception as error:  # the store may be back at the next beat
                where = address_of(self._store.url)
                log.debug("%s: no beat of %s: %s", where, self._name, one_line(error))

    def end(self) -> None:
        if os.getpid() != self._pid or self._over.is_set():
            return
        self._over.set()
        deadline = Deadline(self._patience)
        try:
            self.look(deadline)
            if self.lost:
                return
            if self._remove:
                self._store.remove(self._name, deadline)
            else:
                self.tell(deadline, ended=True)
        except Exception:  # of an interpreter that ends, too
            return  # others will see that it does not beat any more


class Watch:
    """Whether signs are of the living, as far as one can see.

    Args:
        patience: seconds in which a living end shows a new beat.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._seen: dict[str, tuple[tuple[str, int], float, bool]] = {}

    def alive(self, name: str, sign: Sign) -> bool | None:
        """None: it is too early to tell."""
        if sign.ended:
            return False
        now = time.monotonic()
        at = sign.token, sign.beat
        former = self._seen.get(name)
        if former is None or former[0][0] != sign.token:
            self._seen[name] = at, now, False
            return None
        if former[0] != at:
            self._seen[name] = at, now, True
            return True
        if now - former[1] > self._patience:
            return False
        return True if former[2] else None
