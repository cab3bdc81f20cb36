"""A LoRA adapter of a vLLM engine as an engine: only the adapter changes, the base stays.

Every version is written into files (``adapter_files``), which the engine's workers load when they
are asked (``adapter_calls``); ``adapter_names`` is what requests call it.
"""

from __future__ import annotations

from typing import Any

import torch

from weightsync.deadline import Deadline
from weightsync.engine import Engine, Fit, Update
from weightsync.engines.vllm.adapter_calls import AdapterCalls, Written
from weightsync.engines.vllm.adapter_files import Folder, remove_leftovers
from weightsync.engines.vllm.adapter_names import EachVersion, Names, OneName
from weightsync.engines.vllm.client import Mode
from weightsync.errors import EngineError, EngineUnusableError, MismatchError
from weightsync.manifest import Manifest
from weightsync.options import require_truth
from weightsync.sources.adapter import CONFIG_NAME
from weightsync.version import Version


class VLLMAdapter(Engine):
    """One LoRA adapter of a vLLM engine made with ``enable_lora=True`` and our backend.

    Takes what an :class:`~weightsync.sources.adapter.AdapterSource` sends. Several of them may
    share one engine, each with a receiver and a name of its own.

    Args:
        target: the engine, in any form that a receiver takes. Calls of an ``LLM`` must come from
            one thread at a time: put them inside ``with receiver.hold():`` if the receiver
            follows in the background.
        name: what vLLM calls the adapter. On a server it is what requests ask for
            (``model="policy"``).
        one_name: whether all versions are called ``name``. If not, each has a name of its own
            (``policy@1:40#1048577``) in :attr:`lora_request`, nothing is paused or flushed, and a
            request ends with the version it was started with. If so, an update is like one of the
            base: the engine is paused, its caches are flushed. None: one name where the form asks
            for it, which a server and a Ray actor do.
        mode: with one name, what becomes of requests that run: ``"keep"`` lets them go on with
            the new version (their cache is computed anew), ``"wait"`` lets them end first,
            ``"abort"`` ends them.
        directory: where the files are written, if not in memory of this host: all workers need to
            see it, under this path. Adapters of dead processes in it are removed.
        **form: of the engine's form: an ``AsyncLLM``'s ``loop``, a Ray actor's ``attribute``.
    """

    def __init__(
        self,
        target: Any,
        name: str = "policy",
        *,
        one_name: bool | None = None,
        mode: Mode = "keep",
        directory: str | None = None,
        **form: Any,
    ) -> None:
        from weightsync.engines.vllm import make_client

        if mode not in ("keep", "wait", "abort"):
            raise EngineError(f"mode={mode!r}: 'keep', 'wait' or 'abort'")
        if one_name is not None:
            require_truth(one_name=one_name)
        self._client = make_client(target, **form)
        self._name = name
        self._mode = mode
        self._directory = directory
        self._calls = AdapterCalls(self._client, name)
        self._names = self._chosen(one_name)
        self._staged: Written | None = None
        self._deep: int | None = None

    def _chosen(self, one_name: bool | None) -> Names:
        if one_name is False and self._client.asks_for_one_name:
            raise EngineError(f"an adapter of a {self._client.name} has one name")
        if one_name or self._client.asks_for_one_name:
            return OneName(self._client, self._calls, self._name, self._mode, self._directory)
        return EachVersion(self._client, self._calls, self._name)

    @property
    def target(self) -> Any:
        return self._client.target

    @property
    def name(self) -> str:
        return self._name

    @property
    def lora_request(self) -> Any:
        """What to pass to ``llm.generate``: with one name always the same.

        Otherwise another one after every update: get it anew for every call. A request that is
        unfinished when an update comes keeps the version it was started with; starting one with
        the object of a version before the last one ends vLLM's engine process.

        Raises:
            EngineUnusableError: no version was loaded yet, or the last update left none.
            EngineError: requests to a server name the adapter instead.
        """
        if self._client.serves_adapters:
            raise EngineError(f"requests to a server name the adapter: model={self.name!r}")
        if self._names.named is None:
            raise EngineUnusableError(f"adapter {self.name!r} holds no version")
        return self._names.named.request()

    # ---------------------------------------------------------------- Engine

    def require_thread(self) -> None:
        self._client.require_thread()

    def connect(self, url: str, deadline: Deadline) -> None:
        facts = self._client.facts(deadline)
        if not facts.lora:
            raise EngineError(
                f"the {self._client.name} was made without LoRA: make it with enable_lora=True, "
                "max_lora_rank=..."
            )
        self._client.require_backend(facts)
        if self._mode != "keep":
            self._client.require_progress(facts)
        remove_leftovers(self._directory)

    def check(self, manifest: Manifest) -> Fit:
        spec = manifest.by_name.get(CONFIG_NAME)
        if spec is None or spec.dtype != torch.uint8:
            raise MismatchError(
                f"what was sent is no adapter, as it has no {CONFIG_NAME}: send an "
                "AdapterSource(model)",
                missing=(CONFIG_NAME,),
            )
        return Fit()

    def stage(self, update: Update, deadline: Deadline) -> None:
        self.unstage()
        update.snapshot.verify()
        # Asleep, the memory that adapters are copied to is not there.
        if self._calls.asleep(deadline):
            raise EngineError("the engine is asleep: an adapter can be loaded after wake_up()")
        self._staged = self._written(update)
        self._calls.look(self._staged, deadline)

    def unstage(self) -> None:
        staged, self._staged = self._staged, None
        if staged is not None:
            staged.folder.remove()

    def pause(self, deadline: Deadline) -> None:
        self._names.pause(deadline)

    def apply(self, update: Update, deadline: Deadline) -> None:
        written, self._staged = self._staged, None
        if written is None:
            written = self._names.kept(update.version) or self._written(update)
        deep = self._client.deep_sleeps()
        try:
            self._names.load(written, deadline)
            self._deep = deep
        except BaseException:
            if self._names.kept(update.version) is not written:
                written.folder.remove()
            raise

    def flush(self, deadline: Deadline) -> None:
        self._names.flush(deadline)

    def label(self, version: Version | None) -> None:
        self._names.settle(version)

    def resume(self) -> None:
        self._names.resume()

    def lost_weights(self) -> bool:
        # Deep sleep gives the memory away that adapters are copied to. Of a server nobody here
        # knows; there an update of the base, which it needs as well, has adapters read again.
        return self._names.named is not None and self._client.deep_sleeps() != self._deep

    def close(self) -> None:
        # The engine goes on, and so does the version it holds: its files stay with it.
        self.unstage()
        self._client.close()

    def unload(self) -> None:
        """Have vLLM forget the adapter, once no request uses it. A later update loads it again.

        Raises:
            EngineError: requests use it, and are not waited for in this form.
        """
        self._names.unload()

    # ---------------------------------------------------------------- inside

    def _written(self, update: Update) -> Written:
        """A version as files, before vLLM hears of it.

        Raises:
            EngineError: they could not be written. NoRoomError: there is too little room.
        """
        snapshot = update.snapshot
        # PEFT stacks the experts of a layer (target_parameters) in one tensor.
        marks = (".experts.lora_", ".experts.base_layer.lora_")
        stacked = any(mark in name for name in snapshot.manifest.by_name for mark in marks)
        stays = not self._client.ends_with_us
        folder = Folder(snapshot.manifest.payload, self.target, self._directory, stays)
        try:
            folder.write(snapshot, bytes(snapshot.tensor(CONFIG_NAME).numpy()))
        except BaseException:
            folder.remove()
            raise
        return Written(update.version, folder, stacked)
