"""Runs whose sender is dead and that nobody reads."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from weightsync.errors import WeightSyncError
from weightsync.files import Directory, Lock, is_locked
from weightsync.leftovers.leftover import Leftover, occupied
from weightsync.mounts import is_in_memory
from weightsync.run.kind import RunKind
from weightsync.run.look import lease_state, sender_words
from weightsync.run.ownership import owner_of
from weightsync.run.receivers import read_receivers
from weightsync.run.records import RECEIVERS, SENDER_LOCK, is_temporary, receiver_of
from weightsync.run.removal import remove_rest
from weightsync.scheme import known_schemes

VERSIONS_STAY = "its versions are kept on purpose: --kept removes them too"


def leftover_run(path: str, with_versions: bool) -> Leftover | None:
    """A run at a path, whether or not it may be removed; None: there is none of ours.

    Args:
        with_versions: also versions that stay on purpose when their sender ends (DiskScheme's).

    Raises:
        WeightSyncError, OSError: it cannot be looked at.
    """
    run = Directory.open(path)
    found = _recognise(run)
    if found is None:
        return None
    name, kind = found
    nbytes, time = occupied(path)
    kept = _in_use(run, kind)
    stays = kind is not None and kind.keeps and not with_versions
    if kept is None and stays:
        kept = VERSIONS_STAY
    what = f"run ({name}){'' if kept else _last_sender(run)}"
    if kept is VERSIONS_STAY and kind is not None and (unfinished := kind.unfinished(run)):
        return _unfinished(path, kind, unfinished)
    return Leftover(path, what, nbytes, time, kept, partial(_remove, path, kind, _remove_all))


def _unfinished(path: str, kind: RunKind, names: Sequence[str]) -> Leftover:
    """What never became a version, in a run whose versions stay."""
    found = [occupied(f"{path}/{name}") for name in names]
    nbytes, time = sum(size for size, _ in found), max(changed for _, changed in found)
    what = f"{len(names)} unfinished version{'' if len(names) == 1 else 's'}"
    return Leftover(path, what, nbytes, time, None, partial(_remove, path, kind, _sweep))


def _recognise(run: Directory) -> tuple[str, RunKind | None] | None:
    """The scheme's name, and the kind; no kind: nothing was published there."""
    for cls in known_schemes():
        if cls.run_kind is not None and cls.run_kind.recognises(run):
            # The lock of a sender, past or present, is what makes it a run and not just a name.
            return (cls.url_scheme, cls.run_kind) if _has_lock(run) else None
    names = run.names()
    bare = all(name in (SENDER_LOCK, RECEIVERS) or is_temporary(name) for name in names)
    return ("nothing published", None) if bare and _has_lock(run) else None


def _has_lock(run: Directory) -> bool:
    return run.status(SENDER_LOCK) is not None


def _last_sender(run: Directory) -> str:
    who = sender_words(owner_of(run))
    return f", last sender {who}" if who else ""


# -------------------------------------------------------------------- who uses it


def _in_use(run: Directory, kind: RunKind | None) -> str | None:
    """Why a run must stay, as far as can be seen without taking locks that others run into."""
    if is_locked(run, SENDER_LOCK):
        return f"its sender is alive ({sender_words(owner_of(run)) or 'unknown'})"
    alive = [report for report in read_receivers(run) if report.state not in ("dead", "failed")]
    locked = [name for records, name in _receiver_locks(run) if is_locked(records, name)]
    if alive or locked:
        who = alive[0].receiver if alive else locked[0].removesuffix(".lock")
        return f"receiver {who!r} is alive"
    leases = kind.leases(run) if kind is not None else []
    if any(lease_state(directory, name) != "free" for directory, name in leases):
        return "somebody reads it"
    return _elsewhere(run)


def _elsewhere(run: Directory) -> str | None:
    """Locks of other hosts may not be seen here; ours are seen everywhere.

    A disk of this host may be exported by it: what NFS clients lock there, flock does not see.
    """
    if is_in_memory(run.path):
        return None
    host, here = owner_of(run).get("host"), socket.gethostname()
    hosts = {host, *(report.host for report in read_receivers(run) if report.host)}
    others = sorted(str(each) for each in hosts if each != here)
    if not others:
        return None
    return f"hosts {', '.join(others)!s:.200} have used it, and their locks may not be seen here"


def _receiver_locks(run: Directory) -> list[tuple[Directory, str]]:
    try:
        records = run.subdirectory(RECEIVERS)
    except FileNotFoundError:
        return []
    names = [n for n in records.names() if n.endswith(".lock") and receiver_of(n) is not None]
    return [(records, name) for name in names]


# -------------------------------------------------------------------- removing it


def _remove(
    path: str, kind: RunKind | None, remove: Callable[[Directory, RunKind | None], str | None]
) -> str | None:
    """Look once more, hold the run, and remove. Why not; None: it is done."""
    try:
        run = Directory.open(path)
        reason = _in_use(run, kind)
        if reason is None:
            with _taken(run, kind) as reason:
                if reason is None:
                    reason = remove(run, kind)
        return reason
    except FileNotFoundError:
        return None  # somebody else was faster
    except (OSError, WeightSyncError) as error:
        return str(error)


def _remove_all(run: Directory, kind: RunKind | None) -> str | None:
    if kind is None:
        remove_rest(run)
    else:
        kind.remove(run)
    return "what is not ours stays in it" if run.exists else None


def _sweep(run: Directory, kind: RunKind | None) -> str | None:
    assert kind is not None
    kind.sweep(run)
    return "not all of it could be removed" if kind.unfinished(run) else None


@contextmanager
def _taken(run: Directory, kind: RunKind | None) -> Iterator[str | None]:
    """Hold a run as its sender would: whoever comes waits, or begins anew when it is gone.

    Yields why it cannot be had; None: it is ours, and nobody reads it.
    """
    sender = Lock(run, SENDER_LOCK)
    held: list[Lock] = []
    try:
        if not sender.try_exclusive() or not sender.exists:
            yield "its sender is alive"
            return
        leases = kind.leases(run) if kind is not None else []
        for directory, name in [*_receiver_locks(run), *leases]:
            try:
                lock = Lock(directory, name)
            except FileNotFoundError:
                continue
            held.append(lock)
            if not lock.try_exclusive():
                yield f"{lock.name} is locked: somebody uses it"
                return
        for lock in held:  # whoever removes a version locks it again
            lock.unlock()
        yield None
    finally:
        for lock in [*held, sender]:
            lock.release()
