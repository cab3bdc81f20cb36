"""What else is installed, and whether it is a release that this package asks for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata

from weightsync.doctor.finding import Finding, Subject, not_applicable, ok, problem

_FRAMEWORKS = ("torchrl", "trl", "verl", "ray", "fsspec", "httpx")
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9._-]+)[^>;]*>=\s*([0-9][0-9.]*)")


def packages(subject: Subject) -> list[Finding]:
    """Python packages, base requirements first; those that are not needed may be absent."""
    least = dict(_requirements())
    if not least:
        words = "this package is not installed, so what it asks for is not known"
        return [not_applicable("packages", words)]
    base = [name for name in ("torch", "tensordict", "safetensors") if name in least]
    others = _others(subject)
    return [_package(name, least.get(name), name in base) for name in (*base, *others)]


def _others(subject: Subject) -> tuple[str, ...]:
    """Of one scheme what it imports itself; which frameworks come with it is not known."""
    if subject.scheme is None:
        return _FRAMEWORKS
    return ("fsspec",) if getattr(subject.scheme, "is_remote", False) else ()


def _requirements() -> Iterator[tuple[str, str]]:
    """What our own metadata asks for, extras included."""
    try:
        required = metadata.requires("weightsync") or []
    except metadata.PackageNotFoundError:
        return
    for requirement in required:
        match = _REQUIREMENT.match(requirement)
        if match:
            yield match[1].lower(), match[2]


def _package(name: str, least: str | None, needed: bool) -> Finding:
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        if needed:
            return problem(name, "not installed", f"pip install {name}.")
        return not_applicable(name, "not installed")
    wanted = f">={least}" if least else "any release"
    if least is not None and _parts(version) < _parts(least):
        remedy = f"pip install '{name}>={least}'."
        return problem(name, f"{version} is too old: {wanted} is asked for", remedy)
    return ok(name, f"{version} ({wanted})")


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
