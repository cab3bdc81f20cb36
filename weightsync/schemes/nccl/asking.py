"""Whether processes that say nothing are alive: they are asked, and have so long to answer."""

from __future__ import annotations

import time

from weightsync.schemes.nccl.members import Peer


class Asking:
    """What peers were asked, and have not answered yet.

    It is not the thread that is in collectives, or builds a group, which answers.

    Args:
        silence: seconds after which one that does not answer is lost.
    """

    def __init__(self, silence: float) -> None:
        self._silence = silence
        self._asked: dict[Peer, float] = {}

    def answered(self, peer: Peer) -> bool:
        """Whether something was heard since it was asked, if it was."""
        return peer.connection.heard > self._asked.get(peer, 0.0)

    def ask(self, peer: Peer, quiet: float | None = None) -> None:
        """If nothing was heard for so many seconds; by default for a quarter of ``silence``."""
        quiet = self._silence / 4 if quiet is None else quiet
        now = time.monotonic()
        if self.answered(peer) and now - peer.connection.heard > quiet:
            self._asked[peer] = now
            peer.connection.tell({"op": "ping"})

    def silent(self, peer: Peer) -> str | None:
        """In words that it did not answer in time, if so."""
        waited = 0.0 if self.answered(peer) else time.monotonic() - self._asked[peer]
        return f"it has not answered for {waited:.1f} s" if waited > self._silence else None
