"""A double buffer whose sender fails as it is told to."""

import os
from dataclasses import dataclass
from typing import ClassVar

import weightsync as ws
from weightsync.scheme import register_scheme
from weightsync.schemes.double_buffer.publisher import DoubleBufferPublisher

FAULTS = {}
"""By the last part of a scheme's path: a function of (publish, version, deadline, receivers) that
publishes, or not, by calling ``publish(receivers)``."""

ASKED = []
"""The last part of the path, for each attempt to publish."""


@register_scheme
@dataclass(frozen=True)
class ToyScheme(ws.DoubleBufferScheme):
    url_scheme: ClassVar[str] = "toy"

    def create_publisher(self):
        return ToyPublisher(self)


class ToyPublisher(DoubleBufferPublisher):
    def __init__(self, scheme):
        super().__init__(scheme)
        self._name = os.path.basename(scheme.path)

    def publish(self, version, weights, deadline, receivers=None, crew=None):
        ASKED.append(self._name)

        def publish(receivers=receivers):
            return DoubleBufferPublisher.publish(self, version, weights, deadline, receivers, crew)

        fault = FAULTS.get(self._name)
        return publish() if fault is None else fault(publish, version, deadline, receivers)


def raising(error):
    def fault(publish, version, deadline, receivers):
        raise error

    return fault


def hanging(publish, version, deadline, receivers):
    deadline.wait(lambda: None)
    raise ws.DeadlineError("nobody answered")
