"""The trainer's memory in an engine's process."""

from __future__ import annotations

import threading
import weakref

import numpy as np
import torch

from weightsync.device import Device
from weightsync.device_copies import DeviceCopies
from weightsync.errors import EngineError, WeightSyncError
from weightsync.manifest import ParamSpec
from weightsync.run.process import this_process
from weightsync.schemes.cuda_ipc.handles import Exchange
from weightsync.schemes.cuda_ipc.layout import Allocation, Table
from weightsync.tensors import Addresses
from weightsync.transport import Targets


class Mapped:
    """The memory of one table: mapped when it is first needed, kept while it is used.

    Args:
        keep: whether it stays mapped between two uses.
    """

    def __init__(self, exchange: Exchange, table: Table, keep: bool) -> None:
        self.manifest = table.manifest
        self._exchange = exchange
        self._table = table
        self._keep = keep
        self._users = 0
        self._changing = threading.RLock()
        self._place: torch.device | None = None
        self._opened: list[int] = []
        self._addresses: dict[str, int] = {}
        self._array: Addresses | None = None
        self._copies: tuple[weakref.ref[Targets], DeviceCopies] | None = None

    def enter(self) -> None:
        """Begin a use."""
        with self._changing:
            self._users += 1

    def leave(self) -> None:
        """End a use, when nothing is queued any more that reads."""
        with self._changing:
            self._users -= 1
            if not self._keep and self._users == 0:
                self._unmap()

    def retire(self) -> None:
        """Unmap it after its last use."""
        with self._changing:
            self._keep = False
            if self._users == 0:
                self._unmap()

    def wait(self) -> None:
        """Until everything that this process has queued on the device is done."""
        if self._place is not None:
            self._exchange.synchronise(self._place)

    def tensor(self, spec: ParamSpec) -> torch.Tensor:
        device = self._map()
        if not spec.nbytes:
            return torch.empty(spec.shape, dtype=spec.dtype, device=device.place)
        flat = device.tensor_at(self._addresses[spec.name], spec.nbytes)
        return flat.view(spec.dtype).view(spec.shape)

    def addresses(self, place: torch.device) -> Addresses | None:
        if self._map().place != place:
            return None
        with self._changing:
            if self._array is None:
                at = [self._addresses.get(spec.name, 0) for spec in self.manifest.tensors]
                self._array = np.array(at, dtype=np.int64)
            return self._array

    def move_into(self, targets: Targets) -> tuple[str, ...]:
        """Write all plain targets on the device; returns the names of the others."""
        device = self._map()
        with self._changing:
            if self._copies is None or self._copies[0]() is not targets:
                at = [self._addresses.get(spec.name, 0) for spec in self.manifest.tensors]
                self._copies = weakref.ref(targets), DeviceCopies(device, targets, at)
            copies = self._copies[1]
        copies.run()
        return copies.others

    # ---------------------------------------------------------------- mapping

    def _map(self) -> Device:
        """
        Raises:
            EngineError: the memory is on another GPU, or cannot be mapped.
        """
        with self._changing:
            if self._place is None:
                self._open()
            assert self._place is not None
            return self._exchange.device(self._place)

    def _open(self) -> None:
        table = self._table
        place = self._exchange.place_of(table.device)
        if place is None:
            raise EngineError(
                f"the trainer's weights lie on GPU {table.device}, which this process does not "
                "see: CUDAIPCScheme is for both on one GPU; use DoubleBufferScheme"
            )
        own = table.process == this_process()  # CUDA opens no handles of the own process
        bases = []
        try:
            for allocation in table.allocations:
                base = allocation.address
                if not own:
                    base = self._exchange.open(place, allocation.handle)
                    self._opened.append(base)
                self._require_whole(place, base, allocation)
                bases.append(base)
        except WeightSyncError as error:
            self._close(place)
            raise EngineError(
                f"the trainer's memory on {place} cannot be mapped: {error}; usual causes: "
                "containers that do not share an IPC and a PID namespace (--ipc=host "
                "--pid=host), PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, MIG (both need "
                "the same slice), or a trainer that has just ended; DoubleBufferScheme needs "
                "none of that"
            ) from None
        specs = table.manifest.tensors
        self._addresses = {
            spec.name: bases[which] + offset
            for spec, (which, offset) in zip(specs, table.places, strict=True)
            if spec.nbytes
        }
        self._place = place

    def _require_whole(self, place: torch.device, base: int, claimed: Allocation) -> None:
        """What a table says of memory becomes addresses in it: it is not believed.

        Raises:
            WeightSyncError: no allocation begins there, or it is shorter.
        """
        begin, nbytes = self._exchange.allocation(place, base)
        if begin != base or nbytes < claimed.nbytes:
            raise WeightSyncError(f"{claimed.nbytes:,} bytes were announced, {nbytes:,} are there")

    def _unmap(self) -> None:
        place, self._place = self._place, None
        self._addresses, self._array, self._copies = {}, None, None
        if place is not None and self._opened:
            self._exchange.synchronise(place)
            self._close(place)

    def _close(self, place: torch.device) -> None:
        opened, self._opened = self._opened, []
        for address in opened:
            self._exchange.close(place, address)
