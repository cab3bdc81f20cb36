"""How messages and reports put things into words."""

from __future__ import annotations

import re
from collections.abc import Mapping

_SECRET = re.compile(r"(?<=[?&;]token=)[^&;,'\"\s]+")
_USER = re.compile(r"//[^/?]*(?:@|%40)")
_UNITS = ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)


def size(nbytes: int) -> str:
    """``13.48 GB``, ``4.20 MB``, ``1.50 kB``, ``17 bytes``: powers of ten, as disks are sold."""
    for unit, one in _UNITS:
        if nbytes >= one:
            return f"{nbytes / one:.2f} {unit}"
    return f"{nbytes} bytes"


def a_kind(value: object) -> str:
    """What a value is, with its article: ``a list``, ``an int``."""
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"


def without_secrets(url: str) -> str:
    """A scheme's URL as messages and logs have it: ``nccl://10.0.0.5:29500?token=***``.

    Nor with the user and password of an object store: ``disk://s3%3A//***@host/bucket``.
    """
    return _USER.sub("//***@", _SECRET.sub("***", url))


def by_reason(reasons: Mapping[str, str], most: int = 3, named: int = 4) -> str:
    """What happened to things, and why: ``embed, norm and 7 more (too small); head (tied)``.

    Args:
        reasons: for each thing why. most: reasons that are listed, the first ones.
        named: things that are listed for each.
    """
    things: dict[str, list[str]] = {}
    for thing, why in reasons.items():
        things.setdefault(why, []).append(thing)
    parts = []
    for why, names in list(things.items())[:most]:
        more = f" and {len(names) - named} more" if len(names) > named else ""
        parts.append(f"{', '.join(names[:named])}{more} ({why})")
    rest = sum(map(len, list(things.values())[most:]))
    return "; ".join(parts + [f"{rest} more for other reasons"] * (rest > 0))


def address_of(url: str) -> str:
    """A URL without what may be secret in it: options, user and password."""
    return _USER.sub("//", url.partition("?")[0])


def one_line(error: object) -> str:
    """An error's kind and words, or a text, on one line: for logs."""
    text = f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else str(error)
    return " ".join(text.split())[:4000]
