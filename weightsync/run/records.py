"""What stands in every run's directory, whatever the scheme: names of files, and small records.

Nothing that another process wrote is believed before it was checked.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from weightsync.errors import ProtocolError, SchemeError, WeightSyncError
from weightsync.report import EngineReport, ReceiverReport, Seconds
from weightsync.version import Version

SENDER_LOCK = "sender.lock"
RECEIVERS = "receivers"

MAX_RECORD = 1 << 20

MAX_WORDS = 3000
"""Characters of a receiver's error, and of those of its engines together: a record is a message."""

_ID = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
_RECEIVER_ID = re.compile(rf"{_ID}\Z", re.ASCII)
_RECEIVER_FILE = re.compile(
    rf"({_ID})\.(?:json|left|lock)\Z|\.({_ID})\.json\.\d+\.\d+\.tmp\Z", re.ASCII
)
_TEMPORARY = re.compile(r"\..*\.\d+\.\d+\.tmp\Z", re.ASCII | re.DOTALL)

_STATES = ("connected", "applied", "rolled back", "unusable", "failed")
_ENGINE_STATES = (*_STATES, "dead")


def is_receiver_id(text: str) -> bool:
    """Ids become file names, so only letters, digits, '.', '_' and '-'."""
    return bool(_RECEIVER_ID.match(text))


def require_receiver_id(receiver: str | None) -> None:
    """
    Raises:
        SchemeError: no receiver can be called so.
    """
    if receiver is not None and not is_receiver_id(receiver):
        raise SchemeError(
            "a receiver's id has up to 100 letters, digits, '.', '_' and '-', not "
            f"{receiver!r:.120}"
        )


def addressees(receivers: Sequence[str] | None) -> tuple[str, ...] | None:
    """The receivers that a version is meant for, as a commit has them; None for everybody.

    Raises:
        WeightSyncError: one of them is no id.
    """
    for receiver in receivers or ():
        if not is_receiver_id(receiver):
            raise WeightSyncError(f"not a receiver's id: {receiver!r:.80}")
    return None if receivers is None else tuple(receivers)


def read_addressees(value: Any) -> tuple[str, ...] | None:
    """The reverse of :func:`addressees`, inside :func:`reading`."""
    if value is not None and not isinstance(value, list):
        raise TypeError(f"a list was expected, not {value!r:.80}")
    return None if value is None else tuple(text(name) for name in value)


def commit_to_json(
    version: Version, receivers: tuple[str, ...] | None, **fields: str | int | float
) -> bytes:
    """What every scheme's commit says, and what only this scheme's does."""
    addressed = None if receivers is None else list(receivers)
    head = {"epoch": version.epoch, "number": version.number}
    return json.dumps({**head, **fields, "receivers": addressed}).encode()


def read_version(fields: Any) -> Version:
    """Of a commit, inside :func:`reading`."""
    return Version.parse([fields["epoch"], fields["number"]])


def receiver_of(name: str) -> str | None:
    """Whose record, lock or half-written record a file is; None if it is none of these."""
    match = _RECEIVER_FILE.match(name)
    return (match[1] or match[2]) if match else None


def is_temporary(name: str) -> bool:
    """Whether a file is what :meth:`~weightsync.files.Directory.replace` writes first."""
    return bool(_TEMPORARY.match(name))


def report_to_json(report: ReceiverReport) -> bytes:
    return json.dumps(
        {
            "id": report.receiver,
            "host": report.host,
            "pid": report.pid,
            "state": report.state,
            "version": report.version,
            "attempted": report.attempted,
            "error": _cut(report.error, MAX_WORDS),
            "apply": report.seconds.apply,
            "pause": report.seconds.pause,
            "engines": [
                _engine_to_json(engine, MAX_WORDS // len(report.engines))
                for engine in report.engines
            ],
            "time": time.time(),
        }
    ).encode()


def _cut(words: str | None, length: int) -> str | None:
    return None if words is None else words[:length]


def _engine_to_json(report: EngineReport, words: int) -> dict[str, Any]:
    return {
        "name": report.engine,
        "state": report.state,
        "version": report.version,
        "attempted": report.attempted,
        "error": _cut(report.error, words),
        "apply": report.seconds.apply,
        "pause": report.seconds.pause,
    }


def report_from_json(data: bytes, what: str) -> ReceiverReport:
    """
    Raises:
        ProtocolError: it is not a receiver's record; says which file and why.
    """
    with reading(what):
        fields = json.loads(data)
        error = fields["error"]
        if fields["state"] not in _STATES:
            raise ValueError(f"no such state: {fields['state']!r:.80}")
        return ReceiverReport(
            text(fields["id"]),
            fields["state"],
            _version(fields["version"]),
            _version(fields["attempted"]),
            None if error is None else text(error),
            text(fields["host"]),
            number(fields["pid"]),
            _taken(fields),
            # Not in the records of releases that knew one engine only.
            tuple(_engine_from_json(engine) for engine in fields.get("engines", ())),
        )


def _engine_from_json(fields: Any) -> EngineReport:
    error = fields["error"]
    if fields["state"] not in _ENGINE_STATES:
        raise ValueError(f"no such state: {fields['state']!r:.80}")
    return EngineReport(
        text(fields["name"]),
        fields["state"],
        _version(fields["version"]),
        _version(fields["attempted"]),
        None if error is None else text(error),
        _taken(fields),
    )


def _taken(fields: Any) -> Seconds:
    apply = seconds(fields["apply"])
    return Seconds(apply=apply, pause=seconds(fields["pause"]), total=apply)


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turns whatever goes wrong with foreign JSON into one error that names the file."""
    try:
        yield
    except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
        kind = type(error).__name__
        raise ProtocolError(f"{what} is malformed: {kind}: {error!s:.200}") from None


def _version(value: Any) -> Version | None:
    return None if value is None else Version.parse(value)


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a text was expected, not {value!r:.80}")
    return value


def number(value: Any) -> int:
    # bool is an int to Python, and true is no number.
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise TypeError(f"a number was expected, not {value!r:.80}")
    return value


def seconds(value: Any) -> float:
    found = float(value)
    if not math.isfinite(found):  # JSON has no such number, but Python reads it
        raise ValueError(f"seconds were expected, not {value!r:.80}")
    return found
