"""What a run of broadcasts looks like from outside: what its sender tells a visitor.

A visitor says so when it connects, is told how things stand, and is hung up on. It is no receiver:
nobody waits for it, and no group knows of it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from weightsync.deadline import Deadline
from weightsync.errors import DeadlineError, ProtocolError
from weightsync.inspection import RunStatus
from weightsync.manifest import Manifest
from weightsync.report import ReceiverReport
from weightsync.run.look import sender_words
from weightsync.run.process import self_description
from weightsync.run.records import (
    number,
    reading,
    report_from_json,
    report_to_json,
    seconds,
    text,
)
from weightsync.schemes.nccl.control import Message, Refused, join
from weightsync.schemes.nccl.endpoint import Endpoint
from weightsync.version import Version

if TYPE_CHECKING:
    from weightsync.schemes.nccl import NCCLScheme

HELLO: Message = {"role": "visitor"}
MAX_STATUS = 1 << 26

_SECONDS = 3.0
"""For all of it: a sender answers at once."""

_NO_COPY = "the weights: receivers have them in their own memory"


def newest(version: Version, manifest: Manifest) -> dict[str, Any]:
    """What a sender tells of the version that it has just published."""
    tensors, nbytes = len(manifest.tensors), manifest.payload
    return {"version": version, "time": time.time(), "tensors": tensors, "nbytes": nbytes}


def status_message(published: dict[str, Any] | None, reports: Sequence[ReceiverReport]) -> Message:
    """What a visitor is told.

    Args:
        published: what :func:`newest` made of the last version; None: there is none yet.
    """
    receivers = [_said(report) for report in reports]
    return {"op": "status", "published": published, "receivers": receivers, **self_description()}


def _said(report: ReceiverReport) -> dict[str, Any]:
    """Dead ones apart: no receiver says that of itself, so its record knows no such word."""
    dead = report.state == "dead"
    record = replace(report, state="connected") if dead else report
    return {"dead": dead, "record": report_to_json(record).decode()}


def inspect_sender(scheme: NCCLScheme) -> RunStatus:
    """Visit whoever listens at the scheme's address."""
    where = Endpoint(scheme.master_address, scheme.port)
    path, deadline = str(where), Deadline(_SECONDS)
    try:
        connection, _ = join(where, scheme.token, dict(HELLO), deadline)
    except DeadlineError as error:
        unseen = (f"whether it runs elsewhere: {error}", _NO_COPY)
        return RunStatus("nccl", path, sender_alive=False, unseen=unseen)
    except Refused as error:
        unseen = ("what it has published and to whom: it did not say", _NO_COPY)
        return RunStatus("nccl", path, problems=(str(error),), unseen=unseen)
    except (OSError, EOFError):
        unseen = ("what it has published and to whom: it tells visitors nothing", _NO_COPY)
        return RunStatus("nccl", path, sender_alive=True, unseen=unseen)
    try:
        connection.bound_receive(deadline.remaining)
        return _status(path, connection.receive(MAX_STATUS))
    except (OSError, EOFError, ProtocolError) as error:
        words = f"{where} did not say how it stands: {error}"
        return RunStatus("nccl", path, sender_alive=True, problems=(words,), unseen=(_NO_COPY,))
    finally:
        connection.close()


def _status(path: str, message: Message) -> RunStatus:
    """
    Raises:
        ProtocolError: it is not what a sender says to a visitor.
    """
    with reading(f"what {path} says"):
        status = RunStatus(
            "nccl",
            path,
            sender_alive=True,
            sender=sender_words(message),
            receivers=tuple(map(_receiver, message["receivers"])),
            unseen=(_NO_COPY,),
        )
        published = message["published"]
        if published is None:
            return status
        return replace(
            status,
            version=Version.parse(published["version"]),
            time=seconds(published["time"]),
            tensors=number(published["tensors"]),
            nbytes=number(published["nbytes"]),
        )


def _receiver(fields: Any) -> ReceiverReport:
    report = report_from_json(text(fields["record"]).encode(), "a receiver's report")
    return replace(report, state="dead") if fields["dead"] else report
