"""One update by all ranks of a sharded trainer.

*Gathered*: rank 0 publishes a stream, and all ranks gather its tensors bucket by bucket; while
rank 0 sends a bucket the others wait for its next message, not in a collective. *Direct*: every
rank writes the rows that it holds where the transport keeps them, nothing is gathered, and rank 0
makes the version visible when all are done.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from weightsync.deadline import Deadline
from weightsync.errors import SourceError, VersionError, WeightSyncError
from weightsync.ranks import Message, Ranks
from weightsync.source import Inventory, Looked, WeightSource, read_weight
from weightsync.transport import Crew, Published, Publisher
from weightsync.version import Version
from weightsync.weight import Weight, is_collective

BUCKET = 64 << 20
"""Bytes. What gathering a bucket takes at most, unless a single tensor is larger: half of it are
the tensors, the rest is left for the copies that the collectives make on their way."""


LEAVE = 60.0
"""Seconds in which rank 0 says what it has announced already."""


def lead(
    ranks: Ranks,
    publisher: Publisher,
    version: Version,
    inventory: Inventory,
    deadline: Deadline,
    receivers: Sequence[str] | None,
    gather: bool | None,
) -> Published:
    """Publish as rank 0. The other ranks are in :func:`follow`.

    Args:
        gather: True gathers; False has every rank write its own rows, or fails; None does so
            where the transport and the hosts allow it.

    Raises:
        SourceError: the ranks do not hold the same weights. Else as ``Publisher.publish``.
    """
    if any(value is None for value in inventory.values):
        raise SourceError(
            "an iterable is not sent by several ranks: pass the module or a mapping to all of "
            "them, or the iterable to a sender of rank 0 alone, without group="
        )
    _require_all(inventory, ranks)
    answers = ranks.collect("ready", deadline)
    ranks.forget_older()
    for rank, answer in enumerate(answers, 1):
        if answer["version"] not in (None, version.number):
            raise VersionError(
                f"rank {rank} of the trainer sends version {answer['version']}, rank 0 "
                f"{version.number}: they are not at the same step"
            )
        if answer["fingerprint"] != inventory.manifest.fingerprint:
            raise SourceError(
                f"rank {rank} of the trainer holds other weights than rank 0: "
                f"{answer['tensors']} tensors against {len(inventory.manifest.tensors)}, or other "
                "names, shapes, dtypes or ties"
            )
    hosts = {socket.gethostname(), *(answer["host"] for answer in answers)}
    direct = _is_direct(gather, publisher, hosts)
    looked = replace(
        inventory, ranks=ranks.members, rest=lambda: _led(ranks, looked, looked.streamed())
    )
    if direct:
        looked = replace(looked, rest=lambda: _led(ranks, looked, looked.gathered()))
    crew = _Crew(ranks) if direct else None
    return publisher.publish(version, Looked(looked), deadline, receivers, crew)


def _is_direct(gather: bool | None, publisher: Publisher, hosts: set[str]) -> bool:
    if gather is True:
        return False
    able = publisher.takes_rows and len(hosts) == 1
    if gather is False and not able:
        why = "its ranks are on several hosts" if publisher.takes_rows else "this scheme cannot"
        raise WeightSyncError(f"gather=False: each rank cannot write its own rows: {why}")
    return able


def follow(
    ranks: Ranks,
    publisher: Publisher,
    source: WeightSource,
    deadline: Deadline,
    number: int | None,
) -> Message:
    """Do as rank 0 says, until it says that the update is over.

    Returns:
        What rank 0 says of it.

    Raises:
        WeightSyncError: what rank 0 raised.
    """
    answer: Message = {"host": socket.gethostname(), "version": number}
    with ranks.answering("ready", answer):
        inventory = replace(source.inventory(), ranks=ranks.members)
        _require_all(inventory, ranks)
        answer["fingerprint"] = inventory.manifest.fingerprint
        answer["tensors"] = len(inventory.manifest.tensors)
    while True:
        leaving: BaseException | None = None
        try:
            message = ranks.hear(deadline)
        except BaseException as error:
            if ranks.leave(error):
                raise
            # Rank 0 is about to enter a collective: it must not be there alone.
            message, leaving = ranks.hear(Deadline(LEAVE)), error
        if "write" in message:
            written: Message = {}
            with ranks.answering("written", written):
                written.update(publisher.contribute(message["write"], inventory, deadline))
        elif "gather" in message:
            ranks.entered()
            for index in message["gather"]:
                _read(inventory, index)
        else:
            return message
        if leaving is not None:
            raise leaving


def _require_all(inventory: Inventory, ranks: Ranks) -> None:
    """
    Raises:
        SourceError: a weight is held by ranks that do not take part, and would be waited for.
    """
    for number in inventory.streamed():
        value = inventory.values[number]
        among = value.among if isinstance(value, Weight) else None
        if among is not None and not among <= ranks.members:
            raise SourceError(
                f"tensor {inventory.manifest.tensors[number].name!r} cannot be sent: ranks "
                f"{sorted(among)} hold it together, and of them only "
                f"{sorted(among & ranks.members)} send; group= names all that hold the model"
            )


def _led(
    ranks: Ranks, inventory: Inventory, gathered: Sequence[int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights, each bucket whole before the first of it is handed out."""
    for bucket in _buckets(inventory, gathered):
        together = [number for number in bucket if is_collective(inventory.values[number])]
        if together:
            ranks.enter()
            ranks.say({"gather": together})
        tensors = [_read(inventory, number) for number in bucket][::-1]
        for number in bucket:
            # Popped, so that each is let go as soon as it is written.
            yield inventory.manifest.tensors[number].name, tensors.pop()


def _buckets(inventory: Inventory, numbers: Sequence[int]) -> Iterator[list[int]]:
    bucket: list[int] = []
    nbytes = 0
    for number in numbers:
        value = inventory.values[number]
        assert isinstance(value, Weight)
        size = value.nbytes
        if bucket and nbytes + size > BUCKET // 2:
            yield bucket
            bucket, nbytes = [], 0
        bucket.append(number)
        nbytes += size
    if bucket:
        yield bucket


def _read(inventory: Inventory, number: int) -> torch.Tensor:
    weight = inventory.values[number]
    assert isinstance(weight, Weight)
    return read_weight(inventory.manifest.tensors[number].name, weight)


class _Crew(Crew):
    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def start(self, ticket: dict[str, Any]) -> None:
        self._ranks.say({"write": ticket})

    def finish(self, deadline: Deadline) -> list[dict[str, Any]]:
        return self._ranks.collect("written", deadline)
