"""The trainer's end: listens for receivers, and broadcasts each version to all that are there."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING

import torch

from weightsync.chunks import Copier
from weightsync.deadline import Deadline
from weightsync.errors import DeadlineError, ReceiverError, VersionError, WeightSyncError
from weightsync.manifest import Manifest
from weightsync.report import ReceiverReport
from weightsync.run.records import is_receiver_id
from weightsync.schemes.nccl import windows
from weightsync.schemes.nccl.buckets import Bucket, Packer, Summary
from weightsync.schemes.nccl.control import Server
from weightsync.schemes.nccl.endpoint import Endpoint, is_loopback
from weightsync.schemes.nccl.inspection import newest
from weightsync.schemes.nccl.members import Member, Members
from weightsync.schemes.nccl.reader import IN_FLIGHT
from weightsync.schemes.nccl.topology import device_identity
from weightsync.schemes.nccl.transfer import Rounds, Transfer
from weightsync.schemes.nccl.windows import Assembled, Windows, gpu_of
from weightsync.source import Inventory, WeightSource
from weightsync.transport import Crew, Published, Publisher
from weightsync.version import Version, require_newer

if TYPE_CHECKING:
    from weightsync.schemes.nccl import NCCLScheme

log = logging.getLogger("weightsync")

_GOODBYE = 0.2
"""Seconds in which the last words of a receiver whose process is gone may still be heard."""


class NCCLPublisher(Publisher):
    """See :class:`~weightsync.transport.Publisher`; the protocol is in docs/architecture.md."""

    def __init__(self, scheme: NCCLScheme) -> None:
        self._scheme = scheme
        self._server: Server | None = None
        self._members: Members | None = None
        self._rounds: Rounds | None = None
        self._epoch = 0
        self._update = 0
        self._last: Version | None = None
        self._summary: Summary | None = None
        self._met = False
        self._device = torch.device("cpu")
        self._windows: Windows | None = None
        self._copier = Copier(scheme.threads)
        self._pid = os.getpid()
        self._end: Finalize[None] | None = None

    # ---------------------------------------------------------------- owning the run

    def open(self, deadline: Deadline, epoch: int | None = None) -> int:
        if self._server is not None and self._pid == os.getpid():
            if epoch is not None and epoch != self._epoch:
                self._begin(epoch)
            return self._epoch
        scheme = self._scheme
        self._device = scheme.device_here()
        gpu = gpu_of(self._device)
        exact = scheme.bucket_mb is not None
        self._windows = None if gpu is None else Windows(gpu, scheme.bucket_size, exact)
        device = device_identity() if scheme.backend == "nccl" else ""
        where = Endpoint(scheme.master_address, scheme.port)
        if scheme.token is None and not is_loopback(where.host):
            log.warning("%s can be reached by other hosts, and asks for no token=", where)
        former = self._epoch
        self._begin(epoch)
        members = Members(scheme.backend, device, scheme.workers, self._epoch)
        server = None
        try:
            server = Server(where, scheme.token, members.serve)
            rounds = Rounds(scheme, members, self._device)
        except BaseException:
            self._epoch = former
            if server is not None:
                server.close()
            raise
        self._server, self._members, self._rounds = server, members, rounds
        self._pid = os.getpid()
        self._met = False
        # Also when the trainer lets go of the sender without shutdown().
        self._end = Finalize(self, _end, (server, members, rounds, self._pid), exitpriority=0)
        return self._epoch

    def _begin(self, epoch: int | None) -> None:
        if epoch is None:
            time.sleep(0.001)  # so that the next sender's is another even if this one ends at once
            epoch = max(self._epoch + 1, int(time.time() * 1000))
        if epoch <= self._epoch:
            raise VersionError(f"this sender's epoch was {self._epoch}; {epoch} is not later")
        self._epoch = epoch
        if self._members is not None:
            self._members.epoch = epoch
        self._last = self._summary = None

    def prepare(self, manifest: Manifest, deadline: Deadline) -> None:
        self._owned()  # receivers make room when the first version comes

    def _owned(self) -> tuple[Members, Rounds]:
        if self._members is None or self._rounds is None:
            raise WeightSyncError("the publisher is not open")
        if self._pid != os.getpid():
            raise WeightSyncError(
                "this publisher was opened in another process; open one in this process"
            )
        return self._members, self._rounds

    # ---------------------------------------------------------------- publishing

    def publish(
        self,
        version: Version,
        weights: WeightSource,
        deadline: Deadline,
        receivers: Sequence[str] | None = None,
        crew: Crew | None = None,
    ) -> Published:
        began = time.perf_counter()
        members, rounds = self._owned()
        require_newer(version, self._epoch, self._last)
        members.forget_signed_off()
        for receiver in receivers or ():
            if not is_receiver_id(receiver):
                raise WeightSyncError(f"not a receiver's id: {receiver!r:.80}")
        inventory = weights.inventory()
        looked = time.perf_counter() - began
        targets, absent = self._targets(members, receivers, deadline)
        self._update += 1
        transfer = Transfer(
            self._scheme,
            members,
            rounds,
            targets,
            self._update,
            version,
            inventory.manifest,
            self._device,
            deadline,
            *self._buckets(inventory.manifest.nbytes),
        )
        try:
            summary, changed, streamed = self._send(transfer, inventory, version, deadline)
        except BaseException as error:
            transfer.cancel(orderly=isinstance(error, Exception))
            members.retract([member.id for member in targets], self._update)
            if isinstance(error, WeightSyncError) and not transfer.replicas:
                failures = (*absent, *self._failures(members, transfer))
                members.forget(r.receiver for r in failures if r.state == "dead")
                said = "; ".join(f"receiver {r.receiver!r}: {r.error}" for r in failures)
                raise ReceiverError(f"version {version} reached nobody: {said}", failures) from None
            raise
        self._last, self._summary = version, summary
        members.newest = newest(version, inventory.manifest)
        for member in transfer.replicas:
            if not members.announce(member, version, inventory.manifest):
                transfer.lost[member.id] = False, "its process is gone"
        failures = (*absent, *self._failures(members, transfer, signed_off=False))
        members.forget(r.receiver for r in failures if r.state == "dead")
        return Published(
            inventory.manifest.payload,
            len(inventory.manifest.tensors),
            changed,
            looked + streamed,
            time.perf_counter() - began - looked - streamed,
            served=tuple(
                member.id for member in transfer.replicas if member.id not in transfer.lost
            ),
            failures=failures,
        )

    def _send(
        self, transfer: Transfer, inventory: Inventory, version: Version, deadline: Deadline
    ) -> tuple[Summary, int | None, float]:
        """Returns what was sent, how many tensors differ, and the seconds that the source took."""
        transfer.begin()

        def send(bucket: Bucket) -> None:
            transfer.send(bucket)
            if deadline.expired:
                raise DeadlineError(
                    f"version {version} was not on its way within {deadline.seconds:.1f} s"
                )

        packed = self._packed(transfer, inventory, send, deadline)
        summary = packed.summary()
        if version == self._last and not summary.same_as(self._summary):
            raise VersionError(
                f"version {version.number} was published before with other weights: "
                "receivers that hold it would never see these; use a newer number"
            )
        changed = summary.changed_since(self._summary)  # while the last buckets are under way
        transfer.finish(None if self._windows is None else summary.digests)
        return summary, changed, packed.seconds

    def _buckets(self, nbytes: int) -> tuple[int, int]:
        """Bytes of a bucket at most, and how many may be under way."""
        if self._windows is None:
            return self._scheme.bucket_size, IN_FLIGHT
        return self._windows.size_for(nbytes), windows.IN_FLIGHT

    def _packed(
        self,
        transfer: Transfer,
        inventory: Inventory,
        send: Callable[[Bucket], None],
        deadline: Deadline,
    ) -> Packer | Assembled:
        """Hand all of it out, bucket by bucket, by the GPU if they stay there."""
        digest = self._scheme.verify
        if self._windows is not None:
            return self._windows.assemble(inventory, send, transfer.let_go, digest, deadline)
        packer = Packer(
            inventory,
            self._copier,
            self._device,
            transfer.next_buffer,
            self._scheme.bucket_size,
            digest,
            deadline,
        )
        for bucket in packer.buckets():
            send(bucket)
        return packer

    def _targets(
        self, members: Members, receivers: Sequence[str] | None, deadline: Deadline
    ) -> tuple[list[Member], list[ReceiverReport]]:
        """Whom a version is sent to, and those of ``receivers`` that are not there.

        The first update waits until as many replicas as were announced are there, or one.

        Raises:
            DeadlineError: nobody is there. ReceiverError: all that were there have died.
        """
        wanted = self._scheme.num_replicas or 1
        dead = [report for report in members.reports() if report.state == "dead"]

        def able() -> list[Member]:
            return [
                member
                for member in members.known()
                if member.is_whole
                and not member.failed
                and not member.left
                and (receivers is None or member.id in receivers)
            ]

        def there() -> bool:
            if receivers is not None:
                return len(able()) == len(set(receivers))
            return len(able()) >= (1 if self._met else wanted)

        if self._met and dead and not able():  # nobody is left: said at once, and once
            members.forget(report.receiver for report in dead)
            raise ReceiverError("; ".join(map(str, dead)), tuple(dead))
        patience = deadline
        if self._met and able():
            patience = deadline.at_most(min(self._scheme.peer_timeout, deadline.remaining / 2))
        came = members.wait_for(there, patience)
        targets = able()
        if not targets or not (came or self._met):
            there_are = [r.receiver for r in members.reports() if r.state not in ("dead", "failed")]
            connected = ", ".join(there_are) or "none"
            where = Endpoint(self._scheme.master_address, self._scheme.port)
            raise DeadlineError(
                f"waited {deadline.seconds:.1f} s for "
                f"{len(receivers) if receivers is not None else wanted} receivers to send the "
                f"version to; connected: {connected}; receivers need this address and port: {where}"
            )
        self._met = True
        found = {member.id for member in targets}
        absent = [
            self._absent(members, receiver) for receiver in receivers or () if receiver not in found
        ]
        if receivers is None:  # lost since the last update, which is said once
            absent += [r for r in members.reports() if r.state == "dead"]
        return targets, absent

    @staticmethod
    def _absent(members: Members, receiver: str) -> ReceiverReport:
        member = members.find(receiver)
        if member is None or member.left:
            return ReceiverReport(receiver, "waiting", error="it is not connected")
        return members.report_of(member)

    @staticmethod
    def _failures(
        members: Members, transfer: Transfer, signed_off: bool = True
    ) -> list[ReceiverReport]:
        """
        Args:
            signed_off: also those that have said goodbye meanwhile, which is no failure of theirs.
        """
        found = {receiver: members.find(receiver) for receiver in transfer.lost}
        gone = [m for id, m in found.items() if m is not None and not transfer.lost[id][0]]
        # Its end and its goodbye come by two connections.
        members.wait_for(lambda: all(member.left for member in gone), Deadline(_GOODBYE))
        failures = []
        for receiver, (late, why) in transfer.lost.items():
            member = found[receiver]
            if member is not None and member.left:
                if signed_off:
                    left = replace(member.report, state="waiting", error="it has signed off")
                    failures.append(left)
                continue
            report = member.report if member else ReceiverReport(receiver, "dead")
            state = "waiting" if late else "dead"
            failures.append(replace(report, state=state, error=why))  # type: ignore[arg-type]
        return failures

    # ---------------------------------------------------------------- receivers

    def receivers(self) -> list[ReceiverReport]:
        return self._owned()[0].reports()

    def wait_applied(
        self, version: Version, deadline: Deadline, receivers: Sequence[str] | None = None
    ) -> list[ReceiverReport]:
        return self._owned()[0].wait_applied(version, deadline, receivers)

    # ---------------------------------------------------------------- the end

    def close(self) -> None:
        self._server = self._members = self._rounds = self._windows = None
        self._copier.close()
        if self._end is not None:
            self._end()


def _end(server: Server, members: Members, rounds: Rounds, pid: int) -> None:
    if os.getpid() == pid:
        server.close()
        rounds.close()
        members.close()
