"""GPUs, what lies between them, and NCCL: asked of torch in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import lru_cache
from typing import Any

from weightsync.doctor.child import ask
from weightsync.doctor.finding import Finding, Subject, not_applicable, ok, problem, warning
from weightsync.errors import WeightSyncError

PROBE_SECONDS = 25.0
"""CUDA may take long to start on a host of many GPUs."""

_PROBE = """
import ctypes, json, mmap, os, tempfile
import torch
import torch.distributed as dist
found = {"torch": torch.__version__, "cuda": torch.version.cuda, "count": 0}
if torch.version.cuda and torch.cuda.is_available():
    count = found["count"] = torch.cuda.device_count()
    found["names"] = [torch.cuda.get_device_name(n) for n in range(count)]
    found["peers"] = [[a, b] for a in range(count) for b in range(a + 1, count)
                      if torch.cuda.can_device_access_peer(a, b)]
    found["nccl"] = None
    if dist.is_available() and dist.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        os.ftruncate(file.fileno(), 1 << 20)
        mapped = mmap.mmap(file.fileno(), 1 << 20)
        address = ctypes.addressof(ctypes.c_ubyte.from_buffer(mapped))
        torch.cuda.init()
        result = torch.cuda.cudart().cudaHostRegister(address, 1 << 20, 0)
        found["page_lock"] = int(result)
        if int(result) == 0:
            torch.cuda.cudart().cudaHostUnregister(address)
print(json.dumps(found), flush=True)
os._exit(0)
"""


def has_gpus() -> bool:
    """Whether the kernel knows of an NVIDIA GPU; looked at without a driver, which takes long."""
    return os.path.exists("/dev/nvidiactl") or os.path.isdir("/proc/driver/nvidia/gpus")


@lru_cache(maxsize=1)
def _probe() -> dict[str, Any]:
    found: dict[str, Any] = ask(_PROBE, seconds=PROBE_SECONDS)
    return found


def gpus(subject: Subject) -> list[Finding]:
    """All of them, and all that is asked about them at once."""
    if not has_gpus():
        return [not_applicable("GPUs", "the kernel knows of no NVIDIA GPU"), *_wanted(subject)]
    try:
        found = _probe()
    except WeightSyncError as error:
        remedy = "See whether nvidia-smi and `python -c 'import torch; torch.cuda.init()'` work."
        return [problem("GPUs", f"torch cannot use them: {error}", remedy)]
    if not found["count"]:
        why = "torch was built without CUDA" if not found["cuda"] else "torch sees none of them"
        remedy = (
            "Install a build of torch for CUDA, and look at CUDA_VISIBLE_DEVICES and the driver."
        )
        return [warning("GPUs", f"there are some, but {why}", remedy), *_wanted(subject)]
    return [_seen(found), _page_lock(found), _links(found), _nccl(found)]


def _wanted(subject: Subject) -> list[Finding]:
    """What a scheme needs that is for GPUs only."""
    scheme = subject.scheme
    kind = getattr(scheme, "url_scheme", "")
    if kind == "cuda-ipc":
        remedy = "Use shm:// instead, which needs no GPU."
        return [problem("cuda-ipc", "needs a GPU that this process sees", remedy)]
    if kind == "nccl" and getattr(scheme, "backend", "") == "nccl":
        remedy = "Use backend=gloo on CPUs."
        return [problem("NCCL", "backend=nccl needs a GPU that this process sees", remedy)]
    return []


def _seen(found: dict[str, Any]) -> Finding:
    kinds = sorted(set(found["names"]))
    return ok("GPUs", f"{found['count']} x {', '.join(kinds)} (torch {found['torch']})")


def _page_lock(found: dict[str, Any]) -> Finding:
    if found["page_lock"] == 0:
        return ok("page-locked memory", "shared memory can be page-locked for copies")
    return warning(
        "page-locked memory",
        f"shared memory cannot be page-locked: CUDA says error {found['page_lock']}",
        "Copies are several times slower; look at ulimit -l, and at what the container may do.",
    )


def _links(found: dict[str, Any]) -> Finding:
    count = found["count"]
    if count == 1:
        return not_applicable("GPU links", "one GPU")
    pairs, direct = count * (count - 1) // 2, len(found["peers"])
    nvlinks = _nvlinks()
    words = f"{direct} of {pairs} pairs reach each other directly"
    words += "" if nvlinks is None else f", {nvlinks} by NVLink"
    if direct < pairs:
        remedy = "Copies between the others go through the host: NCCL works, and is slower."
        return warning("GPU links", words, remedy)
    return ok("GPU links", words)


def _nvlinks() -> int | None:
    """Pairs that are joined by NVLink, as nvidia-smi's matrix says; None: it does not say."""
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        done = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("GPU")]
    return sum(field.startswith("NV") for row in rows for field in row) // 2 if rows else None


def _nccl(found: dict[str, Any]) -> Finding:
    if found["nccl"]:
        return ok("NCCL", found["nccl"])
    remedy = "Install a build of torch with NCCL; backend=gloo works without."
    return warning("NCCL", "this build of torch has none", remedy)
