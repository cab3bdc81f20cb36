"""One group of torch's own: a sender and those that receive from it in one round.

A group is built for one set of processes, and left when one of them is lost. Collectives of a group
that was left may still be stuck in torch: gloo cannot abort them, they end by their own timeout. So
their buffers are never used again, and whoever is done with them is a thread of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import (
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
    Work,
)

from weightsync.deadline import Deadline
from weightsync.errors import WeightSyncError
from weightsync.schemes.nccl import endpoint
from weightsync.schemes.nccl.endpoint import Endpoint

log = logging.getLogger("weightsync")

STUCK = 60.0
"""Seconds after which a collective that nobody waits for any more ends by itself (gloo)."""

_POLL = timedelta(milliseconds=50)
_building = threading.Lock()

_here: weakref.WeakSet[Any] = weakref.WeakSet()
"""Torch's objects that have threads."""

_leaving: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_ending = threading.Event()


def _keep(objects: Iterable[Any]) -> None:
    """Never destroy these: their destructors would wait for threads that do not come to an end."""
    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def _at_exit() -> None:
    """A thread that is in a destructor when the interpreter ends would take the process down."""
    _ending.set()
    for thread in list(_leaving):
        thread.join(1.0)


atexit.register(_at_exit)
# A child has none of its parent's threads.
os.register_at_fork(after_in_child=lambda: _keep(list(_here)))


def serve_store(host: str) -> tuple[Endpoint, TCPStore]:
    """A store on a free port of an address, on a socket that we bound ourselves."""
    listening = endpoint.listen(Endpoint(host, 0))
    where = Endpoint(host, int(listening.getsockname()[1]))
    store = TCPStore(
        host,
        where.port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=30),
        master_listen_fd=listening.detach(),
    )
    _here.add(store)
    return where, store


def join_store(where: Endpoint, seconds: float) -> TCPStore:
    timeout = timedelta(seconds=max(1.0, seconds))
    try:
        store = TCPStore(where.host, where.port, is_master=False, timeout=timeout)
    except RuntimeError as error:
        raise WeightSyncError(f"no connection to the store at {where}: {error!s:.300}") from None
    _here.add(store)
    return store


class Group:
    """
    Args:
        store: shared by all members; key: unique to this group.
        host: the address by which other members reach this process (gloo).
        seconds: for all members to come.

    Attributes:
        buffers: of its collectives, and of no other group's.

    Raises:
        WeightSyncError: it could not be built; has torch's words.
    """

    def __init__(
        self,
        backend: str,
        store: Store,
        key: str,
        rank: int,
        size: int,
        host: str,
        device: torch.device,
        seconds: float,
    ) -> None:
        self.rank = rank
        self.size = size
        self._device = device
        place = PrefixStore(key, store)
        place.set_timeout(timedelta(seconds=max(0.1, seconds)))
        make = _gloo if backend == "gloo" else _nccl
        try:
            self._group: Any = make(place, rank, size, host, device, seconds)
        except Exception as error:
            raise WeightSyncError(
                f"the {backend} group of {size} could not be built as rank {rank}: {error!s:.500}"
            ) from None
        _here.add(self._group)
        self._works: list[Work] = []
        self.buffers: list[torch.Tensor] = []

    def broadcast(self, buffer: torch.Tensor) -> Work:
        """Begin to send a buffer from rank 0 to all; it is in use until the work is settled."""
        options = BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=STUCK)
        try:
            work: Work = self._group.broadcast([buffer], options)
        except RuntimeError as error:
            raise WeightSyncError(f"{error!s:.300}") from None
        self._works.append(work)
        return work

    def wait_a_moment(self, work: Work) -> bool:
        """Wait 50 ms at most for a work. Whether it is over, well or not."""
        if not work.is_completed():
            if self._device.type == "cuda":
                time.sleep(0.0002)
            else:
                # Waits in C++, and leaves the operation alone if that was not long enough.
                with contextlib.suppress(RuntimeError):
                    work.wait(_POLL)
        return work.is_completed()

    def settle(self, work: Work) -> None:
        """End a work that is over: its memory may be used now, by torch's current stream too.

        Raises:
            WeightSyncError: it failed; has torch's words.
        """
        try:
            work.wait()
        except RuntimeError as error:
            raise WeightSyncError(f"{error!s:.300}") from None
        self._works.remove(work)

    def leave(self) -> bool:
        """Let it go, whatever state it is in. Idempotent.

        Takes no time with gloo. A kernel of NCCL that waits for a dead peer would be in the way of
        the next group, and is gone when this returns, or after 10 s at most. NCCL's are aborted at
        rest too: an orderly end waits, without end, for each member of the host to end likewise,
        and some may be dead, or have aborted.

        Returns:
            Whether nothing of it is under way any more.
        """
        group, self._group = self._group, None
        works, self._works = self._works, []
        if group is None:
            return True
        nccl = self._device.type == "cuda"
        if not works and not nccl:
            with contextlib.suppress(Exception):
                group.shutdown()
            return True

        aborted = threading.Event()
        began = time.monotonic()
        over = True

        def end() -> None:
            nonlocal group, works, over
            try:
                group.abort()  # of no effect with gloo
            except Exception as error:
                over = False
                log.debug("a group of %d was not aborted: %.300s", self.size, error)
            aborted.set()
            if nccl and _ending.is_set():
                _keep([group, *works])
                return
            patience = Deadline(STUCK)
            while not nccl and not patience.expired and not all(w.is_completed() for w in works):
                if _ending.wait(0.05):
                    _keep([group, *works])
                    return
            works = []
            within = time.monotonic() - began
            group = None  # waits for its threads
            log.debug(
                "a group of %d was aborted within %.2f s, and left within %.2f s",
                self.size,
                within,
                time.monotonic() - began,
            )

        ending = threading.Thread(target=end, name="weightsync leave", daemon=True)
        _leaving.add(ending)
        try:
            ending.start()
        except RuntimeError:  # the interpreter ends (Python 3.12): the process takes it along
            _leaving.discard(ending)
            _keep([group, *works])
            return False
        if nccl:
            return aborted.wait(10.0) and over
        return not ending.is_alive()


def _gloo(
    place: Store, rank: int, size: int, host: str, device: torch.device, seconds: float
) -> Any:
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=max(0.1, seconds))
    options._threads = 2
    return gloo(place, rank, size, options)


def _nccl(
    place: Store, rank: int, size: int, host: str, device: torch.device, seconds: float
) -> Any:
    # Torch has 32 streams for each device and priority, and hands them out again and again: of this
    # one hardly anybody else has any. A copy, digest or engine on a group's own stream would wait
    # for collectives, and without end for those that a dead peer holds up.
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timedelta(days=1)  # deadlines are kept here; torch would end the process
    with (
        _building,
        _environment(
            # torch's watchdog would end the process, trainer or engine, when a peer is lost.
            TORCH_NCCL_ASYNC_ERROR_HANDLING="0",
            TORCH_NCCL_ENABLE_MONITORING="0",
            TORCH_NCCL_DUMP_ON_TIMEOUT="0",
        ),
    ):
        group: Any = dist.ProcessGroupNCCL(place, rank, size, options)
    # NCCL connects at the first collective, and for each kind of them apart (since 2.22), in the
    # call itself, which waits for the others: do it now, so that a failure is one of set-up.
    with torch.cuda.device(device):
        first = group.broadcast([torch.zeros(1, device=device)])
        deadline = Deadline(seconds)
        while not first.is_completed():
            if deadline.expired:
                threading.Thread(target=group.abort, daemon=True).start()
                raise WeightSyncError(f"not all members came within {seconds:.0f} s")
            time.sleep(0.001)
        first.wait()
    return group


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    former = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in former.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
