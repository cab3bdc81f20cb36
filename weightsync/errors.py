"""Every error the library raises on purpose. All of them are ``WeightSyncError``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightsync.report import ReceiverReport, SyncReport


class WeightSyncError(RuntimeError):
    """Base of all errors raised by weightsync."""


class SchemeError(WeightSyncError, ValueError):
    """A scheme's URL, dict form or options are wrong."""


class SourceError(WeightSyncError, ValueError):
    """A tensor cannot be sent (meta, sharded, packed, unknown dtype, ...); names it."""


class ManifestError(WeightSyncError, ValueError):
    """A manifest is malformed: what it claims about its tensors cannot be true."""


class ProtocolError(WeightSyncError):
    """Something that another process wrote (a head, a slot record) is malformed."""


class MismatchError(WeightSyncError, ValueError):
    """The tensors sent and the tensors the engine has do not fit together.

    Attributes:
        missing: names the engine has and the sender did not send.
        unexpected: names the sender sent and the engine does not have.
        different: ``name -> (what was sent, what the engine has)`` where shape or dtype differ.
    """

    def __init__(
        self,
        message: str,
        *,
        missing: tuple[str, ...] = (),
        unexpected: tuple[str, ...] = (),
        different: dict[str, tuple[str, str]] | None = None,
    ) -> None:
        super().__init__(message)
        self.missing = missing
        self.unexpected = unexpected
        self.different = different or {}


class VersionError(WeightSyncError, ValueError):
    """A version number is not newer than the last one, or names other weights than before."""


class VersionGoneError(WeightSyncError):
    """The version asked for is no longer held by the transport; a newer one may be."""


class CorruptError(WeightSyncError):
    """The bytes of a version do not match their digest; names the tensors concerned."""


class DeadlineError(WeightSyncError, TimeoutError):
    """A wait ran into its deadline; says what was waited for and who is late."""


class SenderBusyError(WeightSyncError):
    """Another live sender owns the run."""


class NoRoomError(WeightSyncError, OSError):
    """The file system has too little room for the buffers; nothing was written."""


class EngineError(WeightSyncError):
    """The inference engine refused, failed or is not set up for weight transfer."""


class EngineDiedError(EngineError):
    """The engine's process is gone: it holds nothing any more, and takes no update."""


class EngineUnusableError(EngineError):
    """The engine holds no whole known version until the next full update succeeds."""


class ReceiverError(WeightSyncError):
    """One or more receivers did not apply a version; the others went on.

    Attributes:
        failures: one report for each receiver that failed or died, with its own words.
        report: the update's report, all receivers included; ``None`` while connecting, and for a
            version that reached nobody.
    """

    def __init__(
        self,
        message: str,
        failures: tuple[ReceiverReport, ...] = (),
        report: SyncReport | None = None,
    ) -> None:
        super().__init__(message)
        self.failures = failures
        self.report = report
