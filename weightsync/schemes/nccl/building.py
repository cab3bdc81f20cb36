"""Who is to blame for a group that is not built: seldom the first to say that it could not."""

from __future__ import annotations

from collections.abc import Sequence

from weightsync.deadline import Deadline
from weightsync.schemes.nccl.asking import Asking
from weightsync.schemes.nccl.members import Members, Peer

_DEATH = 0.3
"""Seconds after which a death is noticed: another process may have said before that it failed."""

_LAST = 1.5
"""Seconds that processes differ by in when they began to wait for the others."""


class Building:
    """What is known of those that are to build a group.

    All wait for one that does not come, and all but that one say that they could not build it.

    Args:
        number: of the group's round.
        seconds: for all to come. silence: seconds after which one that does not answer is lost.
    """

    def __init__(
        self, members: Members, peers: Sequence[Peer], number: int, seconds: float, silence: float
    ) -> None:
        self._members, self._peers, self._number = members, peers, number
        self._silence = silence
        self._end = Deadline(seconds)
        self._asking = Asking(silence)

    def trouble(self) -> bool:
        """Whether nothing can come of it any more. Asks those that are not there yet."""
        for peer in self._absent():
            self._asking.ask(peer)
        return bool(self._gone() or self._failed() or self._silent())

    def culprits(self) -> dict[Peer, str]:
        """Those that died; else those that do not answer; else, if all were waited for, those that
        never came; else those that say why they could not."""
        late = self._end.expired
        self._members.wait_for(
            lambda: bool(self._gone()) or (late and not self._absent()),
            Deadline(_LAST if late else _DEATH),
        )
        if gone := self._gone():
            return gone
        for peer in self._absent():
            self._asking.ask(peer, quiet=0.0)
        self._members.wait_for(
            lambda: (
                all(p.gone or self._asking.answered(p) for p in self._absent())
                or bool(self._silent())
            ),
            Deadline(2 * self._silence),
        )
        absent = dict.fromkeys(self._absent(), "it did not join the group")
        return self._gone() or self._silent() or (late and absent) or self._failed() or absent

    def _absent(self) -> list[Peer]:
        said = self._failed()
        return [p for p in self._peers if self._number not in p.grouped and p not in said]

    def _gone(self) -> dict[Peer, str]:
        return {peer: "its process is gone" for peer in self._peers if peer.gone}

    def _failed(self) -> dict[Peer, str]:
        key = "round", self._number
        return {peer: peer.failed[key] for peer in self._peers if key in peer.failed}

    def _silent(self) -> dict[Peer, str]:
        words = ((peer, self._asking.silent(peer)) for peer in self._absent() if not peer.gone)
        return {peer: said for peer, said in words if said is not None}
