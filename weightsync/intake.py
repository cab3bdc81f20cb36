"""Tensors on their way from a source into a transport: checked against the manifest, and copied."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch

from weightsync.deadline import Deadline
from weightsync.errors import DeadlineError, SourceError
from weightsync.manifest import describe
from weightsync.source import Inventory


class Intake:
    """What a source streams, each tensor once and as its manifest says, whatever the order.

    Iterating gives the index of each tensor in the manifest, and the tensor, which is valid until
    the next one is asked for: a stream may hand out one staging buffer again and again.

    Args:
        awaited: the indices of the tensors that the stream is to bring.

    Attributes:
        seconds: that the source has taken so far.
    """

    def __init__(self, inventory: Inventory, awaited: Sequence[int], deadline: Deadline) -> None:
        self._inventory = inventory
        self._awaited = awaited
        self._deadline = deadline
        self.seconds = 0.0

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        """
        Raises:
            SourceError: a tensor is not what the manifest says, comes twice, or does not come.
            DeadlineError: the source was not done in time.
        """
        specs = self._inventory.manifest.tensors
        number_of = {spec.name: number for number, spec in enumerate(specs)}
        left = set(self._awaited)
        stream = self._inventory.stream()
        while True:
            asked = time.perf_counter()
            entry = next(stream, None)
            self.seconds += time.perf_counter() - asked
            if entry is None:
                break
            name, tensor = entry
            number = number_of.get(name)
            if number is None or number not in left:
                what = "sent twice" if number is not None else "not in the manifest"
                raise SourceError(f"tensor {name!r} is {what}")
            left.remove(number)
            spec = specs[number]
            cast = tensor.dtype.is_floating_point and spec.dtype.is_floating_point
            if tensor.shape != spec.shape or not (cast or tensor.dtype == spec.dtype):
                sent = describe(tensor.dtype, tensor.shape)
                raise SourceError(f"tensor {name!r} is {sent}, its manifest says {spec}")
            yield number, tensor
            del entry, tensor  # before the next one is made
            if self._deadline.expired:
                raise DeadlineError(
                    f"the source was not done within {self._deadline.seconds:.1f} s; "
                    f"it had come to {name!r}"
                )
        if left:
            names = ", ".join(repr(specs[number].name) for number in sorted(left)[:5])
            raise SourceError(f"{len(left)} tensors of the manifest were not sent: {names} ...")


@torch.no_grad()
def copy_tensor(into: torch.Tensor, tensor: torch.Tensor, name: str) -> None:
    """Copy values over: the one documented cast, any strides, any device.

    Raises:
        SourceError: torch has no such conversion.
    """
    try:
        into.copy_(tensor)
    except NotImplementedError:
        # int1 to int7 and uint1 to uint7 have no copy kernel; their bytes are whole, though.
        if tensor.dtype != into.dtype or into.dtype.itemsize != 1:
            raise SourceError(
                f"tensor {name!r}: torch cannot copy {tensor.dtype} to {into.dtype}"
            ) from None
        into.view(torch.uint8).copy_(tensor.view(torch.uint8))
