"""OpenTelemetry: one span for each update, with one for each of its phases."""

from __future__ import annotations

import importlib
from typing import Any

import weightsync
from weightsync.listeners import Outcome


class OpenTelemetry:
    """A listener that makes spans; it does nothing where ``opentelemetry-api`` is not installed.

    ``weightsync send`` has the children ``extract`` and ``transfer``, ``weightsync apply`` of a
    receiver ``stage`` and ``pause``. They stand below the span in which the update was called.
    Attributes: ``weightsync.version``, ``.scheme``, ``.run``, ``.bytes``, ``.tensors``,
    ``.receiver``, ``.skipped``. An error is recorded in the span of its update.

    Where extraction and transfer take turns, as they mostly do, their spans say how long each took
    in all, one after the other.

    Args:
        tracer_provider: None for the global one.
    """

    def __init__(self, tracer_provider: Any = None) -> None:
        self._trace = _api()
        if self._trace is not None:
            version = weightsync.__version__
            self._tracer = self._trace.get_tracer("weightsync", version, tracer_provider)

    def __call__(self, outcome: Outcome) -> None:
        if self._trace is None:
            return
        trace, seconds = self._trace, outcome.seconds
        sends = outcome.side == "sender"
        began = outcome.time - seconds.total
        span = self._tracer.start_span(
            "weightsync send" if sends else "weightsync apply",
            kind=trace.SpanKind.PRODUCER if sends else trace.SpanKind.CONSUMER,
            attributes=_attributes(outcome),
            start_time=_nanoseconds(began),
        )
        inside = trace.set_span_in_context(span)
        phases = (
            {"extract": seconds.extract, "transfer": seconds.transfer}
            if sends
            else {"stage": seconds.apply - seconds.pause, "pause": seconds.pause}
        )
        for phase, taken in phases.items():
            if taken > 0:
                ended = min(began + taken, outcome.time)
                child = self._tracer.start_span(phase, inside, start_time=_nanoseconds(began))
                child.end(_nanoseconds(ended))
                began = ended
        if outcome.error is not None:
            span.record_exception(outcome.error, timestamp=_nanoseconds(outcome.time))
            words = f"{type(outcome.error).__name__}: {outcome.error}"
            span.set_status(trace.Status(trace.StatusCode.ERROR, words))
        span.end(_nanoseconds(outcome.time))


def _attributes(outcome: Outcome) -> dict[str, str | int | bool]:
    known: dict[str, str | int | bool] = {"scheme": outcome.scheme, "run": outcome.run}
    if outcome.version is not None:
        known["version"] = str(outcome.version)
    if outcome.receiver:
        known["receiver"] = outcome.receiver
    if outcome.report is not None:
        known["bytes"] = outcome.report.nbytes
        known["tensors"] = outcome.report.tensors
        known["skipped"] = outcome.report.skipped
    return {f"weightsync.{name}": value for name, value in known.items()}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _api() -> Any:
    try:
        return importlib.import_module("opentelemetry.trace")
    except ImportError:
        return None
