"""weightsync: moves policy weights from an RL trainer into inference engines.

Importing it imports neither vllm nor ray, and torch only when something is used.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

logging.getLogger("weightsync").addHandler(logging.NullHandler())  # quiet, unless asked

_PUBLIC = {
    "DoubleBufferScheme": "weightsync.schemes.double_buffer",
    "CUDAIPCScheme": "weightsync.schemes.cuda_ipc",
    "NCCLScheme": "weightsync.schemes.nccl",
    "DiskScheme": "weightsync.schemes.disk",
    "FallbackScheme": "weightsync.schemes.fallback",
    "WeightSyncScheme": "weightsync.scheme",
    "register_scheme": "weightsync.scheme",
    "scheme_from_url": "weightsync.scheme",
    "scheme_from_dict": "weightsync.scheme",
    "Sender": "weightsync.sender",
    "Receiver": "weightsync.receiver",
    "Engine": "weightsync.engine",
    "Update": "weightsync.engine",
    "Verification": "weightsync.engine",
    "Manifest": "weightsync.manifest",
    "ParamSpec": "weightsync.manifest",
    "choose": "weightsync.placement.choose",
    "Choice": "weightsync.placement.choose",
    "Place": "weightsync.placement.place",
    "WeightSource": "weightsync.source",
    "AdapterSource": "weightsync.sources.adapter",
    "VLLMAdapter": "weightsync.engines.vllm.adapter",
    "VLLMServer": "weightsync.engines.vllm.server",
    "Publisher": "weightsync.transport",
    "Subscriber": "weightsync.transport",
    "Snapshot": "weightsync.transport",
    "SyncReport": "weightsync.report",
    "ReceiverReport": "weightsync.report",
    "EngineReport": "weightsync.report",
    "Replicas": "weightsync.replicas",
    "Seconds": "weightsync.report",
    "Listener": "weightsync.listeners",
    "Outcome": "weightsync.listeners",
    "subscribe": "weightsync.listeners",
    "unsubscribe": "weightsync.listeners",
    "Version": "weightsync.version",
    "WeightSyncError": "weightsync.errors",
    "SchemeError": "weightsync.errors",
    "SourceError": "weightsync.errors",
    "ManifestError": "weightsync.errors",
    "ProtocolError": "weightsync.errors",
    "MismatchError": "weightsync.errors",
    "VersionError": "weightsync.errors",
    "VersionGoneError": "weightsync.errors",
    "CorruptError": "weightsync.errors",
    "DeadlineError": "weightsync.errors",
    "SenderBusyError": "weightsync.errors",
    "NoRoomError": "weightsync.errors",
    "EngineError": "weightsync.errors",
    "EngineDiedError": "weightsync.errors",
    "EngineUnusableError": "weightsync.errors",
    "ReceiverError": "weightsync.errors",
}

__all__ = ["__version__", "metrics", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name == "metrics":
        return importlib.import_module("weightsync.metrics")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'weightsync' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:
    from weightsync import metrics as metrics
    from weightsync.engine import Engine as Engine
    from weightsync.engine import Update as Update
    from weightsync.engine import Verification as Verification
    from weightsync.engines.vllm.adapter import VLLMAdapter as VLLMAdapter
    from weightsync.engines.vllm.server import VLLMServer as VLLMServer
    from weightsync.errors import CorruptError as CorruptError
    from weightsync.errors import DeadlineError as DeadlineError
    from weightsync.errors import EngineDiedError as EngineDiedError
    from weightsync.errors import EngineError as EngineError
    from weightsync.errors import EngineUnusableError as EngineUnusableError
    from weightsync.errors import ManifestError as ManifestError
    from weightsync.errors import MismatchError as MismatchError
    from weightsync.errors import NoRoomError as NoRoomError
    from weightsync.errors import ProtocolError as ProtocolError
    from weightsync.errors import ReceiverError as ReceiverError
    from weightsync.errors import SchemeError as SchemeError
    from weightsync.errors import SenderBusyError as SenderBusyError
    from weightsync.errors import SourceError as SourceError
    from weightsync.errors import VersionError as VersionError
    from weightsync.errors import VersionGoneError as VersionGoneError
    from weightsync.errors import WeightSyncError as WeightSyncError
    from weightsync.listeners import Listener as Listener
    from weightsync.listeners import Outcome as Outcome
    from weightsync.listeners import subscribe as subscribe
    from weightsync.listeners import unsubscribe as unsubscribe
    from weightsync.manifest import Manifest as Manifest
    from weightsync.manifest import ParamSpec as ParamSpec
    from weightsync.placement.choose import Choice as Choice
    from weightsync.placement.choose import choose as choose
    from weightsync.placement.place import Place as Place
    from weightsync.receiver import Receiver as Receiver
    from weightsync.replicas import Replicas as Replicas
    from weightsync.report import EngineReport as EngineReport
    from weightsync.report import ReceiverReport as ReceiverReport
    from weightsync.report import Seconds as Seconds
    from weightsync.report import SyncReport as SyncReport
    from weightsync.scheme import WeightSyncScheme as WeightSyncScheme
    from weightsync.scheme import register_scheme as register_scheme
    from weightsync.scheme import scheme_from_dict as scheme_from_dict
    from weightsync.scheme import scheme_from_url as scheme_from_url
    from weightsync.schemes.cuda_ipc import CUDAIPCScheme as CUDAIPCScheme
    from weightsync.schemes.disk import DiskScheme as DiskScheme
    from weightsync.schemes.double_buffer import DoubleBufferScheme as DoubleBufferScheme
    from weightsync.schemes.fallback import FallbackScheme as FallbackScheme
    from weightsync.schemes.nccl import NCCLScheme as NCCLScheme
    from weightsync.sender import Sender as Sender
    from weightsync.source import WeightSource as WeightSource
    from weightsync.sources.adapter import AdapterSource as AdapterSource
    from weightsync.transport import Publisher as Publisher
    from weightsync.transport import Snapshot as Snapshot
    from weightsync.transport import Subscriber as Subscriber
    from weightsync.version import Version as Version
