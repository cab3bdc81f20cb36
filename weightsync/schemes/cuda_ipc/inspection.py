"""What a run of shown memory looks like from outside; the memory itself is not looked at."""

from __future__ import annotations

from functools import lru_cache

from weightsync.files import Directory
from weightsync.inspection import RunStatus, SlotStatus
from weightsync.run.kind import RunKind
from weightsync.run.look import Look, lease_state
from weightsync.schemes.cuda_ipc import layout
from weightsync.schemes.cuda_ipc.layout import Head, Table


class ShownRuns(RunKind):
    """Runs of small files that say where the trainer's tensors lie, while they may be read."""

    def recognises(self, run: Directory) -> bool:
        return any(layout.is_table(name) or layout.is_lease(name) for name in run.names())

    def inspect(self, run: Directory) -> RunStatus:
        look = Look(run)
        head = look.record(layout.HEAD, Head.from_json)
        size = head and look.attempt(lambda: _size(run, head.table))
        tensors, nbytes = size or (0, 0)
        slots: list[SlotStatus] = []
        if head is not None:
            state = lease_state(run, layout.lease_name(head.version))
            slots.append(SlotStatus(head.table, None, head.version, state, nbytes))
        return look.status("cuda-ipc", head, tensors, nbytes, slots)

    def leases(self, run: Directory) -> list[tuple[Directory, str]]:
        return [(run, name) for name in run.names() if layout.is_lease(name)]

    def remove(self, run: Directory) -> None:
        layout.remove_run(run)


def _size(run: Directory, table: str) -> tuple[int, int]:
    return _size_in(run.read(table, layout.MAX_TABLE), f"{run.path}/{table}")


@lru_cache(maxsize=4)  # one of 20,000 tensors takes longer than all the rest of a look
def _size_in(table: bytes, where: str) -> tuple[int, int]:
    manifest = Table.from_json(table, where).manifest
    return len(manifest.tensors), manifest.payload
