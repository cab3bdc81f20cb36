"""A version beside a checkpoint of safetensors files: what differs, by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from weightsync.cli.progress import Advance
from weightsync.errors import WeightSyncError
from weightsync.manifest import describe

if TYPE_CHECKING:
    from weightsync.transport import Snapshot


def compare(
    snapshot: Snapshot, checkpoint: Path, advance: Advance
) -> tuple[int, dict[str, list[str]]]:
    """
    Returns:
        How many names are in both, and ``different``: names, and what they are on both sides where
        that is another dtype or shape; ``only_in_run``, ``only_in_checkpoint``: names. A tied
        tensor that the checkpoint has under several names is looked up under each.

    Raises:
        WeightSyncError: the checkpoint cannot be read; says which file and why.
    """
    manifest = snapshot.manifest
    different: list[str] = []
    with _opened(checkpoint) as holders:
        for name in manifest.names():
            if name not in holders:
                continue
            spec = manifest.spec(name)
            other = holders[name].get_tensor(name)
            if other.dtype != spec.dtype or tuple(other.shape) != spec.shape:
                there = describe(other.dtype, other.shape)
                different.append(f"{name}: {spec} in the run, {there} in the checkpoint")
            elif not _same(snapshot.tensor(name), other):
                different.append(name)
            if name in manifest.by_name:
                advance(spec.nbytes)
        known = set(manifest.names())
        return len(known & holders.keys()), {
            "different": different,
            "only_in_run": [name for name in manifest.by_name if name not in holders],
            "only_in_checkpoint": sorted(name for name in holders if name not in known),
        }


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Byte for byte: NaN payloads and the sign of zero count."""
    if one.numel() == 0:
        return True
    one, other = (each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(one, other)


@contextmanager
def _opened(checkpoint: Path) -> Iterator[dict[str, Any]]:
    """Which open file holds which tensor."""
    from safetensors import SafetensorError, safe_open

    files = sorted(checkpoint.glob("*.safetensors")) if checkpoint.is_dir() else [checkpoint]
    if not files or not checkpoint.exists():
        raise WeightSyncError(f"{checkpoint}: there are no safetensors files")
    holders: dict[str, Any] = {}
    with ExitStack() as stack:
        for path in files:
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise WeightSyncError(f"{path}: {error}") from None
            holders.update(dict.fromkeys(file.keys(), file))
        yield holders
