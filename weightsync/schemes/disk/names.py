"""The files of a run on disk, by name. The format is in docs/architecture.md."""

from __future__ import annotations

import re

from weightsync.run.records import is_temporary
from weightsync.version import Version

HEAD = "HEAD"

RECORD = "weightsync.json"
"""A copy of the commit. A version's directory without it holds no version."""
LAYOUT = "weightsync.layout.json"
DIGESTS = "weightsync.digests"
"""One little-endian 64-bit XXH3 for each chunk, file after file."""
LEASE = "weightsync.lock"
INDEX = "model.safetensors.index.json"

MAX_LAYOUT = 1 << 30

_VERSION = re.compile(r"step-(\d{10,40})-(\d{1,40})\Z", re.ASCII)
_UNFINISHED = re.compile(r"\.step-\d{10,40}-\d{1,40}\.unfinished\Z", re.ASCII)
_SHARD = re.compile(r"model(-\d{5,9}-of-\d{5,9})?\.safetensors\Z", re.ASCII)
_EXTRA = re.compile(r"(generation_)?config\.json\Z", re.ASCII)


def version_name(version: Version) -> str:
    """The directory of a version. Steps are sorted by name as they are by number."""
    return f"step-{version.number:010d}-{version.epoch}"


def version_of(name: str) -> Version | None:
    """The version in a directory's name; None for any other name."""
    match = _VERSION.match(name)
    version = Version(int(match[2]), int(match[1])) if match else None
    return version if version is not None and version_name(version) == name else None


def unfinished_name(version: Version) -> str:
    """The directory of a version while it is written."""
    return f".{version_name(version)}.unfinished"


def is_unfinished(name: str) -> bool:
    return bool(_UNFINISHED.match(name))


def shard_name(number: int, count: int) -> str:
    """As ``save_pretrained`` calls it."""
    return (
        f"model-{number + 1:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors"
    )


def is_shard(name: str) -> bool:
    return bool(_SHARD.match(name))


def is_extra(name: str) -> bool:
    """Whether a file that a source offers is written beside the weights."""
    return bool(_EXTRA.match(name))


def is_version_file(name: str) -> bool:
    """Whether a file in a version's directory is one of ours."""
    ours = (RECORD, LAYOUT, DIGESTS, LEASE, INDEX)
    return name in ours or is_shard(name) or is_extra(name) or is_temporary(name)
