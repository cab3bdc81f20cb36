"""The constants of XXH3-64 that a digest of a whole chunk is made with, as a GPU kernel reads them.

From the algorithm's specification, version 0.8:
https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

PRIME32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
PRIME64 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
AVALANCHE = 0x165667919E3779F9

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def _words(begin: int, count: int) -> npt.NDArray[np.uint64]:
    return np.frombuffer(_SECRET, "<u8", count, begin).astype(np.uint64)


def table(nbytes: int) -> npt.NDArray[np.uint64]:
    """What digests of ``nbytes`` bytes are made with: uint64[49].

    From 0 the keys of the stripes of a block (each begins one word after the former's), from 16
    those for scrambling, from 24 those of the last stripe, from 32 those for merging, from 40 the
    lanes at the start; at 48 what merging starts from.
    """
    start = (
        PRIME32[2],
        PRIME64[0],
        PRIME64[1],
        PRIME64[2],
        PRIME64[3],
        PRIME32[1],
        PRIME64[4],
        PRIME32[0],
    )
    rest = np.array([*start, nbytes * PRIME64[0] % (1 << 64)], dtype=np.uint64)
    return np.concatenate([_words(0, 24), _words(121, 8), _words(11, 8), rest])
