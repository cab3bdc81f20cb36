"""weightsync: moves policy weights from an RL trainer into inference engines.

Importing it imports neither vllm nor ray, and torch only when something is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "DoubleBufferScheme": "weightsync.schemes.double_buffer",
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
    "WeightSource": "weightsync.source",
    "AdapterSource": "weightsync.sources.adapter",
    "VLLMAdapter": "weightsync.engines.vllm_adapter",
    "Publisher": "weightsync.transport",
    "Subscriber": "weightsync.transport",
    "Snapshot": "weightsync.transport",
    "SyncReport": "weightsync.report",
    "ReceiverReport": "weightsync.report",
    "Seconds": "weightsync.report",
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

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'weightsync' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:
    from weightsync.engine import Engine, Update, Verification
    from weightsync.engines.vllm_adapter import VLLMAdapter
    from weightsync.errors import (
        CorruptError,
        DeadlineError,
        EngineDiedError,
        EngineError,
        EngineUnusableError,
        ManifestError,
        MismatchError,
        NoRoomError,
        ProtocolError,
        ReceiverError,
        SchemeError,
        SenderBusyError,
        SourceError,
        VersionError,
        VersionGoneError,
        WeightSyncError,
    )
    from weightsync.manifest import Manifest, ParamSpec
    from weightsync.receiver import Receiver
    from weightsync.report import ReceiverReport, Seconds, SyncReport
    from weightsync.scheme import (
        WeightSyncScheme,
        register_scheme,
        scheme_from_dict,
        scheme_from_url,
    )
    from weightsync.schemes.double_buffer import DoubleBufferScheme
    from weightsync.schemes.disk import DiskScheme
    from weightsync.schemes.fallback import FallbackScheme
    from weightsync.schemes.nccl import NCCLScheme
    from weightsync.sender import Sender
    from weightsync.source import WeightSource
    from weightsync.sources.adapter import AdapterSource
    from weightsync.transport import Publisher, Snapshot, Subscriber
    from weightsync.version import Version
