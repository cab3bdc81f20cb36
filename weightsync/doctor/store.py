"""An object store, and host memory: what schemes need that have no directory here."""

from __future__ import annotations

import tempfile
from dataclasses import replace

from weightsync.doctor.finding import Finding, Subject, not_applicable, ok, problem, warning
from weightsync.doctor.storage import room
from weightsync.errors import WeightSyncError
from weightsync.words import size

_SECONDS = 10.0


def store(subject: Subject) -> list[Finding]:
    """Whether an object store can be listed, and its versions be cached here."""
    from weightsync.deadline import Deadline
    from weightsync.schemes.disk import DiskScheme
    from weightsync.schemes.disk.store import Store

    scheme = subject.scheme
    if not isinstance(scheme, DiskScheme) or not scheme.is_remote:
        return [not_applicable("object store", "no store was named")]
    try:
        place = Store(scheme.path)
        found = place.names("", Deadline(_SECONDS))
    except WeightSyncError as error:
        remedy = "See that the store's package is installed, and its credentials are known here."
        return [problem("object store", str(error), remedy)]
    cache = replace(subject, path=scheme.cache or tempfile.gettempdir())
    listed = ok("object store", f"{place.where}: can be listed, {len(found)} names")
    return [listed, replace(room(cache), check="room for its cache")]


def host_memory(subject: Subject) -> Finding:
    """Room for what a receiving process of a broadcast keeps."""
    scheme, nbytes = subject.scheme, subject.nbytes
    buffers, memory = getattr(scheme, "buffers", None), getattr(scheme, "memory", "host")
    on_host = getattr(scheme, "backend", "") == "gloo" or memory == "host"
    if buffers is None or nbytes is None or (memory == "gpu" and not on_host):
        return not_applicable("host memory", "no broadcast into it, or no --model-size")
    free, needed = _available(), buffers * nbytes
    words = f"{size(free)} available; {buffers} buffers of {size(nbytes)} need {size(needed)}"
    if free < needed:
        remedy = "Use buffers=1, more processes for each replica, or a smaller dtype=."
        if not on_host:
            return warning("host memory", f"{words}, if the GPU has no room for them", remedy)
        return problem("host memory", words, remedy)
    return ok("host memory", words)


def _available() -> int:
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise WeightSyncError("/proc/meminfo does not say what is available")
