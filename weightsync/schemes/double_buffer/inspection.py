"""Looking at a run from outside: what is published, where, and who holds what."""

from __future__ import annotations

from dataclasses import dataclass

from weightsync.errors import WeightSyncError
from weightsync.files import Directory, is_locked, lock_kinds
from weightsync.manifest import Manifest
from weightsync.report import ReceiverReport
from weightsync.run.receivers import read_receivers
from weightsync.run.records import MAX_RECORD, SENDER_LOCK
from weightsync.schemes.double_buffer import layout
from weightsync.schemes.double_buffer.layout import Commit
from weightsync.version import Version


@dataclass(frozen=True)
class SlotStatus:
    """One slot of a generation.

    Attributes:
        version: the whole version it holds; None while it is written or was never written.
        state: ``free``, ``leased`` by readers, or ``written``: the sender is at it. Processes of
            other hosts are not seen.
        nbytes: bytes the file occupies.
    """

    generation: str
    slot: int
    version: Version | None
    state: str
    nbytes: int


@dataclass(frozen=True)
class RunStatus:
    """A run's directory at one moment.

    Attributes:
        version: the newest whole version; None if there is none yet.
        sender_alive: whether a live process owns the run.
        time: when the newest version was committed, in seconds since 1970.
        problems: what could not be read, and why.
    """

    path: str
    version: Version | None
    sender_alive: bool
    time: float | None
    tensors: int
    nbytes: int
    slots: tuple[SlotStatus, ...]
    receivers: tuple[ReceiverReport, ...]
    problems: tuple[str, ...]


def inspect_run(path: str) -> RunStatus:
    run = Directory.open(path)
    problems: list[str] = []
    head: Commit | None = None
    tensors = 0
    try:
        head = Commit.from_json(run.read(layout.HEAD, MAX_RECORD), layout.HEAD)
        data = run.subdirectory(head.generation).read(layout.MANIFEST, layout.MAX_MANIFEST)
        tensors = len(Manifest.from_json(data).tensors)
    except FileNotFoundError:
        pass
    except WeightSyncError as error:
        problems.append(str(error))
    slots: list[SlotStatus] = []
    for name in run.names():
        if layout.generation_number(name) is not None:
            try:
                slots += _slots(run.subdirectory(name), name, problems)
            except (FileNotFoundError, WeightSyncError) as error:
                problems.append(str(error))
    return RunStatus(
        path,
        head.version if head else None,
        is_locked(run, SENDER_LOCK),
        head.time if head else None,
        tensors,
        head.nbytes if head else 0,
        tuple(slots),
        tuple(read_receivers(run)),
        tuple(problems),
    )


def _slots(generation: Directory, name: str, problems: list[str]) -> list[SlotStatus]:
    found = []
    for number in range(layout.MAX_SLOTS):
        status = generation.status(layout.slot_bytes(number))
        if status is None:
            break
        version = None
        try:
            record = layout.slot_record(number)
            version = Commit.from_json(generation.read(record, MAX_RECORD), record).version
        except FileNotFoundError:
            pass
        except WeightSyncError as error:
            problems.append(f"{generation.path}: {error}")
        found.append(SlotStatus(name, number, version, _state(generation, number), status.st_size))
    return found


def _state(generation: Directory, number: int) -> str:
    status = generation.status(layout.slot_lock(number))
    kinds = lock_kinds(status.st_ino) if status else set()
    return "written" if "WRITE" in kinds else "leased" if "READ" in kinds else "free"
