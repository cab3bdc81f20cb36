"""vLLM's OpenAI server, over HTTP.

It has to be started with ``VLLM_SERVER_DEV_MODE=1`` and ``--weight-transfer-config
'{"backend": "weightsync"}'``. Its ``--api-key`` guards what generates (``/v1``, ``/inference``),
and none of the routes that change weights: keep the port to yourself.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from weightsync.deadline import Deadline
from weightsync.engines.vllm.addresses import is_own, own_address_towards
from weightsync.engines.vllm.ballot import Ballot
from weightsync.engines.vllm.client import BACKEND, CALL, GRACE, Facts, Mode, VLLMClient
from weightsync.engines.vllm.generation import Answer, Span, versions_of
from weightsync.errors import DeadlineError, EngineDiedError, EngineError

if TYPE_CHECKING:
    from weightsync.engines.vllm.http import Connection

T = TypeVar("T")

_AT_ONCE = 64
"""Prompts of one call that are sent to a server together."""

_AGAIN = 0.2
"""Seconds after which a server that does not listen yet is tried again."""

_LABELLING = 5.0
"""Seconds that the data-parallel ranks of a server may have different labels."""


class VLLMServer:
    """A vLLM server, to be given to a receiver, and to generate with.

    Args:
        url: ``http://host:8000``. Proxies of the environment are not used for this machine's own
            addresses; redirects are not followed.
        token: the server's ``--api-key``.
        answer_address: an address of this machine that the server's workers reach. Needed for
            data-parallel servers only, whose workers answer us directly, and there only where
            the route to the server does not tell it (from a container, say). It is the only
            address that is listened at.

    Raises:
        EngineError: the URL or the token makes no sense, or httpx is not installed.
    """

    def __init__(
        self, url: str, token: str | None = None, *, answer_address: str | None = None
    ) -> None:
        try:
            from weightsync.engines.vllm.http import Connection
        except ImportError as error:
            raise EngineError(
                f"a vLLM server needs httpx: pip install 'weightsync[server]' ({error})"
            ) from None
        self._connection = Connection(url, token)
        self.answer_address = answer_address
        self._reports_spans: bool | None = None

    @property
    def url(self) -> str:
        return self._connection.url

    @property
    def connection(self) -> Connection:
        """Requests to any route of the server, with its token."""
        return self._connection

    def __repr__(self) -> str:
        return f"VLLMServer({self.url!r})"

    def close(self) -> None:
        """Close idle connections. The server goes on, and this can be used again."""
        self._connection.close()

    def weight_label(self, timeout: float = 10.0) -> str | None:
        """What the server says it holds; None if its release knows no label.

        Raises:
            EngineError: it cannot be asked.
        """
        deadline = Deadline(timeout)
        # While a label is set, data-parallel ranks do not agree on one, which is an error there.
        while True:
            try:
                label = self._connection.get("/weight_info", deadline)["weight_version"]
                return str(label)
            except EngineError as error:
                if _status(error) == 404:
                    return None
                if not _is_disagreement(error) or deadline.expired:
                    raise
                time.sleep(min(0.01, deadline.remaining))
            except (TypeError, KeyError):
                raise EngineError(f"{self.url}/weight_info answered something else") from None

    # ---------------------------------------------------------------- generating

    def generate(
        self, prompts: Sequence[Sequence[int]], *, timeout: float = 600.0, **sampling: Any
    ) -> list[Answer]:
        """One answer for each prompt of token ids, with the versions it was generated with.

        A server that was started with ``--enable-scale-out`` says which tokens are of which
        version; of others an answer has the oldest and the newest version it can be of.

        Args:
            timeout: seconds for all of it.
            **sampling: as of vLLM's ``SamplingParams``: ``temperature``, ``max_tokens``, ...;
                ``logprobs=0`` for those of the tokens. Also ``model``, a served name.

        Raises:
            EngineUnusableError: the server holds no whole version. DeadlineError: it did not
            answer in time. EngineDiedError: it is gone. EngineError: in its own words.
        """
        if sampling.get("n", 1) != 1 or sampling.get("stream"):
            raise EngineError("generate gives one whole answer for each prompt: no n=, no stream=")
        deadline = Deadline(timeout)
        if self._reports_spans is not False:
            try:
                answers = self._generate_with_spans(prompts, sampling, deadline)
                self._reports_spans = True
                return answers
            except EngineError as error:
                if self._reports_spans or _status(error) not in (403, 404, 405):
                    raise
                self._reports_spans = False
        return self._complete(prompts, sampling, deadline)

    def _generate_with_spans(
        self, prompts: Sequence[Sequence[int]], sampling: dict[str, Any], deadline: Deadline
    ) -> list[Answer]:
        model = {"model": sampling["model"]} if "model" in sampling else {}
        parameters = {name: value for name, value in sampling.items() if name != "model"}

        def one(prompt: Sequence[int]) -> Answer:
            body = {"token_ids": list(prompt), "sampling_params": parameters, **model}
            document = self._connection.post("/inference/v1/generate", deadline, body)
            answer: Answer = self._parsed(document, _spanned, "/inference/v1/generate")[0]
            return answer

        if len(prompts) == 1:
            return [one(prompts[0])]
        pool = ThreadPoolExecutor(min(_AT_ONCE, len(prompts) or 1), "weightsync generate")
        try:
            return list(pool.map(one, prompts))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _complete(
        self, prompts: Sequence[Sequence[int]], sampling: dict[str, Any], deadline: Deadline
    ) -> list[Answer]:
        before = self.weight_label(min(_LABELLING, deadline.remaining))
        body = {"prompt": [list(p) for p in prompts], "return_token_ids": True, **sampling}
        document = self._connection.post("/v1/completions", deadline, body)
        after = self.weight_label(min(_LABELLING, deadline.remaining))
        labels = [label for label in (before, after) if label is not None]
        oldest, newest = [*versions_of(labels, self.url), None, None][:2]
        answers = self._parsed(document, _completed, "/v1/completions")
        if len(answers) != len(prompts):
            raise EngineError(f"{self.url} gave {len(answers)} answers to {len(prompts)} prompts")
        return [
            Answer(tokens, reason, logprobs, oldest, newest) for tokens, reason, logprobs in answers
        ]

    def _parsed(self, document: Any, read: Any, route: str) -> list[Any]:
        try:
            choices = sorted(document["choices"], key=lambda choice: choice["index"])
            return [read(choice, self.url) for choice in choices]
        except (TypeError, KeyError, ValueError, IndexError, AttributeError) as error:
            raise EngineError(
                f"{self.url}{route} answered something else: {type(error).__name__}: {error!s:.200}"
            ) from None

    def prompt_logprobs(
        self, prompts: Sequence[Sequence[int]], deadline: Deadline
    ) -> list[list[float]]:
        """See :meth:`~weightsync.engines.vllm.client.VLLMClient.logprobs`."""
        body = {
            "prompt": [list(prompt) for prompt in prompts],
            "max_tokens": 1,
            "prompt_logprobs": 0,
        }
        document = self._connection.post("/v1/completions", deadline, body)
        found = self._parsed(
            document, lambda choice, _: choice["prompt_logprobs"], "/v1/completions"
        )
        try:
            return [
                [
                    float(position[str(token)]["logprob"])
                    for token, position in zip(prompt[1:], positions[1:], strict=True)
                ]
                for prompt, positions in zip(prompts, found, strict=True)
            ]
        except (TypeError, KeyError, ValueError) as error:
            raise EngineError(f"{self.url} gave no log-probabilities: {error!r:.200}") from None


def _still_starting(error: EngineError | DeadlineError, deadline: Deadline) -> DeadlineError:
    """Of a server that was never heard of: it may be dead, or not there yet."""
    return DeadlineError(
        f"{error}; it did not answer within {deadline.seconds:.1f} s: if it is still starting, "
        "which takes a large model minutes, give connect(timeout=) more (vLLM logs 'Application "
        "startup complete' when it is done)"
    )


def _status(error: EngineError) -> int | None:
    """Of HTTP, if the server has answered with an error."""
    status: int | None = getattr(error, "status", None)
    return status


def _is_disagreement(error: EngineError) -> bool:
    """Whether the data-parallel ranks of a server have answered each something else."""
    return _status(error) == 500 and "returned different" in str(error)


def _tokens(choice: dict[str, Any]) -> tuple[int, ...]:
    return tuple(int(token) for token in choice["token_ids"])


def _spanned(choice: dict[str, Any], who: str) -> Answer:
    """A choice of ``/inference/v1/generate``."""
    content = (choice.get("logprobs") or {}).get("content")
    logprobs = None if content is None else tuple(float(each["logprob"]) for each in content)
    reported = choice.get("weight_versions") or []
    versions = versions_of([str(each["version"]) for each in reported], who)
    spans = tuple(
        Span(version, int(each["start"]), int(each["end"]))
        for version, each in zip(versions, reported, strict=True)
    )
    ends = (spans[0].version, spans[-1].version) if spans else (None, None)
    tokens = _tokens(choice)
    return Answer(tokens, choice["finish_reason"], logprobs, *ends, spans or None)


def _completed(
    choice: dict[str, Any], who: str
) -> tuple[tuple[int, ...], str | None, tuple[float, ...] | None]:
    """A choice of ``/v1/completions``."""
    found = (choice.get("logprobs") or {}).get("token_logprobs")
    logprobs = None if found is None else tuple(float(each) for each in found)
    return _tokens(choice), choice["finish_reason"], logprobs


def _prompt_logprobs(choice: dict[str, Any], who: str) -> Any:
    return choice["prompt_logprobs"]


# ---------------------------------------------------------------- what an engine is driven with


class ServerClient(VLLMClient):
    """Calls a :class:`VLLMServer`."""

    def __init__(self, server: VLLMServer) -> None:
        self.name = f"vLLM server {server.url}"
        self._server = server
        self._http = server.connection
        self._facts: Facts | None = None
        self._replicas = 1
        self._ballot: Ballot | None = None

    @property
    def target(self) -> Any:
        return self._server

    # ---------------------------------------------------------------- what it was made with

    def facts(self, deadline: Deadline) -> Facts:
        # Read from the configuration: a call of a method that workers do not have would raise in
        # them, and with several of them leave replies behind that later calls get.
        first = self._facts is None
        config = self._configuration(deadline, patient=first)
        try:
            parallel = config["parallel_config"]
            transfer = config.get("weight_transfer_config") or {}
            self._replicas = int(parallel["data_parallel_size"])
            backend = transfer.get("backend")
            workers = int(parallel["world_size"]) * self._replicas
            lora = config.get("lora_config") is not None
            outside = [
                name
                for name in ("data_parallel_external_lb", "data_parallel_hybrid_lb")
                if parallel.get(name)
            ]
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise EngineError(
                f"{self._http.url}/server_info answered something else: {error!r:.200}"
            ) from None
        self._require(backend, outside)
        version = str((self._get("/version", deadline) or {}).get("version", ""))
        self._facts = Facts(backend=backend, workers=workers, lora=lora, version=version)
        return self._facts

    def _configuration(self, deadline: Deadline, patient: bool) -> dict[str, Any]:
        """
        Args:
            patient: wait until the deadline for a server that does not listen yet.
        """
        while True:
            try:
                document = self._get("/server_info", deadline, config_format="json")
                break
            except (EngineDiedError, DeadlineError) as error:
                if not patient:
                    raise
                if deadline.remaining < _AGAIN:
                    raise _still_starting(error, deadline) from None
                time.sleep(_AGAIN)
        config = document.get("vllm_config") if isinstance(document, dict) else None
        if not isinstance(config, dict):
            raise EngineError(f"{self._http.url}/server_info does not tell its configuration")
        return config

    def _require(self, backend: object, outside: Sequence[str]) -> None:
        if backend != BACKEND:
            made = f"backend {backend!r}" if backend else "none"
            raise EngineError(
                f"the {self.name} takes no weights: it was started with a weight transfer of {made}"
                f"; start it with --weight-transfer-config '{json.dumps({'backend': BACKEND})}'"
            )
        if outside:
            raise EngineError(
                f"the {self.name} serves some of the data-parallel ranks only ({outside[0]}): "
                "start one server for all of them, or servers without data parallelism"
            )

    # ---------------------------------------------------------------- the workers

    def ask(self, request: str, deadline: Deadline, what: str) -> list[str]:
        facts = self._facts or self.facts(deadline)
        if self._replicas == 1:
            return self._rpc(request, deadline, what)
        with self._listening().question() as question:
            told = {**json.loads(request), "answer": question.answer}
            self._rpc(json.dumps(told), deadline, what)
            # The RPC returns when every worker has answered: what is on its way will be here.
            return question.wait(facts.workers, Deadline(GRACE))

    def _rpc(self, request: str, deadline: Deadline, what: str) -> list[str]:
        document = self._post("/collective_rpc", deadline, {"method": CALL, "args": [request]})
        results = document.get("results") if isinstance(document, dict) else None
        if not isinstance(results, list) or not all(isinstance(each, str) for each in results):
            raise EngineError(f"{self._http.url} answered something else to {what}")
        return results

    def _listening(self) -> Ballot:
        if self._ballot is None:
            self._ballot = Ballot(self._server.answer_address or self._answer_address())
        return self._ballot

    def _answer_address(self) -> str:
        host, port = self._http.endpoint
        if is_own(host):
            return "127.0.0.1"
        try:
            return own_address_towards(host, port)
        except OSError as error:
            raise EngineError(
                f"{self._http.url}: no route there tells where its workers could answer ({error}): "
                "give VLLMServer(url, answer_address=...)"
            ) from None

    # ---------------------------------------------------------------- the rest of the contract

    def is_paused(self, deadline: Deadline) -> bool:
        try:
            return any(
                bool((self._get(f"/{name}", deadline) or {}).get(name))
                for name in ("is_paused", "is_sleeping")
            )
        except EngineError as error:
            if _is_disagreement(error):  # left by a failed pause: a user's is of all ranks
                return False
            raise

    def pause(self, mode: Mode, deadline: Deadline) -> None:
        self._post("/pause", deadline, mode=mode, clear_cache=False)

    def resume(self, deadline: Deadline) -> None:
        self._post("/resume", deadline)

    def wake(self, tags: Sequence[str], deadline: Deadline) -> None:
        self._post("/wake_up", deadline, tags=list(tags))

    def reset_prefix_cache(self, deadline: Deadline) -> bool:
        done = self._post("/reset_prefix_cache", deadline, reset_running_requests=True)
        # Older releases answer without a word.
        return bool(done.get("success", True)) if isinstance(done, dict) else True

    def reset_encoder_cache(self, deadline: Deadline) -> None:
        self._post("/reset_encoder_cache", deadline)

    def set_version(self, words: str, deadline: Deadline) -> None:
        try:
            self._post("/update_weight_version", deadline, {"new_version": words})
        except EngineError as error:
            if _status(error) != 404:  # a release that knows no label
                raise

    def logprobs(self, prompts: Sequence[Sequence[int]], deadline: Deadline) -> list[list[float]]:
        return self.bounded(
            lambda: self._server.prompt_logprobs(prompts, deadline), deadline, "prompt_logprobs"
        )

    # ---------------------------------------------------------------- adapters

    serves_adapters = True
    asks_for_one_name = True

    def serve_adapter(self, name: str, path: str, stacked: bool, deadline: Deadline) -> None:
        served = self._get("/v1/models", deadline).get("data") or []
        if any(model.get("id") == name and model.get("parent") for model in served):
            self.unserve_adapter(name, deadline)  # of a driver before this one
        body = {"lora_name": name, "lora_path": path, "is_3d_lora_weight": stacked}
        self._of_adapters("/v1/load_lora_adapter", body, deadline)

    def unserve_adapter(self, name: str, deadline: Deadline) -> None:
        self._of_adapters("/v1/unload_lora_adapter", {"lora_name": name}, deadline)

    def _of_adapters(self, route: str, body: dict[str, Any], deadline: Deadline) -> None:
        within = Deadline(deadline.remaining + GRACE)
        try:
            self.bounded(
                lambda: self._http.request("POST", route, within, body, parse=False),
                deadline,
                route,
            )
        except EngineError as error:
            if _status(error) == 404:
                if "cannot be found" in str(error):  # it is not served any more
                    return
                raise EngineError(
                    f"the {self.name} takes no adapters while it runs: start it with "
                    f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=True ({error})"
                ) from None
            raise

    def close(self) -> None:
        if self._ballot is not None:
            self._ballot.close()
            self._ballot = None

    # ---------------------------------------------------------------- HTTP

    def _get(self, route: str, deadline: Deadline, **query: Any) -> Any:
        return self._request("GET", route, deadline, None, query)

    def _post(self, route: str, deadline: Deadline, body: Any = None, **query: Any) -> Any:
        return self._request("POST", route, deadline, body, query)

    def bounded(self, function: Callable[[], T], deadline: Deadline, what: str) -> T:
        """As of every client; a call that takes its time is watched."""
        within = Deadline(deadline.remaining + GRACE)
        return self._http.watched(function, within, f"the {self.name}'s {what}")

    def _request(
        self, method: str, route: str, deadline: Deadline, body: Any, query: dict[str, Any]
    ) -> Any:
        def request() -> Any:
            # The workers keep the deadline themselves, and have a grace time to say so.
            within = Deadline(deadline.remaining + GRACE)
            return self._http.request(method, route, within, body, query)

        return self.bounded(request, deadline, route)


def accepts(target: Any) -> bool:
    return isinstance(target, VLLMServer)
