"""What the driver of an adapter asks of vLLM's workers; see ``weightsync.vllm_worker.adapters``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from weightsync.deadline import Deadline
from weightsync.engines.vllm.adapter_files import Folder
from weightsync.engines.vllm.client import VLLMClient
from weightsync.errors import EngineError
from weightsync.version import Version


@dataclass(frozen=True)
class Written:
    """One version as files, before vLLM hears of it.

    Attributes:
        stacked: whether the experts of a layer lie in one tensor.
    """

    version: Version
    folder: Folder
    stacked: bool


class AdapterCalls:
    """Each reaches every worker. Raises what the client does, and EngineError in vLLM's words.

    Args:
        name: how messages call the adapter.
    """

    def __init__(self, client: VLLMClient, name: str) -> None:
        self._client = client
        self._name = name

    def look(self, written: Written, deadline: Deadline) -> None:
        """Whether all workers see the files, and vLLM takes an adapter of this configuration."""
        self._ask("look", deadline, path=written.folder.path, stacked=written.stacked)

    def load(
        self,
        written: Written,
        number: int,
        name: str,
        deadline: Deadline,
        also_held: tuple[str, ...] = (),
    ) -> None:
        """Load it, in the place of what has its number. One that failed on a worker is on none.

        Args:
            also_held: directories that must stay with the files, until it is dropped.
        """
        try:
            self._ask(
                "load",
                deadline,
                name=name,
                number=number,
                path=written.folder.path,
                stacked=written.stacked,
                held=[written.folder.path, *also_held],
            )
        except EngineError:
            self.drop(number, Deadline(deadline.at_most(10.0).seconds), check=False)
            raise

    def drop(self, number: int, deadline: Deadline, check: bool = True) -> None:
        self._ask("drop", deadline, check, number=number)

    def loaded(self, deadline: Deadline) -> set[int]:
        """The numbers that every worker has."""
        answers = self._ask("list", deadline)
        return set.intersection(*(set(answer["loaded"]) for answer in answers))

    def asleep(self, deadline: Deadline) -> set[str]:
        """Tags of memory that is not there, as the engine sleeps."""
        texts = self._client.ask(json.dumps({"op": "status"}), deadline, "status")
        return {tag for text in texts for tag in json.loads(text).get("asleep", ())}

    def _ask(
        self, step: str, deadline: Deadline, check: bool = True, **more: Any
    ) -> list[dict[str, Any]]:
        request = json.dumps({"op": "adapter", "step": step, **more})
        texts = self._client.ask(request, deadline, f"{step} an adapter")
        answers: list[dict[str, Any]] = [json.loads(text) for text in texts]
        words = [f"worker {a.get('rank')}: {a['error']}" for a in answers if a.get("error")]
        if check and words:
            raise EngineError(f"vLLM refuses adapter {self._name!r}: {'; '.join(words)}")
        return answers
