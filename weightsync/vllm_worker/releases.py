"""Which releases of vLLM the worker half was looked at with; see docs/compatibility.md.

Apart from ``compat``, which needs torch: a release can be judged before anything is imported.
"""

from __future__ import annotations

FIRST = (0, 25)
"""What there was before lacks what is needed."""

LAST = (0, 33)
"""What comes after it may have changed names that are relied on."""
