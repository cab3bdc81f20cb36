"""``multi_gpu.py``: vLLM with TP=2, and two replicas, beside a trainer's GPU.

Weights come by copy plan over shared memory, by NCCLScheme, and by vLLM's own ``nccl`` engine in
the same workers. After each way the engines must generate what one does that loaded the same
weights from a checkpoint. Where the trainer's GPU is also an engine's, NCCL goes through sockets:
the trainer says then that it is another host.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")

from gpu_paths import worker_takes
from gpu_shapes import config_of
from multi_part import (
    PATIENCE,
    Part,
    ask_all,
    become,
    catch_up,
    change,
    connect,
    disconnect,
    hold,
    in_milliseconds,
    nbytes_of,
    publish,
    reset,
    settle,
)

import weightsync as ws
from weightsync.schemes.nccl.endpoint import reserve_port
from weightsync.testing.processes import Peer, PeerError

START = {"cuda": 200.0, "cpu": 600.0}
"""Seconds for an engine to start, beside others that do."""

SOON = 40.0
"""Seconds for a version that is being published to come."""

PROMPTS = [[1, 2, 3, 4], [9, 8, 7], [42], [5] * 20]

THEIRS = "vLLM's nccl engine, packed"


# -------------------------------------------------------------------- the trainer's process


def save(state: Any, folder: str) -> None:
    """A checkpoint of the weights as they are."""
    from safetensors.torch import save_file

    host = {name: tensor.cpu() for name, tensor in state.weights.items()}
    save_file(host, f"{folder}/model.safetensors", metadata={"format": "pt"})


def join_theirs(state: Any, port: int, size: int) -> None:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    about = {"master_address": "127.0.0.1", "master_port": port, "world_size": size}
    state.theirs = NCCLWeightTransferEngine.trainer_init(about)


def send_theirs(state: Any) -> tuple[float, float]:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    began = time.monotonic()
    about = {"group": state.theirs, "packed": True}
    NCCLWeightTransferEngine.trainer_send_weights(iter(state.weights.items()), about)
    settle(state)
    return began, time.monotonic()


# -------------------------------------------------------------------- an engine's process


def start_engine(state: Any, folder: str, load_format: str, options: dict[str, Any]) -> None:
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    state.llm = LLM(
        model=folder,
        load_format=load_format,
        skip_tokenizer_init=True,
        enforce_eager=True,  # as for the engine that is compared with: seconds to start
        max_model_len=256,
        max_num_seqs=16,
        weight_transfer_config=WeightTransferConfig(backend="weightsync"),
        **options,
    )


def tokens(state: Any) -> list[list[int]]:
    """Greedy, one prompt after the other: what shares a batch changes the last bits."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=16, detokenize=False, ignore_eos=True)
    found = []
    for prompt in PROMPTS:
        (output,) = state.llm.generate({"prompt_token_ids": prompt}, greedy, use_tqdm=False)
        found.append(list(output.outputs[0].token_ids))
    return found


def receive(state: Any, url: str, name: str, options: dict[str, Any]) -> None:
    scheme = ws.scheme_from_url(url)
    state.receiver = scheme.create_receiver(state.llm, id=name, **options)
    state.receiver.connect(PATIENCE)


def update(state: Any) -> dict[str, Any]:
    report = state.receiver.poll_and_apply(SOON)
    ended = time.monotonic()
    assert report is not None, "no version came"
    return {
        "ended": ended,
        "apply": report.seconds.apply,
        "pause": report.seconds.pause,
        "notes": list(report.notes),
    }


def stop_receiving(state: Any) -> None:
    receiver = state.__dict__.pop("receiver", None)
    if receiver is not None:
        receiver.shutdown()


def take(state: Any, backend: str) -> None:
    state.llm.collective_rpc(worker_takes, args=(backend,))


def join(state: Any, port: int, offset: int, size: int) -> None:
    about = {"master_address": "127.0.0.1", "master_port": port}
    about |= {"rank_offset": offset, "world_size": size}
    state.llm.init_weight_transfer_engine({"init_info": about})


def load(state: Any, info: dict[str, Any]) -> tuple[float, float]:
    began = time.monotonic()
    state.llm.start_weight_update()
    state.llm.update_weights({"update_info": info})
    state.llm.finish_weight_update()
    state.llm.reset_prefix_cache()
    return began, time.monotonic()


def end_engine(state: Any) -> None:
    llm = state.__dict__.pop("llm", None)
    if llm is not None:
        llm.llm_engine.engine_core.shutdown()


# -------------------------------------------------------------------- who is where


@dataclass(frozen=True)
class Form:
    """One engine or several alike.

    Attributes:
        gpus: of each engine.
        reference: what an engine that loaded the trainer's weights generates.
    """

    title: str
    gpus: tuple[tuple[int, ...], ...]
    engines: tuple[Peer, ...]
    reference: list[list[int]]

    @property
    def workers(self) -> int:
        return len(self.gpus[0])

    @property
    def apart(self) -> bool:
        """Whether none is on the trainer's GPU."""
        return all(0 not in each for each in self.gpus)


def places(gpus: int) -> dict[str, tuple[tuple[int, ...], ...]]:
    """The GPUs of each form's engines; the trainer is on the first, alone where it can be.

    >>> places(2)
    {'TP=2': ((0, 1),), 'replicas': ((0,), (1,)), 'TP=1': ((1,),)}
    >>> places(4)
    {'TP=2': ((1, 2),), 'replicas': ((1,), (2,))}
    """
    if gpus == 1:
        return {"TP=1": ((0,),)}
    if gpus == 2:  # the second replica also alone, on a GPU of its own beside the trainer's
        return {"TP=2": ((0, 1),), "replicas": ((0,), (1,)), "TP=1": ((1,),)}
    return {"TP=2": ((1, 2),), "replicas": ((1,), (2,))}


class Room:
    """The processes, each started once, and which GPUs they see."""

    def __init__(self, part: Part, stack: ExitStack) -> None:
        self._part = part
        self._stack = stack
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        self._visible = visible.split(",") if visible else [str(n) for n in range(part.gpus)]

    def peer(self, gpus: tuple[int, ...], **environment: str) -> Peer:
        peer = Peer(daemon=False)  # an engine has processes of its own
        self._stack.callback(peer.dispose)
        if self._part.device == "cuda":
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self._visible[gpu] for gpu in gpus)
        peer.call(become, environment, self._part.device, within=PATIENCE)
        return peer

    def trainer(self, **environment: str) -> Peer:
        trainer = self.peer((0,), **environment)
        trainer.call(hold, self._part.sizes(), within=PATIENCE)
        return trainer

    def begin_engine(self, gpus: tuple[int, ...], load_format: str) -> Peer:
        """Without waiting for it: ``result`` does."""
        options: dict[str, Any] = {"tensor_parallel_size": len(gpus), "dtype": "bfloat16"}
        if self._part.device == "cuda":
            # Not found out by looking at free memory, which others take meanwhile.
            options |= {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 30}
        peer = self.peer(gpus)
        peer.start(start_engine, f"{self._part.folder}/model", load_format, options)
        return peer


def end(engines: Sequence[Peer]) -> None:
    """In order, as far as they still listen."""
    with suppress(Exception):
        catch_up(engines, within=10)
        ask_all(engines, end_engine, within=20)
    for engine in engines:
        engine.dispose()


def started(part: Part, room: Room) -> Iterator[Form]:
    """All engines start at the same time; those that only say what is right end at once."""
    layout = places(part.gpus)
    engines = {
        gpus: room.begin_engine(gpus, "dummy")
        for gpus in dict.fromkeys(each for group in layout.values() for each in group)
    }
    likes = {len(group[0]): group[-1] for group in layout.values()}
    right = {workers: room.begin_engine(gpus, "safetensors") for workers, gpus in likes.items()}
    wanted: dict[int, list[list[int]]] = {}
    for workers, engine in right.items():
        with part.trying(f"an engine of {workers} workers that loads a checkpoint"):
            engine.result(START[part.device])
            wanted[workers] = engine.call(tokens, within=PATIENCE)
        end([engine])
    living = {}
    for gpus, engine in engines.items():
        with part.trying(f"an engine on {gpus}"):
            engine.result(START[part.device])
            living[gpus] = engine
    for title, group in layout.items():
        if all(gpus in living for gpus in group) and len(group[0]) in wanted:
            mine = tuple(living[gpus] for gpus in group)
            yield Form(title, group, mine, wanted[len(group[0])])
        else:
            part.say(title, error="its engines, or the one to compare with, did not start")


# -------------------------------------------------------------------- what is measured


@contextmanager
def receiving(
    part: Part, form: Form, trainer: Peer, url: str, options: dict[str, Any]
) -> Iterator[None]:
    try:
        trainer.call(connect, url, within=PATIENCE)
        for number, engine in enumerate(form.engines):
            engine.start(receive, url, f"engine-{number}", options)
        for engine in form.engines:
            engine.result(PATIENCE)
        yield
    finally:
        catch_up([trainer, *form.engines])
        with suppress(PeerError):
            ask_all(form.engines, stop_receiving, within=20)
            trainer.call(disconnect, within=20)


def ours(
    part: Part, way: str, form: Form, trainer: Peer, url: str, options: dict[str, Any]
) -> None:
    times: dict[str, list[float]] = {"publish": [], "apply": [], "pause": [], "end to end": []}
    notes: list[str] = []
    with receiving(part, form, trainer, url, options):
        for number in range(1, part.rounds + 5):
            last = number == part.rounds + 4  # weights as they were at first: not measured
            trainer.call(reset if last else change, within=PATIENCE)
            for engine in form.engines:
                engine.start(update)
            began, published = trainer.call(publish, number, within=2 * PATIENCE)
            told = [engine.result(2 * PATIENCE) for engine in form.engines]
            if number > 3 and not last:
                times["publish"].append(published - began)
                times["end to end"].append(max(each["ended"] for each in told) - began)
                for column in ("apply", "pause"):
                    times[column].append(max(each[column] for each in told))
                notes = told[0]["notes"]
            if number == part.rounds + 3:
                require_others(form)
        same = [generated == form.reference for generated in ask_all(form.engines, tokens)]
    part.say(
        f"{form.title}, {way}",
        nbytes=nbytes_of(part.sizes()),
        ours=True,
        workers=form.workers,
        apart=form.apart,
        tokens=all(same),
        read=read_by_plan(" ".join(notes)),
        notes=notes,
        **{column: in_milliseconds(took) for column, took in times.items()},
    )


def theirs(part: Part, form: Form, trainer: Peer) -> None:
    """vLLM's own engine for the same, in the same workers."""
    sizes = part.sizes()
    info = {
        "names": [name for name, _ in sizes],
        "dtype_names": ["bfloat16"] * len(sizes),
        "shapes": [list(size) for _, size in sizes],
        "packed": True,
    }
    port, size = reserve_port("127.0.0.1"), 1 + form.workers * len(form.engines)
    ask_all(form.engines, take, "nccl")
    try:
        trainer.start(join_theirs, port, size)
        for number, engine in enumerate(form.engines):
            engine.start(join, port, 1 + number * form.workers, size)
        for peer in (trainer, *form.engines):
            peer.result(PATIENCE)
        whole, pauses = [], []
        for number in range(part.rounds + 2):
            last = number == part.rounds + 1
            trainer.call(reset if last else change, within=PATIENCE)
            for engine in form.engines:
                engine.start(load, info)
            began, _ = trainer.call(send_theirs, within=PATIENCE)
            spans = [engine.result(PATIENCE) for engine in form.engines]
            if number and not last:
                first = min(began, *(begin for begin, _ in spans))
                whole.append(max(ended for _, ended in spans) - first)
                pauses.append(max(ended - begin for begin, ended in spans))
            if number == part.rounds:
                require_others(form)
        same = [generated == form.reference for generated in ask_all(form.engines, tokens)]
    finally:
        catch_up([trainer, *form.engines])
        ask_all(form.engines, take, "weightsync")
    part.say(
        f"{form.title}, {THEIRS}",
        nbytes=nbytes_of(sizes),
        workers=form.workers,
        apart=form.apart,
        tokens=all(same),
        pause=in_milliseconds(pauses),
        **{"end to end": in_milliseconds(whole)},
    )


def read_by_plan(notes: str) -> list[float]:
    """GB that the ranks read, each figure once; none if some layers are not planned."""
    if "by vLLM's reload" in notes:
        return []
    return [float(found) for found in re.findall(r"by plan \(([\d.]+) GB\)", notes)]


def require_others(form: Form) -> None:
    """
    Raises:
        AssertionError: the weights were changed, and generate what they did before: equal tokens at
            the end would say nothing.
    """
    found = ask_all(form.engines, tokens)
    assert form.reference not in found, "changed weights have not changed what is generated"


def over_nccl(part: Part, form: Form, trainer: Peer) -> None:
    scheme = ws.NCCLScheme(
        backend=part.backend,  # type: ignore[arg-type]
        num_replicas=len(form.engines),
        gpus_per_replica=form.workers,
    )
    with part.trying(f"{form.title}, NCCLScheme"):
        ours(part, "NCCLScheme", form, trainer, scheme.to_url(), {})
    if part.device == "cuda":
        with part.trying(f"{form.title}, {THEIRS}"):
            theirs(part, form, trainer)


def main() -> None:
    part = Part.of_arguments()
    os.makedirs(f"{part.folder}/model")
    config_of(part.shape).save_pretrained(f"{part.folder}/model")
    with part.trying("the rest of engine"), ExitStack() as stack:
        room = Room(part, stack)
        trainer = room.trainer()
        trainer.call(save, f"{part.folder}/model", within=PATIENCE)
        forms = list(started(part, room))
        for form in forms:
            for way, options in (
                ("double buffer, plan", {"apply": "plan"}),
                ("double buffer, staged", {"apply": "plan", "stage": True}),
            ):
                with part.trying(f"{form.title}, {way}"):
                    ours(part, way, form, trainer, f"shm://{part.folder}/run", options)
        for form in forms:
            if form.apart or part.device == "cpu":
                over_nccl(part, form, trainer)
        together = [form for form in forms if not form.apart and part.device == "cuda"]
        if together:  # last: over sockets, which is right or not, and says nothing of speed
            elsewhere = room.trainer(NCCL_HOSTID="trainer")
            for form in together:
                over_nccl(part, form, elsewhere)
        end(list(dict.fromkeys(engine for form in forms for engine in form.engines)))


if __name__ == "__main__":
    main()
