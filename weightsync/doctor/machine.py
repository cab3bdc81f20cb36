"""The host itself: cores, limits, and what of this package was compiled."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import resource

from weightsync.doctor.finding import Finding, Subject, not_applicable, ok, warning
from weightsync.doctor.gpus import has_gpus
from weightsync.words import size


def cores(subject: Subject) -> Finding:
    seen = len(os.sched_getaffinity(0))
    quota = _quota()
    words = f"{seen} for this process, of {os.cpu_count()}"
    if quota is not None and quota < seen:
        words += f"; a quota of {quota:g}"
    if min(seen, quota or seen) < 2:
        return warning(
            "cores",
            words,
            "Give the trainer and each engine a core of its own: copies and digests use up to 8.",
        )
    return ok("cores", words)


def _quota() -> float | None:
    """Cores that the control group may use; None: all, or that is not known."""
    with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/cpu.max") as file:
        most, period = file.read().split()
        return int(most) / int(period)
    return None


def page_locking(subject: Subject) -> Finding:
    """RLIMIT_MEMLOCK: bounds what InfiniBand registers, and on some drivers what CUDA does."""
    if not has_gpus():
        return not_applicable(
            "page-locking", "no GPU, to which page-locked memory is copied faster"
        )
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return ok("page-locking", "not limited")
    return warning(
        "page-locking",
        f"RLIMIT_MEMLOCK is {size(limit)}",
        "Raise it with ulimit -l unlimited (docker run --ulimit memlock=-1): NCCL over InfiniBand "
        "needs it.",
    )


def extension(subject: Subject) -> Finding:
    if importlib.util.find_spec("weightsync._rows") is not None:
        return ok("native extension", "built")
    return warning(
        "native extension",
        "not built: models of many small tensors are copied several times slower",
        "Install a C compiler and this package again: pip install --force-reinstall --no-deps "
        "weightsync.",
    )
