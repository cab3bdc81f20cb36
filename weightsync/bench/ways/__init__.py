"""The ways that are compared: bounds, this library's schemes, and others' transports.

Each file is one way, or a family of ways that differ in a parameter. What a way imports beyond
torch it imports in the process of its end.
"""

from __future__ import annotations

from collections.abc import Mapping

from weightsync.bench.way import Way
from weightsync.bench.ways.files import SafetensorsFile, TorchFile
from weightsync.bench.ways.gloo import GlooBroadcast
from weightsync.bench.ways.memmap import MemoryMapped
from weightsync.bench.ways.plain import PlainCopy, PlainFile, PlainSocket
from weightsync.bench.ways.queue import Queue
from weightsync.bench.ways.ray import RayObjects
from weightsync.bench.ways.scheme import OURS
from weightsync.bench.ways.torchrl import TorchRLDoubleBuffer, TorchRLShared

_ALL: tuple[Way, ...] = (
    PlainCopy(),
    PlainFile(),
    PlainSocket(),
    *OURS.values(),
    TorchRLDoubleBuffer(),
    TorchRLShared(),
    MemoryMapped(),
    SafetensorsFile("shm"),
    SafetensorsFile("disk"),
    TorchFile("shm"),
    TorchFile("disk"),
    RayObjects(),
    Queue(),
    GlooBroadcast(),
)

WAYS: Mapping[str, Way] = {way.name: way for way in _ALL}
"""Every way by its name, bounds first."""
