"""What vLLM calls the versions of an adapter: each its own name, or all of them one.

vLLM tells adapters apart by a number in their cache, by name and path in the cache of prefixes,
by name in that of encoders and where it collects those of one step. And a request carries all
three, from its start to its end.
"""

from __future__ import annotations

import itertools
import secrets
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from weightsync.deadline import Deadline
from weightsync.engines.vllm.adapter_calls import AdapterCalls, Written
from weightsync.engines.vllm.adapter_files import Link
from weightsync.engines.vllm.client import GRACE, Mode, VLLMClient
from weightsync.engines.vllm.pause import Pause
from weightsync.errors import EngineError
from weightsync.version import Version

# vLLM's server counts its own from 1, and users choose small ones; other processes may drive
# adapters of the same engine.
_numbers = itertools.count((1 << 20) + (secrets.randbelow(1 << 18) << 12))


@dataclass(frozen=True)
class Named:
    """How requests ask vLLM for an adapter."""

    name: str
    number: int
    path: str
    stacked: bool

    def request(self) -> Any:
        """As a ``LoRARequest`` of vLLM's."""
        from vllm.lora.request import LoRARequest

        request = LoRARequest(self.name, self.number, self.path)
        if hasattr(request, "is_3d_lora_weight"):
            request.is_3d_lora_weight = self.stacked
        return request


class Names(ABC):
    """Loads versions, and keeps what requests may still ask for."""

    named: Named | None = None
    """How to ask for the version that is held; None if there is none."""

    @abstractmethod
    def kept(self, version: Version) -> Written | None:
        """The files of a version, if they are still there."""

    def pause(self, deadline: Deadline) -> None:
        """Let no request make progress, if an update needs it."""

    @abstractmethod
    def load(self, written: Written, deadline: Deadline) -> None:
        """Have vLLM load a version. If it fails, the former one can still be asked for."""

    def flush(self, deadline: Deadline) -> None:
        """Drop what was computed with another version under the same name."""

    @abstractmethod
    def settle(self, version: Version | None) -> None:
        """This one is held now: forget those that nobody can ask for any more."""

    def resume(self) -> None:
        """Let requests go on."""

    @abstractmethod
    def unload(self) -> None:
        """Have vLLM forget all of them.

        Raises:
            EngineError: requests use it.
        """


@dataclass(frozen=True)
class _Loaded:
    written: Written
    named: Named


class EachVersion(Names):
    """A number, a name and a path for each: ``policy@1:40#1048577``.

    So nothing has to be flushed or paused, and a request ends with the version it was started
    with. The version before the current one is kept, too: a request with it may be on its way.
    """

    def __init__(self, client: VLLMClient, calls: AdapterCalls, name: str) -> None:
        self._client = client
        self._calls = calls
        self._name = name
        self._loaded: list[_Loaded] = []  # in the order in which vLLM was told of them
        self._current: _Loaded | None = None

    def kept(self, version: Version) -> Written | None:
        found = self._find(version)
        return found.written if found else None

    def load(self, written: Written, deadline: Deadline) -> None:
        known = next((each.named for each in self._loaded if each.written is written), None)
        named = known or self._new(written)
        self._calls.load(written, named.number, named.name, deadline)
        if known is None:  # else rolled back to, or lost in deep sleep
            self._loaded.append(_Loaded(written, named))

    def _new(self, written: Written) -> Named:
        number = next(_numbers)
        name = f"{self._name}@{written.version}#{number}"
        return Named(name, number, written.folder.path, written.stacked)

    def settle(self, version: Version | None) -> None:
        former, self._current = self._current, self._find(version)
        self.named = self._current.named if self._current else None
        kept = [self._current, former] if self._current else []
        used = self._client.adapters_in_use(Deadline(GRACE)) or set()
        for each in list(self._loaded):
            if each not in kept and each.named.name not in used:
                self._calls.drop(each.named.number, Deadline(GRACE), check=False)
                self._loaded.remove(each)
                each.written.folder.remove()

    def unload(self) -> None:
        self.settle(None)

    def _find(self, version: Version | None) -> _Loaded | None:
        return next((e for e in reversed(self._loaded) if e.written.version == version), None)


class OneName(Names):
    """One number, one name and one path for all, which requests can be given once and for ever.

    So an update pauses the engine and flushes its caches, as one of the base does, and requests
    that run are kept, waited for or aborted as there.

    vLLM has a way of its own to load an adapter in place (``load_inplace``). It is not used: what
    was loaded so is read from its files again at every step, and a request that runs brings the
    files it was started with back for all (seen in vLLM 0.32's sources). Here the path stays, and
    leads to other files.
    """

    def __init__(
        self,
        client: VLLMClient,
        calls: AdapterCalls,
        name: str,
        mode: Mode,
        directory: str | None,
    ) -> None:
        self._client = client
        self._calls = calls
        self._name = name
        self._directory = directory
        self._pause = Pause(client, mode)
        self._link: Link | None = None
        self._number: int | None = None
        self._written: list[Written] = []

    def kept(self, version: Version) -> Written | None:
        return next((each for each in self._written if each.version == version), None)

    def pause(self, deadline: Deadline) -> None:
        self._pause.begin(deadline)

    def load(self, written: Written, deadline: Deadline) -> None:
        if self._link is None:
            stays = not self._client.ends_with_us
            self._link = Link(self._client.target, self._directory, stays)
        if self._number is None:
            self._introduce(written, self._link, deadline)
        else:
            self._calls.load(written, self._number, self._name, deadline, (self._link.directory,))
            self._link.lead_to(written.folder)
        if written not in self._written:
            self._written.append(written)

    def _introduce(self, written: Written, link: Link, deadline: Deadline) -> None:
        """Load the first one."""
        number = next(_numbers)
        held = (link.directory,)
        self._calls.load(written, number, self._name, deadline, held)
        link.lead_to(written.folder)
        if self._client.serves_adapters:
            # It fits, on every worker: now it cannot fail in vLLM's own RPC, which would leave
            # replies behind. The server chooses the number and does not tell it.
            self._calls.drop(number, deadline)
            before = self._calls.loaded(deadline)
            self._client.serve_adapter(self._name, link.path, written.stacked, deadline)
            new = self._calls.loaded(deadline) - before
            if len(new) != 1:
                self._client.unserve_adapter(self._name, deadline)
                raise EngineError(
                    f"the {self._client.name} loaded another adapter at the same time: try again"
                )
            (number,) = new
            self._calls.load(written, number, self._name, deadline, held)
        self._number = number

    def flush(self, deadline: Deadline) -> None:
        self._client.flush(deadline)

    def settle(self, version: Version | None) -> None:
        self.named = None
        current = self.kept(version) if version else None
        if current is None or self._number is None or self._link is None:
            return  # what was loaded last stays for requests that carry its path
        self.named = Named(self._name, self._number, self._link.path, current.stacked)
        for each in self._written:
            if each is not current:
                each.folder.remove()
        self._written = [current]

    def resume(self) -> None:
        self._pause.end()

    def unload(self) -> None:
        self.named = None
        if self._link is None or self._number is None:
            return
        deadline = Deadline(60.0)
        used = self._client.adapters_in_use(deadline)
        if used is not None and self._name in used:
            raise EngineError(f"requests still use adapter {self._name!r}")
        if self._client.serves_adapters:
            self._client.unserve_adapter(self._name, deadline)
        pause = Pause(self._client, "wait") if used is None else None
        try:
            if pause is not None:
                pause.begin(deadline)
            self._calls.drop(self._number, deadline)
        finally:
            if pause is not None:
                pause.end()
        for each in self._written:
            each.folder.remove()
        self._link.remove()
        self._written, self._link, self._number = [], None, None
