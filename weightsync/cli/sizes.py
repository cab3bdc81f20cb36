"""Sizes as people write them: ``13.5GB``, ``5GiB``, ``800 MB``, ``4096``."""

from __future__ import annotations

import re

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([kKmMgGtT]?)(i?)[bB]?\s*\Z", re.ASCII)


def parse_size(text: str) -> int:
    """In bytes: ``GB`` and ``G`` are powers of ten, ``GiB`` and ``Gi`` powers of two.

    Raises:
        ValueError: it is no size.
    """
    match = _SIZE.match(text)
    if match is None or (match[3] and not match[2]):
        raise ValueError(f"{text!r:.80} is no size: like 13.5GB, 5GiB or 4096")
    power = " kmgt".index(match[2].lower() or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)
