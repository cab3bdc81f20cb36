"""Where tensors are, and how their bytes are moved there: the processor, or a GPU."""

from __future__ import annotations

import functools

import torch

from weightsync.device import driver
from weightsync.device.device import Device, Lane, Mark, Moves, PageLock, settle
from weightsync.device.host import HostDevice

__all__ = ["Device", "Lane", "Mark", "Moves", "PageLock", "device_of", "settle"]


def device_of(place: torch.device | torch.Tensor) -> Device | None:
    """The device, one object for each; None: one that only torch knows how to use."""
    place = place.device if isinstance(place, torch.Tensor) else place
    if place.type == "cpu":
        return _host()
    if place.type != "cuda" or torch.version.cuda is None or not driver.available():
        return None
    return _cuda(torch.cuda.current_device() if place.index is None else place.index)


@functools.cache
def _host() -> Device:
    return HostDevice()


@functools.cache
def _cuda(index: int) -> Device:
    from weightsync.device.cuda import CUDADevice

    return CUDADevice(index)
