"""How runs of a scheme lie in their directories: for those who come from outside, look and clean.

Such a one was told a path, and neither the scheme nor its options.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from weightsync.files import Directory
from weightsync.inspection import RunStatus


class RunKind(ABC):
    """What stands in the directory of a run, besides what is in all of them.

    Attributes:
        keeps: versions stay on purpose when their sender has ended.
    """

    keeps: bool = False

    @abstractmethod
    def recognises(self, run: Directory) -> bool:
        """Whether a directory holds a run of this kind. Looks at names rather than into files."""

    @abstractmethod
    def inspect(self, run: Directory) -> RunStatus:
        """What is in it now; changes nothing."""

    @abstractmethod
    def leases(self, run: Directory) -> list[tuple[Directory, str]]:
        """The files that those who read lock, shared: the directory and the name of each."""

    @abstractmethod
    def remove(self, run: Directory) -> None:
        """Remove all that is ours and that nobody reads; the caller holds the sender's lock."""

    def unfinished(self, run: Directory) -> list[str]:
        """The names of what a dead sender has left that never became a version."""
        return []

    def sweep(self, run: Directory) -> None:
        """Remove that; the caller holds the sender's lock."""
