"""What a sender has published last: what the next version is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from weightsync.chunks import Digests
from weightsync.errors import VersionError
from weightsync.manifest import Manifest
from weightsync.schemes.disk.commit import Commit
from weightsync.schemes.disk.layout import Checkpoint, Layout
from weightsync.version import Version


class History:
    """The head, and the digests of its chunks.

    Attributes:
        head: the newest commit, of this sender or of a former one.
        last: the newest version of this sender.
        stale: what receivers said of an earlier attempt at ``last``: no answer to this one.
    """

    def __init__(self, shard_bytes: int) -> None:
        self._shard_bytes = shard_bytes
        self._checkpoint: Checkpoint | None = None
        self._digests: tuple[str, Digests] | None = None
        self.head: Commit | None = None
        self.last: Version | None = None
        self.stale: Mapping[str, bytes] = {}

    @property
    def version(self) -> Version | None:
        """The head's."""
        return self.head.version if self.head else None

    def found(self, head: Commit | None) -> None:
        """What is announced is not what this sender announced."""
        self.head = head
        self._digests = None

    def checkpoint(self, manifest: Manifest) -> Checkpoint:
        """Where the tensors of a manifest go."""
        known = self._checkpoint
        if known is None or known.layout.manifest.fingerprint != manifest.fingerprint:
            known = self._checkpoint = Checkpoint.plan(manifest, self._shard_bytes)
        return known

    def repeats(self, commit: Commit) -> bool:
        """Whether a commit is the head's version once more, with the same weights.

        Raises:
            VersionError: it has other weights.
        """
        if self.head is None or self.head.version != commit.version:
            return False
        if self.head.digest != commit.digest:
            raise VersionError(
                f"version {commit.version.number} was published before with other weights: "
                "receivers that hold it would never see these; use a newer number"
            )
        return True

    def addressed_anew(self, commit: Commit) -> Commit:
        """The head, for the receivers that a repeated commit is meant for."""
        assert self.head is not None
        return replace(self.head, receivers=commit.receivers, time=commit.time)

    def changed(self, layout: Layout, digests: Digests) -> int | None:
        """How many tensors may differ from those of the head. None: they are others altogether."""
        if self._digests is None or self._digests[0] != layout.manifest.fingerprint:
            return None
        changed = begin = 0
        for shard in layout.shards:
            its = slice(begin, begin + shard.geometry.chunks)
            changed += shard.geometry.changed(self._digests[1][its], digests[its])
            begin += shard.geometry.chunks
        return changed

    def announced(self, commit: Commit, layout: Layout, digests: Digests) -> None:
        """A commit of this sender is the head now."""
        self.head, self.last = commit, commit.version
        self._digests = layout.manifest.fingerprint, digests
