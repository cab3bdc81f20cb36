"""Prometheus: what updates did is counted; where receivers stand is looked at when it is asked."""

from __future__ import annotations

import importlib
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, get_args

from weightsync.listeners import Outcome
from weightsync.report import State
from weightsync.scheme_end import SchemeEnd
from weightsync.sender import Sender
from weightsync.version import Version
from weightsync.words import one_line

log = logging.getLogger("weightsync")

_LABELS = ("side", "run", "scheme", "receiver")
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
"""Seconds: from a few megabytes in shared memory to a large model over a network."""

_GONE = ("dead", "failed")


class Prometheus:
    """A listener that keeps metrics in a registry of ``prometheus_client``.

    One for each registry: to subscribe another one of the same registry changes nothing. The labels
    are ``side``, ``run`` (the scheme's URL without options), ``scheme`` and ``receiver`` (empty:
    the sender itself). Gauges are of ends that are connected: from its first update on a sender
    shows each receiver that lives, and a receiver itself.

    Args:
        registry: None for the one that ``start_http_server`` shows.

    Raises:
        ImportError: ``prometheus-client`` is not installed; says what to do.
        ValueError: other metrics in the registry have these names.
    """

    def __init__(self, registry: Any = None) -> None:
        client = _client()
        registry = client.REGISTRY if registry is None else registry
        with _making:
            if registry not in _known:
                _known[registry] = _Series(client, registry)
            self._series = _known[registry]

    def __call__(self, outcome: Outcome) -> None:
        self._series.count(outcome)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Prometheus) and other._series is self._series

    def __hash__(self) -> int:
        return hash(self._series)


class _Series:
    """The metrics in one registry, which asks it for its gauges as a collector."""

    def __init__(self, client: Any, registry: Any) -> None:
        self._client = client
        self._ends: weakref.WeakSet[SchemeEnd] = weakref.WeakSet()
        self._changing = threading.Lock()

        def counter(name: str, words: str, *labels: str) -> Any:
            return client.Counter(
                f"weightsync_{name}", words, (*_LABELS, *labels), registry=registry
            )

        self._updates = counter("updates", "Versions that were published, or applied.")
        self._bytes = counter("bytes", "Bytes of these versions.")
        self._skipped = counter("skipped", "Versions not published, as no buffer was free.")
        self._fallbacks = counter(
            "fallbacks", "Versions by another than the first scheme.", "through"
        )
        self._failures = counter("failures", "Updates that raised an error.", "error")
        self._seconds = client.Histogram(
            "weightsync_phase_seconds",
            "Seconds of each phase of an update: extract, transfer, apply, pause, total.",
            (*_LABELS, "phase"),
            buckets=_BUCKETS,
            registry=registry,
        )
        registry.register(self)

    def count(self, outcome: Outcome) -> None:
        with self._changing:
            self._ends.add(outcome.end)
        labels, report = _labels(outcome.end), outcome.report
        if outcome.error is not None:
            self._failures.labels(*labels, type(outcome.error).__name__).inc()
        if report is not None and report.skipped:
            self._skipped.labels(*labels).inc()
        elif report is not None:
            self._updates.labels(*labels).inc()
            self._bytes.labels(*labels).inc(report.nbytes)
            if report.fell_back:
                through = report.scheme.partition(":")[2]
                self._fallbacks.labels(*labels, through).inc()
            for phase, taken in asdict(report.seconds).items():
                if taken:  # or it did not take place here
                    self._seconds.labels(*labels, phase).observe(taken)

    # ---------------------------------------------------------------- gauges

    def describe(self) -> list[Any]:
        return list(self._families())

    def _families(self) -> tuple[Any, Any, Any, Any]:
        gauge, receivers = self._client.metrics_core.GaugeMetricFamily, ("run", "scheme", "state")
        return (
            gauge("weightsync_version", "Number of the version held.", labels=_LABELS),
            gauge("weightsync_epoch", "Epoch of the version held.", labels=_LABELS),
            gauge("weightsync_lag", "Versions that a receiver is behind.", labels=_LABELS),
            gauge("weightsync_receivers", "Receivers that a sender knows.", labels=receivers),
        )

    def collect(self) -> Iterator[Any]:
        """Called by the registry, in a thread of its own."""
        numbers, epochs, lags, receivers = families = self._families()
        with self._changing:
            ends = list(self._ends)
        held: dict[tuple[str, ...], Version] = {}
        for end in ends:
            try:
                if not end.connected:
                    continue
                if end.version is not None:
                    held[_labels(end)] = end.version
                if not isinstance(end, Sender):
                    continue
                reports = end.receivers()
            except Exception as error:  # it is ending, or cannot look just now
                log.debug("%s: not to be seen: %s", end.scheme.where(), one_line(error))
                continue
            states = Counter(report.state for report in reports)
            for state in get_args(State):
                receivers.add_metric((*_labels(end)[1:3], state), states[state])
            for report in reports:
                if report.version is None or report.state in _GONE:
                    continue
                theirs = _labels(end, report.receiver)
                held[theirs] = report.version
                lags.add_metric(theirs, end.lag(report.version))
        for labels, version in held.items():
            numbers.add_metric(labels, version.number)
            epochs.add_metric(labels, version.epoch)
        yield from families


_known: weakref.WeakKeyDictionary[Any, _Series] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def _labels(end: SchemeEnd, receiver: str | None = None) -> tuple[str, str, str, str]:
    seen = end.id if receiver is None else receiver
    return end.side, end.scheme.where(), end.scheme.url_scheme, seen


def _client() -> Any:
    try:
        return importlib.import_module("prometheus_client")
    except ImportError as error:
        words = (
            f"Prometheus() needs prometheus-client: pip install 'weightsync[prometheus]' ({error})"
        )
        raise ImportError(words) from None
