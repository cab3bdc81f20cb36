"""A release against the table, and the plug-in against what the release makes abstract."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tools.compat.sources import Sources
from tools.compat.table import TABLE, TRANSFER, Need


@dataclass(frozen=True)
class Finding:
    """Something of the table that a release has not.

    Attributes:
        part: of weightsync, that relies on it.
        lacking: the reference, down to the parameters that are missing.
        without: what weightsync does instead; empty if the release is one that must have it.
    """

    part: str
    lacking: str
    without: str = ""

    @property
    def breaks(self) -> bool:
        return not self.without

    def __str__(self) -> str:
        return f"{self.lacking} ({self.part})" + (f": {self.without}" if self.without else "")


def check(
    sources: Sources, release: str, table: Mapping[str, Sequence[Need]] = TABLE
) -> list[Finding]:
    """
    Args:
        release: its number; decides what it must have.
    """
    findings = []
    for part, needs in table.items():
        for need in needs:
            lacking = [sources.lacks(reference) for reference in need.any_of]
            if None in lacking:
                continue
            excused = number(release) < number(need.since)
            words = " or ".join(filter(None, lacking))
            findings.append(Finding(part, words, need.without if excused else ""))
    return findings


def unimplemented(release: Sources, ours: Sources) -> list[Finding]:
    """What vLLM's transfer engine of this release makes abstract, and the plug-in has not."""
    wanted = release.abstract_methods(f"{TRANSFER}.base", "WeightTransferEngine")
    plugin = "weightsync.vllm_worker.transfer_engine"
    missing = wanted - ours.methods(plugin, "WeightSyncTransferEngine")
    return [Finding(plugin, f"WeightSyncTransferEngine.{name}") for name in sorted(missing)]


def number(release: str) -> tuple[int, ...]:
    """``"0.25.1"`` and ``"0.25.1+cpu"`` as ``(0, 25, 1)``."""
    plain = release.partition("+")[0]
    return tuple(int(part) for part in plain.split(".") if part.isdigit())
