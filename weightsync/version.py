"""Versions of the weights: which sender's life, and which of its training steps."""

from __future__ import annotations

from typing import NamedTuple

from weightsync.errors import VersionError


class Version(NamedTuple):
    """``(epoch, number)``, ordered as a pair.

    The epoch grows each time a sender starts, the number is the trainer's step. So the first
    version of a restarted trainer is newer than the last one of its former life, whatever the
    step it resumes from.
    """

    epoch: int
    number: int

    def __str__(self) -> str:
        return f"{self.epoch}:{self.number}"

    @classmethod
    def parse(cls, value: object) -> Version:
        """Read ``"epoch:number"`` or ``[epoch, number]``, as found in files and requests.

        Raises:
            ValueError: for anything that is not two non-negative integers.
        """
        if isinstance(value, str):
            head, colon, tail = value.partition(":")
            if colon and head.isascii() and head.isdigit() and tail.isascii() and tail.isdigit():
                return cls(int(head), int(tail))
        elif isinstance(value, (list, tuple)) and len(value) == 2:
            epoch, number = value
            if type(epoch) is int and type(number) is int and epoch >= 0 and number >= 0:
                return cls(epoch, number)
        raise ValueError(f"not a version: {value!r:.80}")


def require_newer(version: Version, epoch: int, last: Version | None) -> None:
    """
    Args:
        epoch: the sender's; last: the last version that it published. The same once more is fine.

    Raises:
        VersionError: the version is of another epoch, or older than the last one.
    """
    if version.epoch != epoch:
        raise VersionError(f"{version} is not of this sender's epoch {epoch}")
    if last is not None and version < last:
        raise VersionError(f"version {version.number} is older than the last, {last.number}")
