"""Tensors on GPUs that take a version's bytes as they are: all of one GPU's in one go.

Whatever else there is to write (casts, strided tensors, devices that only torch can use) is left to
others.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import numpy as np
import torch

from weightsync.chunks import Geometry
from weightsync.deadline import Deadline
from weightsync.device import Device, device_of
from weightsync.errors import CorruptError, NoRoomError
from weightsync.manifest import Manifest
from weightsync.selection import Selection
from weightsync.tensors import plain_address
from weightsync.transport import Memory
from weightsync.upload import Through, merged

log = logging.getLogger("weightsync")


class GPUTargets:
    """Keeps a few windows of memory on each GPU, for what passes through.

    Args:
        tensors: by name or alias. Those that cannot be written so are left out.

    Attributes:
        names: of those that can.
    """

    def __init__(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
        self.names: set[str] = set()
        self._ways: dict[torch.device, Through] = {}
        for place in {tensor.device for tensor in tensors.values()}:
            device = _gpu(place)
            if device is not None:
                self._add(device, manifest, tensors)

    def _add(self, device: Device, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
        rows = {}
        for name, tensor in tensors.items():
            spec = manifest.spec(name)
            address = plain_address(tensor, spec.dtype, device.place)
            if address:
                rows[name] = address, spec.offset, spec.nbytes
        if not rows:
            return
        into, offset, length = np.array(list(rows.values()), dtype=np.int64).T
        selection = Selection.of(offset, length, manifest.nbytes)
        copies = merged(into, offset, length)
        try:
            way = Through(device, Geometry(manifest), selection, *copies)
        except NoRoomError as error:
            log.warning("%s: tensors are written one by one, which takes longer", error)
            return
        self._ways[device.place] = way
        self.names |= rows.keys()

    def write(self, memory: Memory) -> None:
        """Write a leased version into the tensors.

        Raises:
            CorruptError: some bytes are wrong. Tensors may have been written then.
        """
        for place, way in self._ways.items():
            try:
                way.run(memory, Deadline(math.inf))  # copies, which wait for nobody
            except CorruptError as error:
                raise CorruptError(f"{error}; found out after they came to {place}") from error


def _gpu(place: torch.device) -> Device | None:
    return None if place.type in ("cpu", "meta") else device_of(place)
