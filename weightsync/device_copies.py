"""Tensors that lie in a device's memory, on their way into others: all plain ones in one go."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weightsync.device import Device
from weightsync.tensors import Addresses, plain_address
from weightsync.transport import Targets


class DeviceCopies:
    """
    Args:
        addresses: for each tensor of the manifest, where it lies on the device.

    Attributes:
        others: names of the targets that are not plain tensors of the device, and are not written.
    """

    def __init__(
        self, device: Device, targets: Targets, addresses: Sequence[int] | Addresses
    ) -> None:
        at = dict(zip((spec.name for spec in targets.manifest.tensors), addresses, strict=True))
        rows, others = [], []
        for name, tensor in targets.tensors.items():
            spec = targets.manifest.spec(name)
            if not spec.nbytes:
                continue
            into = plain_address(tensor, spec.dtype, device.place)
            if into:
                rows.append((into, int(at[spec.name]), spec.nbytes))
            else:
                others.append(name)
        table: Addresses = np.array(rows, dtype=np.int64).reshape(-1, 3)
        self._device = device
        self._moves = device.moves(table[:, 0], table[:, 1], table[:, 2])
        self.others = tuple(others)

    def run(self) -> None:
        """Write them, on torch's lane; they are there when this returns."""
        lane = self._device.current()
        self._moves.run(lane)
        lane.wait()
