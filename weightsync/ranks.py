"""The ranks of one trainer, kept in step by messages through torch's store.

No rank ever waits for another inside a collective: the others read a message of rank 0 first, and
waiting for a message has a deadline, ends with the sender's error, and sets off no watchdog.
Values are JSON; nothing received is unpickled.
"""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
import xxhash

from weightsync import errors
from weightsync.deadline import Deadline
from weightsync.errors import DeadlineError, WeightSyncError

Message = dict[str, Any]

_made: Counter[str] = Counter()
"""How many ``Ranks`` this process made over the same ranks: all of them count alike."""


class Ranks:
    """One trainer's ranks. Rank 0 of the group says what is done; the others follow.

    All ranks make one, and begin every operation, in the same order. Each operation has messages
    of its own, which stay until every rank has begun a later one: a rank that missed an operation
    hears how it ended instead of waiting for it.

    Args:
        group: a ``torch.distributed`` group; None for all ranks.
    """

    def __init__(self, group: Any = None) -> None:
        from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

        members = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.rank = members.index(dist.get_rank())
        self.size = len(members)
        name = xxhash.xxh3_64_hexdigest(str(members).encode())
        _made[name] += 1
        self._store = PrefixStore(f"weightsync/{name}/{_made[name]}", _get_default_store())
        self._operation = 0
        self._said = 0
        self._heard = 0
        self._keys: list[str] = []
        self._older: list[str] = []

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @contextmanager
    def operation(self) -> Iterator[None]:
        """One operation of all ranks. What rank 0 raises in it, the others raise as well."""
        self._operation += 1
        self._said = self._heard = 0
        self._older += self._keys
        self._keys = []
        if not self.leads:
            yield
            return
        try:
            yield
        except BaseException as error:
            self.say(_described(error))
            raise

    # ---------------------------------------------------------------- rank 0

    def say(self, message: Message) -> None:
        """Tell all other ranks."""
        self._put(f"{self._operation}/said/{self._said}", message)
        self._said += 1

    def collect(self, stage: str, deadline: Deadline) -> list[Message]:
        """Wait for the answers of all other ranks, in their order.

        Raises:
            WeightSyncError: of the kind that a rank raised, with its number and words.
            DeadlineError: names the ranks that did not answer.
        """
        answers: dict[int, Message] = {}

        def attempt() -> bool | None:
            for rank in range(1, self.size):
                if rank not in answers:
                    answer = self._get(f"{self._operation}/{stage}/{rank}")
                    if answer is not None:
                        _raise_if_error(answer, f"rank {rank}")
                        answers[rank] = answer
            return len(answers) == self.size - 1 or None

        self._keys += [f"{self._operation}/{stage}/{rank}" for rank in range(1, self.size)]
        if deadline.wait(attempt) is None:
            late = ", ".join(str(rank) for rank in range(1, self.size) if rank not in answers)
            raise DeadlineError(
                f"rank {late} of the trainer did not come within {deadline.seconds:.1f} s: every "
                "rank of a sharded trainer makes the same calls of its sender"
            )
        return [answers[rank] for rank in sorted(answers)]

    def forget_older(self) -> None:
        """Remove the messages of former operations. Call when every rank has begun this one."""
        for key in self._older:
            self._store.delete_key(key)
        self._older = []

    # ---------------------------------------------------------------- the other ranks

    def hear(self, deadline: Deadline) -> Message:
        """Wait for the next message of rank 0.

        Raises:
            WeightSyncError: of the kind that rank 0 raised, with its words.
            DeadlineError: it said nothing in time.
        """
        key = f"{self._operation}/said/{self._heard}"
        message = deadline.wait(lambda: self._get(key))
        if message is None:
            raise DeadlineError(f"rank 0 of the trainer said nothing for {deadline.seconds:.1f} s")
        self._heard += 1
        _raise_if_error(message, "rank 0")
        return message

    def answer(self, stage: str, message: Message) -> None:
        self._put(f"{self._operation}/{stage}/{self.rank}", message)

    @contextmanager
    def answering(self, stage: str, message: Message) -> Iterator[None]:
        """Answer when the block is done, or with what it raised. It may fill in the message."""
        try:
            yield
        except BaseException as error:
            self.answer(stage, _described(error))
            raise
        self.answer(stage, message)

    # ---------------------------------------------------------------- the store

    def _put(self, key: str, message: Message) -> None:
        self._store.set(key, json.dumps(message))
        if self.leads:
            self._keys.append(key)

    def _get(self, key: str) -> Message | None:
        # Never a blocking get: other threads of the process need the store meanwhile.
        if not self._store.check([key]):
            return None
        message: Message = json.loads(self._store.get(key))
        return message


def _described(error: BaseException) -> Message:
    where = f"pid {os.getpid()} on {socket.gethostname()}"
    return {"error": type(error).__name__, "words": str(error) or repr(error), "where": where}


def _raise_if_error(message: Mapping[str, Any], rank: str) -> None:
    if "error" not in message:
        return
    kind = getattr(errors, message["error"], None)
    known = isinstance(kind, type) and issubclass(kind, WeightSyncError)
    words = message["words"] if known else f"{message['error']}: {message['words']}"
    raised = kind if known and kind is not None else WeightSyncError
    raise raised(f"{rank} of the trainer ({message['where']}): {words}")
