"""TRL: its online trainers take their weights to vLLM by a scheme.

:func:`attach` is for trainers that generate with TRL's ``VLLMGeneration`` (``GRPOTrainer``,
``RLOOTrainer``, ...), beside a server or in the trainer's own process; :class:`Client` is TRL's
client of a server, for loops of one's own. Both hold a :class:`Link`, which is a sender and the
receiver that it drives.

TRL sets up a transfer of its own while a trainer is made, so it has to be told before: inside
``attach`` a few names of its modules are others, and afterwards what they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

from weightsync.deadline import Deadline
from weightsync.engines.vllm.client import BACKEND
from weightsync.engines.vllm.server import ServerClient, VLLMServer
from weightsync.errors import DeadlineError, EngineError, SourceError
from weightsync.manifest import Manifest
from weightsync.receiver import Receiver
from weightsync.report import SyncReport
from weightsync.scheme import WeightSyncScheme, as_scheme
from weightsync.sender import Sender
from weightsync.source import SourceOptions, as_source
from weightsync.sources.iterable import IterableSource

Metadata = Sequence[tuple[str, str, Sequence[int]]]
"""TRL's description of a stream: name, dtype (``"bfloat16"``) and shape of each tensor."""

Stream = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Plan:
    """How weights travel.

    Attributes:
        timeout: seconds for each update, and for setting up.
        sender, receiver: keywords for ``create_sender`` and ``create_receiver``.
        on_update: called with the report of each update that this process sent.
    """

    scheme: WeightSyncScheme
    timeout: float = 300.0
    sender: Mapping[str, Any] = field(default_factory=dict)
    receiver: Mapping[str, Any] = field(default_factory=dict)
    on_update: Callable[[SyncReport], None] | None = None


class Link:
    """The trainer's end of a scheme, and the engines' end, if that is here too.

    Args:
        engine: what the receiver of this process drives; None if engines have receivers elsewhere.
        leads: whether this process sends. Another rank only takes part where the model is sharded,
            and puts into its own engine, if it has one, what the sending rank published.
    """

    def __init__(self, plan: Plan, engine: Any = None, *, leads: bool = True) -> None:
        self._plan = plan
        self._engine = engine
        self._leads = leads
        self._ends = ExitStack()
        self._opened = False
        self._sender: Sender | None = None
        self._receiver: Receiver | None = None
        self._model: torch.nn.Module | None = None

    def send(self, weights: Any) -> None:
        """Bring weights into the engines. The first ones decide whether ranks send together.

        Raises:
            ReceiverError: an engine failed, died or was late; names it, in its own words.
            WeightSyncError: nothing became visible; see :meth:`Sender.update_weights`.
        """
        if not self._opened:
            self._open(weights if isinstance(weights, torch.nn.Module) else None)
        if self._sender is not None:
            # What is found out about a model once need not be found out again.
            report = self._sender.update_weights(None if weights is self._model else weights)
            if self._plan.on_update is not None:
                self._plan.on_update(report)
        if not self._leads and self._receiver is not None:
            self._take(self._receiver)

    def _open(self, model: torch.nn.Module | None) -> None:
        plan, deadline = self._plan, Deadline(self._plan.timeout)
        sender = receiver = None
        with ExitStack() as ends:
            if self._leads or (model is not None and as_source(model).inventory().of_ranks):
                options = {"timeout": plan.timeout, **plan.sender}
                sender = ends.enter_context(plan.scheme.create_sender(model, **options))
            if self._engine is not None:
                receiver = plan.scheme.create_receiver(self._engine, **plan.receiver)
                ends.enter_context(receiver)
            if sender is not None and receiver is not None and self._leads:
                sender.attach(receiver)
            if sender is not None:
                sender.connect(deadline.remaining)
            if receiver is not None and not self._leads:
                receiver.connect(deadline.remaining)
            self._ends = ends.pop_all()
        self._sender, self._receiver, self._model = sender, receiver, model
        self._opened = True

    def _take(self, receiver: Receiver) -> None:
        if receiver.poll_and_apply(self._plan.timeout) is None:
            raise DeadlineError(
                f"rank 0 sent no version to this rank within {self._plan.timeout:.1f} s"
            )

    def restore(self) -> bool:
        """Before an engine generates: give it back what it lost in sleep, or by being restarted.

        Returns:
            Whether it holds a whole version now; False too if nothing was sent yet.

        Raises:
            EngineUnusableError: it has none, since an update failed. EngineDiedError: it is gone.
        """
        if self._receiver is None:
            return False
        if self._receiver.version is not None:
            self._receiver.poll_and_apply()
        self._receiver.require_ready()
        return self._receiver.ready

    def close(self) -> None:
        """Give everything back; engines keep their weights. Idempotent."""
        self._ends.close()
        self._sender = self._receiver = self._model = None
        self._opened = False


# ---------------------------------------------------------------- a client of a server


class Client(VLLMClient):  # type: ignore[misc, unused-ignore]
    """TRL's client of a vLLM server, whose weights come by a scheme.

    The server is vLLM's own, started as TRL says, but with ``--weight-transfer-config
    '{"backend": "weightsync"}'``.

    Args:
        base_url: of the server, ``http://host:8000``.
        engine: what is given the weights, if it is not the server itself: several servers behind
            one address, say.
        token: the server's ``--api-key``.
        connection_timeout: seconds to wait for a server that does not listen yet.
        **options: of :class:`Plan`.
    """

    def __init__(
        self,
        scheme: WeightSyncScheme,
        base_url: str | None = None,
        *,
        engine: Any = None,
        token: str | None = None,
        connection_timeout: float = 0.0,
        **options: Any,
    ) -> None:
        plan = Plan(scheme, **options)
        self._token = token
        super().__init__(base_url, connection_timeout=connection_timeout)
        # TRL's default address is the one that servers listen at; as a target it is this machine.
        self._server = VLLMServer(self.base_url.replace("//0.0.0.0", "//127.0.0.1"), token)
        self._timeout = plan.timeout
        self._collected: dict[str, torch.Tensor] = {}
        self.link = Link(plan, self._server if engine is None else engine)

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        """See that the server takes weights from a scheme.

        Args:
            device: not used: weights are where the model is.

        Raises:
            EngineError: it was started for another transfer; says how to start it.
        """
        ServerClient(self._server).facts(Deadline(self._timeout))

    def close_communicator(self) -> None:
        """End sender and receiver; the server keeps its weights."""
        self.link.close()
        self._server.close()

    # ---------------------------------------------------------------- updates

    def update_model_params(self, model: Any) -> None:
        """Send a model, under the names of its checkpoint; adapters are merged on the way."""
        self.link.send(model)

    def update_named_params(self, metadata: Metadata, named_params: Stream) -> None:
        """Send a stream of all weights, under the names that it has."""
        manifest = Manifest.build((name, _dtype(dtype), shape) for name, dtype, shape in metadata)
        self.link.send(IterableSource(iter(named_params), SourceOptions(manifest=manifest)))

    def update_named_param(self, name: str, weights: torch.Tensor) -> None:
        """Keep a copy for the update that ``reset_prefix_cache`` or ``weight_update`` ends.

        An engine takes whole sets of weights only. Give the model, or a stream, where a copy of it
        is too much.
        """
        self._collected[name] = weights.detach().clone()

    @contextmanager
    def weight_update(self) -> Iterator[None]:
        """All ``update_named_param`` inside are one update; none if the block ends by an error."""
        self._collected.clear()
        try:
            yield
            self._send_collected()
        finally:
            self._collected.clear()

    def reset_prefix_cache(self) -> None:
        """Send what was collected, which resets the server's caches too; else only reset them."""
        if self._collected:
            self._send_collected()
        else:
            super().reset_prefix_cache()

    def _send_collected(self) -> None:
        if self._collected:
            collected, self._collected = self._collected, {}
            self.link.send(collected)

    # ---------------------------------------------------------------- requests

    def check_server(self, *arguments: Any, **keywords: Any) -> None:
        """As TRL's, which calls it before anything else."""
        if self._token is not None:
            self.session.headers["Authorization"] = f"Bearer {self._token}"
        super().check_server(*arguments, **keywords)

    def _post(self, url: str, **request: Any) -> Any:
        """As TRL's, but it ends at the deadline, and when the server does, and says which."""
        ask = partial(super()._post, url, **request)
        what = f"{self._server}'s {url.removeprefix(self.base_url)}"
        return self._server.connection.watched(ask, Deadline(self._timeout), what)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise SourceError(f"{name!r:.80} is no dtype of torch's")
    return found


# ---------------------------------------------------------------- trainers


@contextmanager
def attach(
    scheme: WeightSyncScheme | str,
    *,
    engine: Any = None,
    token: str | None = None,
    **options: Any,
) -> Iterator[None]:
    """A trainer of TRL's that is made and trains inside takes its weights to vLLM by ``scheme``.

    Args:
        scheme: one, or its URL; for one trainer.
        engine: what is given the weights, if it is not the server that the trainer's
            configuration names: several servers behind one address, say.
        token: the server's ``--api-key``.
        **options: of :class:`Plan`: ``timeout``, ``sender``, ``receiver``, ``on_update``.

    Raises:
        EngineError: the engine was not made for it. ReceiverError: an engine failed, died or was
        late. Both come out of the trainer.
    """
    chosen = as_scheme(scheme)
    plan = Plan(chosen, **options)
    with ExitStack() as stack:

        def sync_weights(generation: Any) -> None:
            link = getattr(generation, _LINK, None)
            if link is None:
                link = stack.enter_context(closing(_link(plan, generation, engine)))
                setattr(generation, _LINK, link)
            if generation.mode == "colocate" and generation.enable_sleep_mode:
                vllm_generation.empty_cache()  # or there is no room for what sleeps
            link.send(generation.model)
            generation._llm_weights_sleeping = False

        def generate(generation: Any, *arguments: Any, **keywords: Any) -> Any:
            link = getattr(generation, _LINK, None)
            if link is not None and link.restore():
                generation._llm_weights_sleeping = False
            return generates(generation, *arguments, **keywords)

        def client(base_url: str, group_port: int, connection_timeout: float) -> Client:
            made = Client(
                chosen,
                base_url,
                engine=engine,
                token=token,
                connection_timeout=min(connection_timeout, plan.timeout),
                **options,
            )
            stack.callback(made.close_communicator)
            return made

        generates = VLLMGeneration.generate
        made = partial(_made_for_us, vllm_generation.LLM)
        _replace(stack, vllm_generation, "VLLMClient", client)
        _replace(stack, vllm_generation, "LLM", made)
        _replace(stack, VLLMGeneration, "sync_weights", sync_weights)
        _replace(stack, VLLMGeneration, "generate", generate)
        yield


_TOO_LATE = (
    "the trainer was made before: make it inside `with attach(scheme):` too, as TRL sets up its "
    "own transfer while it is made"
)

_MADE = "_weightsync_made"
"""Of an ``LLM`` that was made inside ``attach``."""

_LINK = "_weightsync_link"
"""Of a generation object of TRL's: the link that it is given its weights by."""


def _link(plan: Plan, generation: Any, engine: Any) -> Link:
    leads = bool(generation.accelerator.is_main_process)
    if generation.mode == "colocate":
        if generation.tensor_parallel_size > 1:
            raise EngineError(
                "engines in the trainer's processes take weights by a scheme with "
                "vllm_tensor_parallel_size=1 only; use vllm_mode='server'"
            )
        if not getattr(generation.llm, _MADE, False):
            raise EngineError(_TOO_LATE)
        return Link(plan, generation.llm, leads=leads)
    if leads:
        if not isinstance(generation.vllm_client, Client):
            raise EngineError(_TOO_LATE)
        link: Link = generation.vllm_client.link
        return link
    return Link(plan, leads=False)


def _made_for_us(make: Callable[..., Any], **options: Any) -> Any:
    """An ``LLM`` that takes weights from a scheme."""
    from vllm.config import WeightTransferConfig

    llm = make(**options, weight_transfer_config=WeightTransferConfig(backend=BACKEND))
    setattr(llm, _MADE, True)
    return llm


def _replace(stack: ExitStack, place: Any, name: str, value: Any) -> None:
    """Until the stack is left."""
    stack.callback(setattr, place, name, getattr(place, name))
    setattr(place, name, value)
