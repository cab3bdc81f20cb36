"""Several processes that are the ranks of one trainer."""

from tests.live import trainers
from tests.live.processes import Peer, PeerError


class World:
    """The ranks of one trainer, each a process. What is called runs on all of them at once."""

    def __init__(self, size, store, join=True, **options):
        self.peers = [Peer() for _ in range(size)]
        if not join:
            return
        for rank, one in enumerate(self.peers):
            one.start(trainers.join, rank, size, store, **options)
        for one in self.peers:
            one.result()

    def __call__(self, function, *args, within=60.0, **options):
        for outcome in self.outcomes(function, *args, within=within, **options):
            if isinstance(outcome, PeerError):
                raise outcome
        return self._outcomes

    def outcomes(self, function, *args, within=60.0, **options):
        """Likewise, with the error of each rank that raised one."""
        for peer in self.peers:
            peer.start(function, *args, **options)
        self._outcomes = []
        for peer in self.peers:
            try:
                self._outcomes.append(peer.result(within))
            except PeerError as error:
                self._outcomes.append(error)
        return self._outcomes

    def dispose(self):
        for peer in self.peers:
            peer.dispose()
