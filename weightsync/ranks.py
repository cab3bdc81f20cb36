"""The ranks of one trainer, kept in step by messages through torch's store.

No rank ever waits for another inside a collective: the others read a message of rank 0 first, and
waiting for a message has a deadline, ends with the sender's error, and sets off no watchdog.
Values are JSON; nothing received is unpickled.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch.distributed as dist
import xxhash

from weightsync import errors
from weightsync.deadline import Deadline, call_with_deadline
from weightsync.errors import DeadlineError, ReceiverError, WeightSyncError
from weightsync.report import SyncReport

Message = dict[str, Any]
T = TypeVar("T")

EARLY = 1.0
"""Seconds that a rank may be ahead of rank 0 after one of them missed a call."""

STUCK = 1.0
"""Seconds for a call of the store that takes none, unless the process that holds it is stopped."""


class Ranks:
    """One trainer's ranks. Rank 0 of the group says what is done; the others follow.

    They :meth:`meet` first. Then rank 0 begins operations and the others join them. Each operation
    has messages of its own, which stay until every rank has joined a later one: a rank that comes
    late hears how it ended instead of waiting for it.

    Args:
        purpose: what they meet for; ranks that meet for another purpose at the same time do not
            get mixed up with them.
        group: a ``torch.distributed`` group; None for all ranks.

    Raises:
        WeightSyncError: this process is none of the group's ranks.
    """

    def __init__(self, purpose: str, group: Any = None) -> None:
        from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise WeightSyncError("group=: this process is none of its ranks")
        members = dist.get_process_group_ranks(group or dist.group.WORLD)
        if dist.get_rank() not in members:
            raise WeightSyncError(
                f"group=: this process (rank {dist.get_rank()}) is none of {members}"
            )
        self.members = frozenset(members)
        self.rank = members.index(dist.get_rank())
        self.size = len(members)
        name = xxhash.xxh3_64_hexdigest(json.dumps([purpose, members]).encode())
        self._place = self._store = PrefixStore(f"weightsync/{name}", _get_default_store())
        self._operation = 0
        self._said = 0
        self._heard = 0
        self._turns = 0
        self._keys: list[str] = []
        self._older: list[str] = []

    def meet(self, deadline: Deadline) -> None:
        """Wait until all ranks are there, whatever became of those that met here before.

        Raises:
            DeadlineError: names the ranks that did not come.
        """
        from torch.distributed.distributed_c10d import PrefixStore

        if self.leads:
            former = self._get("session")
            session = secrets.token_hex(8)
            self._store = PrefixStore(session, self._place)
            self._place.set("session", json.dumps({"name": session}))
            answers = self.collect("here", deadline)
            self._store.set("all here", json.dumps([answer["nonce"] for answer in answers]))
            for key in self._keys:
                self._store.delete_key(key)
            self._keys = []
            if former is not None:
                self._place.delete_key(f"{former['name']}/all here")
            return
        nonce = secrets.token_hex(8)
        seen: list[str] = []

        def attempt() -> bool | None:
            self._store = self._place
            session = self._get("session")
            if session is None:
                return None
            self._store = PrefixStore(session["name"], self._place)
            if session["name"] not in seen:
                seen.append(session["name"])
                self.answer("here", {"nonce": nonce})
            # A session that others had before this rank came does not know it.
            return nonce in (self._get("all here") or ()) or None

        if not self._bounded(lambda: deadline.wait(attempt), deadline):
            raise DeadlineError(
                f"rank 0 of the trainer did not come within {deadline.seconds:.1f} s: {_SAME_CALLS}"
            )

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @contextmanager
    def operation(self, deadline: Deadline) -> Iterator[None]:
        """One operation of all ranks. What rank 0 raises in it, the others raise as well.

        Raises:
            DeadlineError: rank 0 began none in time.
        """
        self._said = self._heard = self._turns = 0
        if self.leads:
            self._operation += 1
            self._older += self._keys
            self._keys = [f"{self._operation}/turn"]
            self._store.set("now", json.dumps(self._operation))
        else:
            try:
                self._join(deadline)
            except BaseException as error:
                self._note(error)
                raise
        try:
            yield
        except BaseException as error:
            if self.leads:
                self.say(_described(error))
            else:
                self.leave(error)
            raise

    def _join(self, deadline: Deadline) -> None:
        """Take part in the newest operation, whatever this rank has missed.

        One that has failed already is over: this rank came too late for it, or it never called
        for it and is early for the next one, which rank 0 would begin soon.
        """
        self._bounded(lambda: self._delete(f"absent/{self.rank}"), Deadline(0))
        if not self._newer(deadline):
            raise DeadlineError(
                f"rank 0 of the trainer said nothing for {deadline.seconds:.1f} s: {_SAME_CALLS}"
            )
        while self._get(f"{self._operation}/said/0") and self._newer(deadline.at_most(EARLY)):
            pass

    def _note(self, error: BaseException) -> None:
        """Leave word that this rank was here before rank 0, and is no more."""
        with suppress(WeightSyncError):
            note = _described(error)
            self._bounded(lambda: self._put(f"absent/{self.rank}", note), Deadline(0))

    def _newer(self, deadline: Deadline) -> bool:
        def attempt() -> int | None:
            now: Any = self._get("now")
            return now if now is not None and now > self._operation else None

        now = self._bounded(lambda: deadline.wait(attempt), deadline)
        self._operation = now or self._operation
        return now is not None

    # ---------------------------------------------------------------- rank 0

    def say(self, message: Message) -> None:
        """Tell all other ranks."""
        self._put(f"{self._operation}/said/{self._said}", message)
        self._said += 1

    def enter(self) -> None:
        """Call before it is said that all enter collectives: from now on no rank can leave before
        it has heard that.

        Raises:
            WeightSyncError: one has left, with its words.
        """
        self._turns += 1
        turn = self._next_turn(str(self._turns))
        if turn != str(self._turns):
            left = json.loads(turn)
            _raise_if_error(left, f"rank {left['rank']}")

    def collect(self, stage: str, deadline: Deadline) -> list[Message]:
        """Wait for the answers of all other ranks, in their order.

        Raises:
            WeightSyncError: of the kind that a rank raised, with its number and words.
            DeadlineError: names the ranks that did not answer.
        """
        answers: dict[int, Message] = {}
        given_up: dict[int, Deadline] = {}

        def attempt() -> bool | None:
            for rank in range(1, self.size):
                if rank not in answers:
                    answer = self._get(f"{self._operation}/{stage}/{rank}")
                    if answer is not None:
                        _raise_if_error(answer, f"rank {rank}")
                        answers[rank] = answer
                        continue
                    note = self._get(f"absent/{rank}")
                    if note is None:
                        given_up.pop(rank, None)
                    elif given_up.setdefault(rank, Deadline(EARLY)).expired:
                        self._delete(f"absent/{rank}")
                        _raise_if_error(note, f"rank {rank}")
            left = self._get(f"{self._operation}/turn")
            if isinstance(left, dict):
                _raise_if_error(left, f"rank {left['rank']}")
            return len(answers) == self.size - 1 or None

        self._keys += [f"{self._operation}/{stage}/{rank}" for rank in range(1, self.size)]
        if deadline.wait(attempt) is None:
            late = ", ".join(str(rank) for rank in range(1, self.size) if rank not in answers)
            raise DeadlineError(
                f"rank {late} of the trainer did not come within {deadline.seconds:.1f} s: "
                f"{_SAME_CALLS}"
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
        message = self._bounded(lambda: deadline.wait(lambda: self._get(key)), deadline)
        if message is None:
            raise DeadlineError(f"rank 0 of the trainer said nothing for {deadline.seconds:.1f} s")
        self._heard += 1
        _raise_if_error(message, "rank 0")
        return message

    def leave(self, error: BaseException) -> bool:
        """Tell that this rank takes no part any more, for the reason that is given.

        Returns:
            False if rank 0 has begun to enter collectives of which this rank is yet to hear.
        """
        mine = json.dumps({"rank": self.rank, **_described(error)})
        with suppress(WeightSyncError):  # the store may be gone, and rank 0 with it
            turn = self._bounded(lambda: self._next_turn(mine), Deadline(0))
            return turn is None or turn.startswith("{")
        return True

    def entered(self) -> None:
        """Call when it was heard that all enter collectives."""
        self._turns += 1

    def _next_turn(self, turn: str) -> str:
        before = self._turns - 1 if self.leads else self._turns
        key = f"{self._operation}/turn"
        with _reached():
            found = self._store.compare_set(key, str(before) if before else "", turn)
        return found.decode()

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
        with _reached():
            self._store.set(key, json.dumps(message))
        if self.leads:
            self._keys.append(key)

    def _get(self, key: str) -> Message | None:
        # Never a blocking get: other threads of the process need the store meanwhile.
        with _reached():
            found = self._store.get(key) if self._store.check([key]) else None
        message: Message | None = None if found is None else json.loads(found)
        return message

    def _delete(self, key: str) -> bool:
        with _reached():
            return bool(self._store.delete_key(key))

    def _bounded(self, call: Callable[[], T], deadline: Deadline) -> T | None:
        """Call the store, which answers nobody while the process that holds it is stopped."""
        if self.leads:
            return call()
        try:
            return call_with_deadline(call, Deadline(deadline.remaining + STUCK), "the store")
        except DeadlineError:
            return None


_SAME_CALLS = "every rank of a sharded trainer makes the same calls of its sender"


@contextmanager
def _reached() -> Iterator[None]:
    """
    Raises:
        WeightSyncError: the store is gone.
    """
    try:
        yield
    except RuntimeError as error:  # of torch: its own network errors are of this kind
        raise WeightSyncError(
            f"the store through which the trainer's ranks talk does not answer: {error}; has the "
            "process that holds it (rank 0, as a rule) ended?"
        ) from error


def _described(error: BaseException) -> Message:
    where = f"pid {os.getpid()} on {socket.gethostname()}"
    report = error.report if isinstance(error, ReceiverError) else None
    return {
        "error": type(error).__name__,
        "words": str(error) or repr(error),
        "where": where,
        "report": None if report is None else report.to_dict(),
    }


def _raise_if_error(message: Mapping[str, Any], rank: str) -> None:
    if "error" not in message:
        return
    kind = getattr(errors, message["error"], None)
    known = isinstance(kind, type) and issubclass(kind, WeightSyncError)
    words = message["words"] if known else f"{message['error']}: {message['words']}"
    text = f"{rank} of the trainer ({message['where']}): {words}"
    if message["report"] is not None:
        report = SyncReport.from_dict(message["report"])
        raise ReceiverError(text, report.behind(), report)
    raised = kind if known and kind is not None else WeightSyncError
    raise raised(text)
