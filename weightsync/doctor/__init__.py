"""Whether this host can do what a run needs: one check for each thing that goes wrong in practice.

Nothing is changed but for small files that are gone at once, no engine is started, and neither
torch nor vllm is imported here: what needs them is asked in processes of its own.
"""

from __future__ import annotations

from weightsync.doctor.examine import examine
from weightsync.doctor.finding import Finding, Subject

__all__ = ["Finding", "Subject", "examine"]
