"""What dead processes of this library have left behind: finding it, and removing it safely.

Nothing is touched that a living process uses, as locks tell, that belongs to somebody else, or
that is not recognised as ours. No symlink is followed.
"""

from __future__ import annotations

from weightsync.leftovers.find import find
from weightsync.leftovers.leftover import Leftover

__all__ = ["Leftover", "find"]
