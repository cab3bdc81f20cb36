"""The ``weightsync`` weight-transfer engine: opens snapshots in a vLLM worker and loads them.

With tensor parallelism an exception raised inside a worker's RPC leaves the other ranks' replies
in their queues, and later calls get the answers of earlier ones. So nothing is raised through an
RPC that our own driver makes: errors are recorded, and told by ``weightsync_call``, which the
driver always makes next. Deadlines are kept in here for the same reason.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.v1.worker.worker_base import WorkerBase

from weightsync.deadline import Deadline
from weightsync.device import Device, device_of
from weightsync.errors import DeadlineError, EngineError
from weightsync.manifest import describe
from weightsync.scheme import scheme_from_url
from weightsync.transport import Snapshot, Subscriber
from weightsync.version import Version
from weightsync.vllm_worker import adapters, answers, compat, sleep, verification
from weightsync.vllm_worker.loading import Apply, Loader
from weightsync.vllm_worker.standby import Standby

_MOMENT = 0.002
"""Seconds that a step of the model may be put off, to save the driver questions."""

_PATIENCE = 5.0
"""Seconds that the end of a worker waits for a version that is still being opened."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """``scheme``: a scheme's URL. ``driven``: a weightsync driver asks for the outcome itself."""

    scheme: str
    driven: bool = False


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """``version``: ``[epoch, number]``. ``timeout``: seconds for getting at it."""

    scheme: str
    version: list[int]
    timeout: float = 60.0
    driven: bool = False


@dataclass(eq=False)
class _Staging:
    """A version on its way to be staged, in a thread of its own."""

    over: threading.Event = field(default_factory=threading.Event)


class WeightSyncTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """One per worker process. See the module's docstring for how it reports."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._url: str | None = None
        self._readers: dict[str, Subscriber] = {}
        self._snapshot: Snapshot | None = None
        self._staging: _Staging | None = None
        self._last_staging: _Staging | None = None
        self._switching = threading.Lock()
        self._staged: Version | None = None
        self._held: Version | None = None
        self._error: str | None = None
        self._driven = False
        self._driver: list[Any] | None = None
        self._fits: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._looked_at: dict[str, Version | None] = {}
        self._apply: Apply = "auto"
        self._loaders: dict[str, Loader] = {}
        self._standby: Standby | None = None
        self._verified = False
        self._worker: Any = None
        self._reader: tuple[int, int] | None = None
        self._last = True
        self._target = "model"
        self._elsewhere: set[int] = set()
        self._paused = False

    # ---------------------------------------------------------------- what our driver asks

    def call(self, request: str, worker: Any) -> str:
        """Answer a JSON request of the driver; never raises.

        ==========  ============================================================================
        ``init``    get ready to read from ``scheme``, as reader ``first`` + own number of
                    ``total``, ``beside`` the schemes so far or instead of them
        ``leave``   read from ``scheme`` no more
        ``stage``   lease and verify ``version`` in the background, while requests run; if that
                    is done in a moment, ``check`` the ``targets`` as well
        ``check``   whether what was staged fits the ``target``; changes nothing
        ``begin``   open a session on the ``target``; one that a crash left open is undone first
        ``load``    load what was staged
        ``finish``  end the session; ``last`` of this update: the version is held now
        ``apply``   begin, load and finish at once: no other worker needs to be waited for
        ``verify``  compare what the ``target`` holds with what was staged; changes nothing
        ``abandon`` undo the session: it failed here, or on another worker
        ``release`` give the lease back and forget the error
        ``pausing`` the driver is about to pause the engine
        ``resumed`` the driver has resumed it
        ``survey``  answer a question of where the worker is: see ``weightsync.placement.questions``
        ``status``  only answer
        ==========  ============================================================================

        A step after one that failed does nothing.

        Returns:
            JSON: ``rank``, ``error``, ``staging``, ``staged``, ``held``; ``paused``: a driver of
            ours paused the engine and has not resumed it; ``asleep``: the tags of memory that
            sleep took away; ``lost``: the models that deep sleep left without weights until the
            next full update; ``invalid``: names of other tensors that are lost; what ``verify``
            found; of ``check`` whether the ``target`` is ``planned``, and ``notes`` on how it is
            loaded; of ``stage`` these as ``looked``, for each of the targets, or nothing.
        """
        self._worker = worker
        watch = sleep.watch(worker)
        more: dict[str, Any] = {}
        self._guard(lambda: more.update(self._obey(json.loads(request)) or {}))
        staging = self._staging is not None and not self._staging.over.is_set()
        return json.dumps(  # an error that comes from here on is told next time
            {
                **more,
                "rank": self._number,
                "staging": staging,
                "error": self._error,
                "staged": self._staged,
                "held": self._held,
                "paused": self._paused,
                "asleep": sorted(watch.asleep),
                "lost": sorted(watch.lost),
                "invalid": sorted(watch.invalid),
            }
        )

    def _obey(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """What is answered beside the usual."""
        op = request["op"]
        if op == "survey":
            from weightsync.placement import questions

            return {"survey": questions.answer(request["question"])}
        if op == "init":
            self._driven, self._error = True, None
            sleep.watch(self._worker).targets |= set(request.get("targets", ()))
            self._reader = int(request["first"]) + self._number, int(request["total"])
            self._configure(request.get("apply", "auto"), bool(request.get("stage")))
            self._join(str(request["scheme"]), beside=bool(request.get("beside")))
        elif op == "leave":
            self._leave(str(request["scheme"]))
        elif op == "stage":
            self._end_former_session()
            self._release()
            self._error = None
            deadline = Deadline(float(request["timeout"]))
            self._driver = request.get("driver")
            url, version = str(request["scheme"]), Version.parse(request["version"])
            self._stage_in_background(url, version, deadline)
            return self._check_in_a_moment(request.get("targets", ()))
        elif op == "abandon":
            self._error = self._error or "abandoned: another worker failed"
            compat.end_session(self._worker)
        elif op == "release":
            self._release()
            self._error = None
        elif op in ("pausing", "resumed"):
            self._paused = op == "pausing"
        elif op == "status" or self._error is not None:
            pass
        elif op == "check":
            return self._check(str(request["target"]))
        elif op == "apply":
            began = time.perf_counter()
            self._apply_planned(request)
            return {"seconds": time.perf_counter() - began}
        elif op == "verify":
            return self._verify(str(request["target"]))
        elif op == "begin":
            self._begin(str(request["target"]))
        elif op == "load":
            self._driven = True
            self._worker.update_weights(
                {key: request[key] for key in ("scheme", "version", "timeout")}
            )
        elif op == "finish":
            self._last = bool(request["last"])
            if not compat.in_session(self._worker):
                raise EngineError("no update is going on")
            compat.end_session(self._worker)
            if self._error is None:
                sleep.watch(self._worker).loaded(self._target)
        else:
            raise EngineError(f"no such request: {op!r:.80}")
        return None

    def _begin(self, target: str) -> None:
        self._end_former_session()
        self._require_awake()
        compat.begin_session(self._worker, target)

    def _look_elsewhere(self, target: str) -> None:
        """What a draft shares with the model comes with the model's weights."""
        models = compat.models(self._worker) if target == "draft" else {}
        self._elsewhere = compat.places(models["model"]) if models else set()

    def _require_awake(self) -> None:
        """Memory that sleep gave away is not there, neither to be read nor to be written."""
        if "weights" in sleep.watch(self._worker).asleep:
            raise EngineError("the engine's weights are asleep: wake them first")

    def _end_former_session(self) -> None:
        """Its driver died, or vLLM's own methods were used and not to the end."""
        if compat.in_session(self._worker):
            self._error = "abandoned"
            compat.end_session(self._worker)
            self._error = None

    # ---------------------------------------------------------------- vLLM's life cycle

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self._driven = init_info.driven
        self._error = None
        self._reportable(lambda: self._join(init_info.scheme, beside=False))

    def start_weight_update(self) -> None:
        self._reportable(self._start_session)

    def _start_session(self) -> None:
        """For our driver, or for a user of vLLM's own methods, who asks for nothing before."""
        draft = compat.models(self._worker).get("draft") if self._worker is not None else None
        self._target = "draft" if self.model is draft else "model"
        self._last = True
        self._look_elsewhere(self._target)
        loader = self._loaders.get(self._target)
        if loader is not None and not loader.still_holds(self.model):
            loader.forget()
        compat.begin_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._reportable(lambda: self.receive_weights(self.parse_update_info(update_info)))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        self._driven = self._driven or update_info.driven
        version = Version.parse(update_info.version)
        deadline = Deadline(float(update_info.timeout))
        if self._error:
            return
        self._lease(update_info.scheme, version, deadline)
        assert self._snapshot is not None
        self._held = None  # until all of the update's targets are finished
        # The reload keeps references to these views until it is finished: so does the lease.
        self._load_in_session(self._snapshot, deadline)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def _lease(self, url: str, version: Version, deadline: Deadline) -> None:
        if self._staging is not None and not self._staging.over.wait(deadline.remaining):
            raise DeadlineError(f"version {version} was not verified within its deadline")
        if self._error:
            raise EngineError(self._error)
        if self._staged != version:
            # One that was given up may still be at it, in the memory that this one needs.
            given_up = self._last_staging
            if given_up is not None and not given_up.over.wait(deadline.remaining):
                raise DeadlineError("a version asked for earlier is still being opened")
            self._keep(self._open(url, version, deadline), version)

    def finish_weight_update(self) -> None:
        try:
            if self._error is None:
                self._reportable(lambda: compat.finish_reload(self.model, self.model_config))
            if self._error is not None:
                self._held = None
                compat.abandon_reload(self.model)
            elif self._last:
                self._held = self._staged
        finally:
            if self._last or self._error is not None:
                self._release()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """vLLM 0.25 asks for it; a trainer uses a :class:`~weightsync.sender.Sender` instead."""
        raise NotImplementedError("weights are sent by scheme.create_sender(model)")

    def shutdown(self) -> None:
        self._release()
        self._free()
        if self._last_staging is not None:
            self._last_staging.over.wait(_PATIENCE)
        self._leave(*self._readers)

    # ---------------------------------------------------------------- the parts

    @property
    def _number(self) -> int:
        """This worker's among all of its engine, over DP, PP and TP."""
        config = self.parallel_config
        # Of a model without experts each data-parallel rank is an engine of its own, of rank 0;
        # its index is what it was before.
        replica = getattr(config, "data_parallel_index", config.data_parallel_rank)
        return int(replica * config.world_size + config.rank)

    @property
    def _numbers(self) -> int:
        config = self.parallel_config
        return int(config.data_parallel_size * config.world_size)

    def _join(self, url: str, beside: bool) -> None:
        """Have a reader of a scheme, beside those of others or instead of them."""
        if not beside:
            self._leave(*(other for other in self._readers if other != url))
        if url not in self._readers:
            reader = self._reader or (self._number, self._numbers)
            self._readers[url] = scheme_from_url(url).create_reader(*reader)

    def _connect(self, url: str) -> Subscriber:
        """The reader of a scheme, which is the one in use from now on."""
        if url not in self._readers:
            self._join(url, beside=False)
        if url != self._url:
            self._free()  # what stands by was read by another one
            self._url = url
        return self._readers[url]

    def _leave(self, *urls: str) -> None:
        for url in urls:
            if url == self._url:
                self._free()
                self._url = None
            reader = self._readers.pop(url, None)
            if reader is not None:
                reader.close()

    def _stage_in_background(self, url: str, version: Version, deadline: Deadline) -> None:
        former, self._staging = self._last_staging, _Staging()
        staging = self._last_staging = self._staging

        def run() -> None:
            snapshot = None
            try:
                # One that was given up may still be at it: nothing waits for it but this one.
                if former is not None and not former.over.wait(deadline.remaining):
                    raise DeadlineError("a version asked for earlier is still being opened")
                snapshot = self._open(url, version, deadline)
            except Exception as error:
                self._settle(staging, version, None, error)
            else:
                self._settle(staging, version, snapshot, None)
            finally:
                staging.over.set()

        threading.Thread(target=run, name="weightsync stage", daemon=True).start()

    def _settle(
        self,
        staging: _Staging,
        version: Version,
        snapshot: Snapshot | None,
        error: Exception | None,
    ) -> None:
        """What came of a staging counts unless it was given up meanwhile."""
        with self._switching:
            if staging is self._staging:
                if error is not None:
                    self._record(error)
                elif snapshot is not None:
                    self._keep(snapshot, version)
                return
        if snapshot is not None:
            snapshot.close()

    def _open(self, url: str, version: Version, deadline: Deadline) -> Snapshot:
        snapshot = self._connect(url).snapshot(version, deadline)
        try:
            self._verified = False
            # All of this here, where no request waits.
            if self._standby is not None:
                self._standby.take(snapshot, deadline)
            if not self._verified_on_the_way(snapshot):
                self._verify_here(snapshot)
            memory, device = snapshot.memory(), self._device()
            if memory is not None and device is not None:
                memory.page_lock(device)
        except BaseException:
            snapshot.close()
            raise
        return snapshot

    def _device(self) -> Device | None:
        return device_of(next(self.model.parameters()).device)

    def _verify_here(self, snapshot: Snapshot) -> None:
        if not self._verified:
            snapshot.verify()
            self._verified = True

    def _verified_on_the_way(self, snapshot: Snapshot) -> bool:
        """Whether a GPU digests the bytes when they come to it: as staged, or in passing."""
        fingerprint = snapshot.manifest.fingerprint
        staged = self._standby is not None and self._standby.holding(snapshot.version) is not None
        loaders = self._loaders_of(fingerprint)
        return bool(loaders) and all(
            loader.plans_all(fingerprint) and (staged or loader.verifies) for loader in loaders
        )

    def _keep(self, snapshot: Snapshot, version: Version) -> None:
        """From now on, until it is released; what is standing by is of this version already."""
        former, self._snapshot, self._staged = self._snapshot, snapshot, version
        if former is not None:
            former.close()
        self._watch_driver(snapshot)

    def _watch_driver(self, snapshot: Snapshot) -> None:
        """Give the lease back if the driver dies: vLLM's workers may outlive it for ever.

        Otherwise the trainer would wait for a slot that nobody is going to read.
        """
        if self._driver is None or self._driver[0] != socket.gethostname():
            return
        process = f"/proc/{int(self._driver[1])}"

        def watch() -> None:
            while self._snapshot is snapshot:
                if not os.path.exists(process):
                    self._release_snapshot()
                    return
                time.sleep(0.5)

        if os.path.exists(process):
            threading.Thread(target=watch, name="weightsync watch", daemon=True).start()

    def _check_in_a_moment(self, targets: Sequence[str]) -> dict[str, Any]:
        staging = self._staging
        quick = staging is not None and staging.over.wait(_MOMENT)
        if not quick or self._error is not None or "weights" in sleep.watch(self._worker).asleep:
            return {}
        return {"looked": [self._check(str(target)) for target in targets]}

    def _check(self, target: str) -> dict[str, Any]:
        """Load what was staged without changing anything, once for each manifest and model.

        Raises:
            EngineError: vLLM refuses a tensor, or layers would be left without some weights.
        """
        if self._snapshot is None:
            return {}
        snapshot = self._snapshot
        fingerprint = snapshot.manifest.fingerprint
        loader = self._loader(target)
        with self._looking_at(target):
            held = loader.holds(self.model, fingerprint)
            if not (held and loader.plans_all(fingerprint)):  # else no layer is another one
                self._rehearse(target, snapshot)
            planned = loader.prepare(
                self.model,
                self.model_config,
                snapshot.manifest,
                lambda: self._stream(snapshot),
                held,
            )
            planned = planned and loader.takes(snapshot)
        # Nothing moves the model's tensors between this look and the update that it is for.
        self._looked_at[target] = snapshot.version if planned else None
        notes = [loader.note(snapshot)]
        device, reader = self._device(), self._readers.get(self._url or "")
        if self._standby is not None and device is not None and reader is not None:
            self._standby.prepare(self._loaders_of(fingerprint), device, reader, snapshot)
            notes.append(self._standby.note(snapshot.version))
        encodes = getattr(self.vllm_config.model_config, "is_multimodal_model", True)
        return {"planned": planned, "notes": notes, "encodes": bool(encodes)}

    def _rehearse(self, target: str, snapshot: Snapshot) -> None:
        subject = snapshot.manifest.fingerprint, tuple(map(id, self.model.modules()))
        if subject != self._fits.get(target):
            with compat.rehearsal(self.model):
                self._load(self._stream(snapshot))
                self._require_complete()
            self._fits[target] = subject

    @contextmanager
    def _looking_at(self, target: str) -> Iterator[None]:
        """Between two steps of the model, and without a session."""
        self._require_awake()
        self._look_elsewhere(target)
        with (
            compat.targeting(self._worker, target),
            set_current_vllm_config(self.vllm_config),
            torch.no_grad(),
        ):
            yield

    def _verify(self, target: str) -> dict[str, Any]:
        """
        Returns:
            ``compared``: which tensors of the version, by their number in the manifest;
            ``different`` and ``unchecked`` as in :class:`~.verification.Findings`.
        """
        snapshot = self._snapshot
        if snapshot is None:
            raise EngineError("no version was staged to compare with")
        self._verify_here(snapshot)
        with self._looking_at(target):
            found = verification.compare(self.model, self.model_config, self._stream(snapshot))
        numbers = {spec.name: number for number, spec in enumerate(snapshot.manifest.tensors)}
        return {
            "compared": sorted(numbers[name] for name in found.compared if name in numbers),
            "different": found.different,
            "unchecked": found.unchecked,
        }

    # ---------------------------------------------------------------- by plan, by reload

    def _configure(self, apply: Apply, stage: bool) -> None:
        """What a driver wants; one that wants something else begins anew."""
        if (apply, stage) != (self._apply, self._standby is not None):
            self._free()
            self._loaders.clear()
            self._apply, self._standby = apply, Standby() if stage else None
            sleep.watch(self._worker).before_sleep = self._free

    def _free(self) -> None:
        """Give memory of the device back that the next update can have again."""
        if self._standby is not None:
            self._standby.close()
        for loader in self._loaders.values():
            loader.free()

    def _loader(self, target: str) -> Loader:
        return self._loaders.setdefault(target, Loader(target, self._apply))

    def _loaders_of(self, fingerprint: str) -> list[Loader]:
        """Those with plans for a manifest. The model and its draft may be sent different ones."""
        return [loader for loader in self._loaders.values() if loader.plans(fingerprint)]

    def _apply_planned(self, request: dict[str, Any]) -> None:
        """Load the ``target`` without a session of vLLM's, which costs more than the copies."""
        target, version = str(request["target"]), Version.parse(request["version"])
        deadline = Deadline(float(request["timeout"]))
        self._driven = True
        self._end_former_session()
        self._require_awake()
        self._lease(str(request["scheme"]), version, deadline)
        snapshot = self._snapshot
        assert snapshot is not None
        self._held = None
        with self._looking_at(target):
            loader = self._loader(target)
            fit = self._looked_at.get(target) == version or loader.covers(
                self.model, snapshot.manifest.fingerprint
            )
            if fit and loader.takes(snapshot) and target not in sleep.watch(self._worker).lost:
                self._replay(loader, snapshot, deadline)
            else:
                self._load_by_session(target, snapshot, deadline)
        if self._error is not None:  # vLLM's session has ended with it
            return
        snapshot.settle()
        sleep.watch(self._worker).loaded(target)
        if request["last"]:
            self._held = self._staged
            self._release()

    def _replay(self, loader: Loader, snapshot: Snapshot, deadline: Deadline) -> None:
        staging = None if self._standby is None else self._standby.holding(snapshot.version)
        if not self._verified_on_the_way(snapshot):
            self._verify_here(snapshot)
        loader.replay(snapshot, staging, self._verified, deadline)

    def _load_by_session(self, target: str, snapshot: Snapshot, deadline: Deadline) -> None:
        compat.begin_session(self._worker, target)
        self._last = False
        self._load_in_session(snapshot, deadline)
        compat.end_session(self._worker)

    def _load_in_session(self, snapshot: Snapshot, deadline: Deadline) -> None:
        """Load what the session is for: all of it, or the layers that no plan brings."""
        loader = self._loaders.get(self._target)
        lost = self._worker is not None and self._target in sleep.watch(self._worker).lost
        plan = loader.plan if loader is not None and not lost else None
        if (
            loader is None
            or plan is None
            or not loader.plans(snapshot.manifest.fingerprint)
            or not loader.takes(snapshot)
        ):
            self._verify_here(snapshot)
            self._load(self._stream(snapshot))
            self._require_complete()
            return
        self._verify_here(snapshot)
        reloaded = set(plan.reloaded)
        compat.expect_partial(self.model)
        self._load(each for each in self._stream(snapshot) if each[0] in reloaded)
        self._replay(loader, snapshot, deadline)
        self._require_complete(plan.fallback)
        loader.reloaded()

    def _require_complete(self, among: Collection[str] | None = None) -> None:
        incomplete = compat.incomplete_layers(self.model, self._elsewhere, among)
        if incomplete:
            raise EngineError(
                f"the update leaves {len(incomplete)} layers without some of their weights: "
                f"{'; '.join(incomplete[:8])}"
            )

    def _load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """
        Raises:
            EngineError: vLLM refused a tensor; says which, and vLLM's own words.
        """
        at: list[str] = []

        def watched() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                at[:] = [f"tensor {name!r} ({describe(tensor.dtype, tensor.shape)}): "]
                yield name, tensor
            at.clear()

        try:
            compat.load(self.model, watched())
        except Exception as error:
            where = "".join(at)
            words = f"{error!s:.500}"
            raise EngineError(f"{where}vLLM says {type(error).__name__}: {words}") from error

    def _stream(self, snapshot: Snapshot) -> Iterator[tuple[str, torch.Tensor]]:
        yield from snapshot
        # Tied in the trainer: an engine that is not tied needs the values under each name.
        if not compat.ties_word_embeddings(self.model_config):
            for alias in snapshot.manifest.aliases:
                yield alias, snapshot.tensor(alias)

    def _release(self) -> None:
        with self._switching:  # never waits for a staging: requests would wait with it
            self._staging = None
        self._release_snapshot()

    def _release_snapshot(self) -> None:
        # Forgotten first: a driver may die while its version is being written, and what changes
        # under that from here on is not held.
        snapshot, self._snapshot, self._staged = self._snapshot, None, None
        if self._standby is not None:
            self._standby.release()
        if snapshot is not None:
            snapshot.close()

    def _guard(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:
            self._record(error)

    def _record(self, error: Exception) -> None:
        self._error = self._error or f"{type(error).__name__}: {error}"

    def _reportable(self, action: Callable[[], object]) -> None:
        """Run a step of an update, unless one before it failed already.

        A user who calls vLLM's own methods asks for no status, and gets the exception.
        """
        if self._error is not None:
            return
        self._guard(action)
        if self._error is not None and not self._driven:
            error, self._error = self._error, None
            compat.abandon_reload(self.model)
            raise EngineError(error)


def _call(worker: Any, request: str) -> str:
    """The worker's method that the driver calls; see :meth:`WeightSyncTransferEngine.call`."""
    engine = worker.weight_transfer_engine
    if not isinstance(engine, WeightSyncTransferEngine):
        return json.dumps({"error": "the worker has no weightsync engine", "staging": False})
    answer = adapters.answer(request, worker, engine._number) or engine.call(request, worker)
    answers.send(request, answer)
    return answer


# vLLM's RPC reaches methods of the worker by name. This adds one under a name of our own, and
# changes none.
WorkerBase.weightsync_call = _call
