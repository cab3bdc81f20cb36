"""A vLLM engine, in whatever form it is run, driven by one life cycle.

Weights never cross vLLM's RPC: each worker process opens the snapshot itself, in the plug-in's
half (``weightsync.vllm_worker``). This half runs in the process of the receiver, and reaches the
engine through a client of its form.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Sequence
from typing import Any, Literal

from weightsync.deadline import Deadline
from weightsync.engine import Engine, Update, Verification
from weightsync.engines.vllm.client import GRACE, Mode, VLLMClient
from weightsync.engines.vllm.pause import Pause
from weightsync.errors import DeadlineError, EngineDiedError, EngineError, VersionGoneError
from weightsync.options import require_truth
from weightsync.version import Version

Target = Literal["model", "draft"]
Answer = dict[str, Any]


_VERIFY = 600.0
"""Seconds that comparing the weights may take; about what loading them takes."""


_LOOK = 1.0
"""Seconds after which an engine that others may put to sleep is asked again whether it did."""


_PROMPTS = tuple(tuple(1 + number % 7 for number in range(length)) for length in (2, 17, 40))
"""Token ids that every vocabulary has."""


class VLLMEngine(Engine):
    """Drives an engine made with ``WeightTransferConfig(backend="weightsync")``.

    Args:
        client: of the engine's form.
        mode: what becomes of requests that run while weights change: ``"keep"`` freezes them and
            lets them go on with the new weights (their cache is computed anew), ``"wait"`` lets
            them end first, ``"abort"`` ends them. New ones are queued in any case.
        targets: which of the engine's models take the weights, each what it knows of them: the
            ``"model"``, its speculative ``"draft"``, or both. What is not named is left alone.
        wake: what an engine that sleeps is woken to: ``"weights"`` loads them and leaves the rest
            asleep, for its user to wake; ``"all"`` has it answer requests again.
        apply: ``"plan"`` writes weights straight to their places wherever that is proven to do what
            vLLM's reload does, and reloads the other layers; ``"reload"`` reloads all; ``"auto"``
            plans if that covers half of the bytes at least.
        stage: keep memory for a second copy of each worker's weights, on its device, and read
            versions into it while requests run: the pause is one copy within the device.
    """

    def __init__(
        self,
        client: VLLMClient,
        *,
        mode: Mode = "keep",
        targets: tuple[Target, ...] = ("model",),
        wake: Literal["weights", "all"] = "weights",
        apply: Literal["auto", "plan", "reload"] = "auto",
        stage: bool = False,
    ) -> None:
        if mode not in ("keep", "wait", "abort"):
            raise EngineError(f"mode={mode!r}: 'keep', 'wait' or 'abort'")
        if not targets or not set(targets) <= {"model", "draft"}:
            raise EngineError(f"targets={targets!r}: some of 'model', 'draft'")
        if wake not in ("weights", "all"):
            raise EngineError(f"wake={wake!r}: 'weights' or 'all'")
        if apply not in ("auto", "plan", "reload"):
            raise EngineError(f"apply={apply!r}: 'auto', 'plan' or 'reload'")
        require_truth(stage=stage)
        if stage and apply == "reload":
            raise EngineError("stage=True needs a plan: apply='auto' or 'plan'")
        self.client = client
        self._mode = mode
        self._targets = tuple(targets)
        self._wake = wake
        self._way = {"apply": apply, "stage": stage}
        self._planned = False
        self._encodes = True
        self._seconds = 0.0
        self._notes: tuple[str, ...] = ()
        self._pause = Pause(client, mode)
        self._asleep: tuple[str, ...] = ()
        self._deep: int | None = 0
        self._lost = False
        self._loaded: Version | None = None
        self._updating = False
        self._looked = Deadline(0)
        self._numbered = (0, 0)

    @property
    def target(self) -> Any:
        return self.client.target

    @property
    def name(self) -> str:
        return self.client.name

    def require_thread(self) -> None:
        self.client.require_thread()

    def workers(self, deadline: Deadline) -> int:
        return self.client.facts(deadline).workers

    def number_workers(self, first: int, total: int) -> None:
        self._numbered = first, total

    def connect(self, url: str, deadline: Deadline) -> None:
        facts = self.client.facts(deadline)
        self.client.require_backend(facts)
        if self._mode != "keep":
            self.client.require_progress(facts)
        self._initialise(url, deadline, beside=False)
        self._deep = self.client.deep_sleeps()

    def join(self, url: str, deadline: Deadline) -> None:
        self._initialise(url, deadline, beside=True)

    def _initialise(self, url: str, deadline: Deadline, beside: bool) -> None:
        facts = self.client.facts(deadline)
        first, total = self._numbered
        self._ask(
            {
                "op": "init",
                "scheme": url,
                "beside": beside,
                "first": first - facts.before,
                "total": total or facts.workers,
                "targets": self._targets,
                **self._way,
            },
            deadline,
        )

    def leave(self, url: str) -> None:
        self._ask({"op": "leave", "scheme": url}, Deadline(GRACE))

    # ---------------------------------------------------------------- while requests run

    def stage(self, update: Update, deadline: Deadline) -> None:
        answers = self._lease(update, deadline, self._targets)
        self._asleep = tuple(sorted({tag for answer in answers for tag in answer["asleep"]}))
        # Between two steps of the model, and before anything is paused or touched. The memory of
        # an engine asleep is not there to look at.
        self._planned, self._notes = False, ()
        if "weights" not in self._asleep:
            looked = [found for answer in answers for found in answer.get("looked", ())]
            if len(looked) < len(answers) * len(self._targets):  # some were not that quick
                looked = [
                    answer
                    for target in self._targets
                    for answer in self._ask({"op": "check", "target": target}, deadline)
                ]
            self._planned = all(answer.get("planned") for answer in looked)
            self._encodes = any(answer.get("encodes", True) for answer in looked)
            said = (note for answer in looked for note in answer.get("notes", ()))
            self._notes = tuple(dict.fromkeys(said))
        elif self._way["stage"]:
            self._notes = ("not staged: the engine was asleep",)

    def _lease(
        self, update: Update, deadline: Deadline, targets: Sequence[Target] = ()
    ) -> list[Answer]:
        """Have every worker open the version and verify its bytes.

        Args:
            targets: to check as well, where that is done in a moment.
        """
        answers = self._ask(
            {
                "op": "stage",
                "scheme": update.url,
                "version": list(update.version),
                "timeout": deadline.remaining,
                "driver": [socket.gethostname(), os.getpid()],
                "targets": targets,
            },
            deadline,
        )
        if not any(answer["staging"] for answer in answers):
            return answers

        def attempt() -> list[Answer] | None:
            answers = self._ask({"op": "status"}, deadline)
            return None if any(answer["staging"] for answer in answers) else answers

        verified = deadline.wait(attempt)
        if verified is None:
            raise DeadlineError(f"workers had not verified {update.version} in time")
        return verified

    def unstage(self) -> None:
        with contextlib.suppress(Exception):  # an engine that is gone has nothing to release
            self._ask({"op": "release"}, Deadline(GRACE))

    # ---------------------------------------------------------------- while they are paused

    def pause(self, deadline: Deadline) -> None:
        self._updating = True
        # An engine that its user paused or put to sleep is left so.
        self._pause.begin(deadline)
        if "weights" in self._asleep:
            self.client.wake(["weights"], deadline)

    def apply(self, update: Update, deadline: Deadline) -> None:
        deep, self._seconds = self.client.deep_sleeps(), 0.0
        for target in self._targets:
            (self._load_planned if self._planned else self._load)(target, update, deadline)
        self._deep, self._lost, self._loaded = deep, False, update.version

    def _load_planned(self, target: Target, update: Update, deadline: Deadline) -> None:
        """All at once: there is no session that could be left open on some workers."""
        last = target == self._targets[-1]
        request = {
            "op": "apply",
            "target": target,
            "last": last,
            "scheme": update.url,
            "version": list(update.version),
            "timeout": deadline.remaining,
        }
        try:
            answers = self._ask(request, deadline)
        except EngineDiedError:
            raise
        except BaseException:
            self._undo()
            raise
        self._seconds += max(answer.get("seconds", 0.0) for answer in answers)
        self._require_held(answers, update.version if last else None)

    @staticmethod
    def _require_held(answers: Sequence[Answer], version: Version | None) -> None:
        for answer in answers if version is not None else ():
            if answer["held"] != list(version or ()):
                raise EngineError(
                    f"worker {answer['rank']} holds {answer['held']} after the update"
                )

    def notes(self) -> tuple[str, ...]:
        if not self._seconds:
            return self._notes
        return (*self._notes, f"written in {self._seconds * 1e3:.1f} ms")

    def stopped(self) -> float | None:
        return self._pause.seconds

    def _load(self, target: Target, update: Update, deadline: Deadline) -> None:
        try:
            self._ask({"op": "begin", "target": target}, deadline)
            self._ask(
                {
                    "op": "load",
                    "scheme": update.url,
                    "version": list(update.version),
                    "timeout": deadline.remaining,
                },
                deadline,
            )
        except EngineDiedError:
            raise
        except BaseException:
            # One rank's failure must undo the session on all of them, or they would differ; and a
            # session left open would leave layers without memory.
            self._undo()
            raise
        last = target == self._targets[-1]
        answers = self._ask({"op": "finish", "last": last}, deadline)
        self._require_held(answers, update.version if last else None)

    def _undo(self) -> None:
        with contextlib.suppress(Exception):
            self._ask({"op": "abandon"}, Deadline(GRACE), check=False)
        self.unstage()

    def unrestored(self) -> list[str]:
        answers = self._ask({"op": "status"}, Deadline(GRACE)) if self._asleep else []
        return sorted({name for answer in answers for name in answer["invalid"]})

    def flush(self, deadline: Deadline) -> None:
        self.client.flush(deadline, self._encodes)

    def label(self, version: Version | None) -> None:
        self.client.set_version(str(version) if version else "unusable", Deadline(GRACE))

    def resume(self) -> None:
        woken = bool(self._asleep) and self._wake == "all"
        try:
            if woken:
                rest = [tag for tag in self._asleep if tag != "weights"]
                self.client.wake(rest, Deadline(GRACE))
        finally:
            self._updating = False
            self._pause.end(in_any_case=woken)

    # ---------------------------------------------------------------- at other times

    def lost_weights(self) -> bool:
        self.client.require_alive()
        deep = self.client.deep_sleeps()
        if deep is not None:
            return deep != self._deep
        # Asked in every poll: not every time over a wire, nor in the middle of an update.
        if self._looked.expired and not self._updating:
            self._looked = Deadline(_LOOK)
            answers = self._ask({"op": "status"}, Deadline(GRACE), check=False)
            slept = any(set(self._targets) & set(answer.get("lost", ())) for answer in answers)
            # One that was started anew, unnoticed, answers as well, and has never heard of it.
            held = None if self._loaded is None else list(self._loaded)
            self._lost = slept or any(answer["held"] != held for answer in answers)
        return self._lost

    def verify(self, update: Update) -> Verification:
        deadline = Deadline(_VERIFY)
        try:
            self._lease(update, deadline)
            found = [
                answer
                for target in self._targets
                for answer in self._ask({"op": "verify", "target": target}, deadline)
            ]
        except EngineError as error:
            # In an update it means that a newer one is there; here that there is nothing to
            # compare with.
            if f": {VersionGoneError.__name__}: " in str(error):
                raise VersionGoneError(str(error)) from None
            raise
        finally:
            self.unstage()
        names = list(update.snapshot.manifest.by_name)
        compared = {number for answer in found for number in answer["compared"]}
        return Verification(
            update.version,
            len(compared),
            tuple(_by_worker(found, "different")),
            (
                *(name for number, name in enumerate(names) if number not in compared),
                *_by_worker(found, "unchecked"),
            ),
        )

    def answers(self) -> str:
        found = self.client.logprobs(_PROMPTS, Deadline(_VERIFY))
        return json.dumps([[value.hex() for value in prompt] for prompt in found])

    def close(self) -> None:
        self.unstage()
        self.client.close()

    # ---------------------------------------------------------------- talking to the workers

    def _ask(self, request: Answer, deadline: Deadline, check: bool = True) -> list[Answer]:
        """What every worker answers.

        Raises:
            EngineError: some have recorded an error; quotes each.
        """
        what = str(request["op"])
        texts = self.client.ask(json.dumps(request), deadline, what)
        answers: list[Answer] = [json.loads(text) for text in texts]
        failed = [f"worker {a.get('rank')}: {a['error']}" for a in answers if a.get("error")]
        if check and failed:
            raise EngineError("; ".join(failed))
        return answers


def _by_worker(answers: Sequence[Answer], key: str) -> list[str]:
    """What workers say, each thing once; with who says it, if not all do."""
    ranks = {answer["rank"] for answer in answers}
    said: dict[str, set[int]] = {}
    for answer in answers:
        for words in answer[key]:
            said.setdefault(words, set()).add(answer["rank"])
    return [
        words if who == ranks else f"worker {', '.join(map(str, sorted(who)))}: {words}"
        for words, who in said.items()
    ]
