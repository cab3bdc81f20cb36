"""Listeners that bring updates into monitoring: Prometheus and OpenTelemetry.

Each is subscribed to a sender or a receiver, ``create_sender(model, listeners=[Prometheus()])``,
or later, ``receiver.subscribe(Prometheus())``. Neither package is imported before it is used.
"""

from __future__ import annotations

from weightsync.listeners import Listener as Listener
from weightsync.listeners import Outcome as Outcome
from weightsync.metrics.prometheus import Prometheus as Prometheus
from weightsync.metrics.spans import OpenTelemetry as OpenTelemetry

__all__ = ["Listener", "OpenTelemetry", "Outcome", "Prometheus"]
