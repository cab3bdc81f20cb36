"""How much of a slot is written, for readers that do not wait for the commit.

``slotN.progress``: four little-endian 64-bit numbers, mapped by both sides: attempt, epoch, number,
bytes written. The attempt is another number, and not 0, each time that somebody begins to write;
while it stands, bytes before ``written`` stay as they are. Nobody may take them for a version
before a commit names the same attempt.
"""

from __future__ import annotations

import mmap
import os
import secrets

from weightsync.errors import NoRoomError, WeightSyncError
from weightsync.files import Directory
from weightsync.manifest import ALIGNMENT
from weightsync.schemes.double_buffer import layout
from weightsync.version import Version

_SIZE = 64
_ATTEMPT, _EPOCH, _NUMBER, _WRITTEN = range(4)
_WORD = (1 << 64) - 1
"""Of a version that is longer its end is enough: nobody takes it for another's commit."""


class Progress:
    """The writer's end. Nothing is being written when it is made.

    Raises:
        NoRoomError: there is no room for the file.
    """

    def __init__(self, generation: Directory, slot: int) -> None:
        name = layout.slot_progress(slot)
        fd = generation.open_file(name, os.O_RDWR | os.O_CREAT)
        try:
            # Never shorter, while a reader has it mapped. Its page is there before it is touched.
            os.posix_fallocate(fd, 0, _SIZE)
            os.ftruncate(fd, _SIZE)
            self._words = memoryview(mmap.mmap(fd, _SIZE)).cast("Q")
        except OSError as error:
            raise NoRoomError(f"{generation.path}/{name}: {error.strerror}") from None
        finally:
            os.close(fd)
        self._words[_ATTEMPT] = 0

    def begin(self, version: Version) -> int:
        """Say that a version is being written now. Returns the attempt."""
        self._words[_ATTEMPT] = 0
        self._words[_EPOCH], self._words[_NUMBER] = (word & _WORD for word in version)
        self._words[_WRITTEN] = 0
        attempt = secrets.randbits(62) + 1
        self._words[_ATTEMPT] = attempt
        return attempt

    def wrote(self, upto: int) -> None:
        """All bytes before this one are there."""
        self._words[_WRITTEN] = max(upto, self._words[_WRITTEN])

    def give_up(self) -> None:
        """What was written since ``begin`` is not a version, and will not be one."""
        self._words[_ATTEMPT] = 0


class Arrived:
    """Follows what was written, in whatever order, and says how far all of it is there."""

    def __init__(self, progress: Progress, nbytes: int) -> None:
        self._progress, self._nbytes = progress, nbytes
        self._upto = 0
        self._ahead: dict[int, int] = {}

    def add(self, begin: int, end: int) -> None:
        """Whole tensors, or parts of one that are cut at multiples of the alignment."""
        if begin == end:
            return
        self._ahead[begin] = -(-end // ALIGNMENT) * ALIGNMENT  # padding is nobody's
        if begin == self._upto:
            while self._upto in self._ahead:
                self._upto = self._ahead.pop(self._upto)
            self._progress.wrote(min(self._upto, self._nbytes))


class ProgressView:
    """A reader's end. Garbage is nothing."""

    def __init__(self, words: memoryview) -> None:
        self._words = words

    @classmethod
    def open(cls, generation: Directory, slot: int) -> ProgressView | None:
        """None: there is none, or it is something else."""
        try:
            fd = generation.open_file(layout.slot_progress(slot), os.O_RDONLY)
        except (FileNotFoundError, WeightSyncError):
            return None
        try:
            if os.fstat(fd).st_size != _SIZE:
                return None
            mapping = mmap.mmap(fd, _SIZE, prot=mmap.PROT_READ)
        except OSError:
            return None
        finally:
            os.close(fd)
        return cls(memoryview(mapping).cast("Q"))

    def look(self) -> tuple[int, Version, int] | None:
        """The attempt, the version, and the bytes written. None: nothing is being written."""
        attempt = self._words[_ATTEMPT]
        version = Version(self._words[_EPOCH], self._words[_NUMBER])
        written = self._words[_WRITTEN]
        if attempt == 0 or attempt != self._words[_ATTEMPT]:
            return None
        return attempt, version, written
