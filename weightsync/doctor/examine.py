"""Which checks there are, and how they are run: at the same time, each with a deadline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from weightsync.deadline import Deadline, call_with_deadline
from weightsync.doctor import gpus, machine, network, packages, storage, store, vllm
from weightsync.doctor.finding import Finding, Subject, problem
from weightsync.errors import DeadlineError


@dataclass(frozen=True)
class Check:
    """
    Attributes:
        schemes: the names of those that it matters for; empty: for all.
        seconds: after which it is given up.
    """

    name: str
    look: Callable[[Subject], Finding | list[Finding]]
    schemes: tuple[str, ...] = ()
    seconds: float = 10.0


_DIRECTORIES = ("shm", "cuda-ipc", "disk")

CHECKS = (
    Check("room", storage.room, ("shm", "disk")),
    Check("locks", storage.locks, _DIRECTORIES),
    Check("mapping", storage.mapping, ("shm",)),
    Check("object store", store.store, ("store",), seconds=20.0),
    Check("host memory", store.host_memory, ("nccl",)),
    Check("page-locking", machine.page_locking, ("shm", "nccl")),
    Check("GPUs", gpus.gpus, ("shm", "cuda-ipc", "nccl"), seconds=gpus.PROBE_SECONDS + 5),
    Check("host name", network.host_name, ("nccl",)),
    Check("ports", network.ports, ("nccl",)),
    Check("cores", machine.cores),
    Check("native extension", machine.extension),
    Check("vLLM", vllm.release),
    Check("vLLM plug-in", vllm.plugin, seconds=15.0),
    Check("packages", packages.packages),
)


def examine(subject: Subject, checks: Sequence[Check] = CHECKS) -> list[Finding]:
    """Run the checks that matter for what is examined. One that crashes is a finding itself.

    Of a fallback each scheme is examined; what is found for several of them is said once.
    """
    subjects = [subject]
    members = getattr(subject.scheme, "schemes", None)
    if members:
        subjects = [_of_scheme(subject, scheme) for scheme in members]
    work = [(check, each) for check in checks for each in subjects if _matters(check, each)]
    with ThreadPoolExecutor(len(work) or 1) as pool:
        found = list(pool.map(lambda pair: _run(*pair), work))
    return list(dict.fromkeys(finding for findings in found for finding in findings))


def _of_scheme(subject: Subject, scheme: object) -> Subject:
    path = getattr(scheme, "path", None)
    local = isinstance(path, str) and "://" not in path
    return replace(subject, scheme=scheme, path=path if local else subject.path)  # type: ignore[arg-type]


def _matters(check: Check, subject: Subject) -> bool:
    if subject.scheme is None:
        return check.schemes != ("store",) and check.name != "host memory"
    kind = "store" if getattr(subject.scheme, "is_remote", False) else subject.scheme.url_scheme
    return not check.schemes or kind in check.schemes


def _run(check: Check, subject: Subject) -> list[Finding]:
    try:
        found = call_with_deadline(
            lambda: check.look(subject), Deadline(check.seconds), f"the check of {check.name}"
        )
    except DeadlineError as error:
        remedy = "See what does not answer: a file system of another host, a driver, a name server."
        return [problem(check.name, str(error), remedy)]
    except OSError as error:
        remedy = f"See that {subject.path} is there, and can be written to by this user."
        return [problem(check.name, f"it could not be looked at: {error}", remedy)]
    except Exception as error:
        words = f"it could not be looked at: {type(error).__name__}: {error!s:.300}"
        return [problem(check.name, words, "Report it, with these words; the others stand.")]
    return found if isinstance(found, list) else [found]
