"""One shape of ``gpu.py``: every path, on one engine, one row each.

python benchmarks/gpu_paths.py 7b --rounds 5
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from gpu_shapes import config_of, specs

import weightsync as ws

PIECE = 2 << 30
"""Bytes of a copy over the bus that the others are compared with."""

PATIENCE = 120
"""Seconds for an answer of the trainer's."""

Row = dict[str, Any]


class TrainerError(Exception):
    """Something failed in the trainer's process; has its words."""


# ---------------------------------------------------------------- the trainer, in its own process


class Trainer:
    """Holds the weights on the GPU, and changes and sends them when it is told to."""

    def __init__(self, shape: str) -> None:
        config = config_of(shape)
        self.weights = {
            name: torch.randn(size, dtype=torch.bfloat16, device="cuda").mul_(0.02)
            for name, size in specs(config)
        }
        self.sender: ws.Sender | None = None

    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.weights.values())

    def change(self) -> None:
        for tensor in self.weights.values():
            tensor.mul_(-1.0078125)
        torch.cuda.synchronize()

    def connect(self, url: str) -> None:
        self.sender = ws.scheme_from_url(url).create_sender(self.weights)
        self.sender.connect()

    def publish(self, version: int) -> tuple[float, float]:
        assert self.sender is not None
        began = time.monotonic()
        self.sender.update_weights(version=version)
        return began, time.monotonic()

    def shutdown(self) -> None:
        if self.sender is not None:
            self.sender.shutdown()
            self.sender = None

    def sums(self) -> list[float]:
        return sums(self.weights)

    def limits(self) -> dict[str, float]:
        """Bytes a second: device to page-locked host memory, back, both at once; on the device."""
        there, here = torch.empty(2, PIECE, dtype=torch.uint8, device="cuda")
        out, back = (torch.empty(PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(2))
        one, other = torch.cuda.Stream(), torch.cuda.Stream()

        def send() -> None:
            with torch.cuda.stream(one):
                out.copy_(there, non_blocking=True)

        def fetch() -> None:
            with torch.cuda.stream(other):
                here.copy_(back, non_blocking=True)

        def both() -> None:
            send()
            fetch()

        ways = {"to host": send, "to device": fetch, "both": both}
        found = {name: PIECE / fastest(way) for name, way in ways.items()}
        found["on device"] = PIECE / fastest(lambda: here.copy_(there))
        return found

    def handles(self) -> tuple[list[str], list[str], list[list[int]], list[Any], float]:
        """What vLLM's ``ipc`` engine wants of each tensor, and when it was asked for."""
        from torch.multiprocessing.reductions import reduce_tensor

        began = time.monotonic()
        uuid = str(torch.cuda.get_device_properties(0).uuid)
        handles = [{uuid: reduce_tensor(tensor)[1]} for tensor in self.weights.values()]
        shapes = [list(tensor.shape) for tensor in self.weights.values()]
        return list(self.weights), ["bfloat16"] * len(shapes), shapes, handles, began

    def packed(self, pipe: Connection) -> float:
        """vLLM's own producer of packed buffers; each waits until the engine has it."""
        from vllm.distributed.weight_transfer.ipc_engine import (
            IPCTrainerSendWeightsArgs,
            IPCWeightTransferEngine,
        )

        def send(info: Any) -> None:
            from dataclasses import asdict

            pipe.send(asdict(info))
            pipe.recv()

        began = time.monotonic()
        arguments = IPCTrainerSendWeightsArgs(send_mode=send, packed=True)
        IPCWeightTransferEngine.trainer_send_weights(iter(self.weights.items()), arguments)
        pipe.send(None)
        return began

    def memmap(self, path: str) -> tuple[float, float]:
        """What TorchRL does: every tensor to the CPU, into a memory-mapped file of its own."""
        began = time.monotonic()
        for number, tensor in enumerate(self.weights.values()):
            host = tensor.cpu().view(torch.uint8).reshape(-1)
            with open(os.open(f"{path}/{number}", os.O_RDWR | os.O_CREAT), "r+b") as file:
                file.truncate(host.numel())  # there already, but for the first time
                mapped = torch.frombuffer(mmap.mmap(file.fileno(), host.numel()), dtype=torch.uint8)
            mapped.copy_(host)
        return began, time.monotonic()


def fastest(way: Callable[[], object]) -> float:
    times = []
    for _ in range(4):
        torch.cuda.synchronize()
        began = time.perf_counter()
        way()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return min(times)


def train(pipe: Connection, shape: str) -> None:
    try:
        trainer = Trainer(shape)
    except Exception as error:
        pipe.send(TrainerError(f"{type(error).__name__}: {error!s:.300}"))
        return
    pipe.send("ready")
    while (request := pipe.recv()) is not None:
        name, arguments = request
        if name == "packed":
            arguments = (pipe,)
        try:
            answer = getattr(trainer, name)(*arguments)
        except Exception as error:
            answer = TrainerError(f"{type(error).__name__}: {error!s:.300}")
        pipe.send(answer)
        torch.cuda.empty_cache()


# ---------------------------------------------------------------- in the engine's worker


def worker_times(worker: Any, shape: str, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of what vLLM offers to load weights that are on the GPU already."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import reload

    model, config = worker.model_runner.get_model(), worker.model_runner.model_config
    wanted = list(specs(config_of(shape)))
    count = sum(torch.Size(size).numel() for _, size in wanted)
    arena = torch.empty(count, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)
    views, at = {}, 0
    for name, size in wanted:
        length = torch.Size(size).numel()
        views[name] = arena[at : at + length].view(size)
        at += length
    other = torch.empty_like(arena)

    def layerwise() -> None:
        reload.initialize_layerwise_reload(model)
        model.load_weights(iter(views.items()))
        reload.finalize_layerwise_reload(model, config)

    def one_by_one() -> None:
        for entry in views.items():
            model.load_weights([entry])

    ways = {
        "vLLM's layerwise reload, on the GPU": layerwise,
        "vLLM's load_weights, on the GPU": lambda: model.load_weights(iter(views.items())),
        "TRL's way (colocate): load_weights one by one": one_by_one,
        "one flat copy on the GPU": lambda: other.copy_(arena),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    with set_current_vllm_config(worker.vllm_config), torch.no_grad():
        for number in range(rounds + 1):
            for name, way in ways.items():
                torch.cuda.synchronize()
                began = time.perf_counter()
                way()
                torch.cuda.synchronize()
                if number:
                    found[name].append((time.perf_counter() - began) * 1e3)
    return found


def worker_load(worker: Any, shape: str, path: str) -> None:
    """What TorchRL does in a worker: map the files, and have vLLM load the tensors."""
    model = worker.model_runner.get_model()

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for number, (name, size) in enumerate(specs(config_of(shape))):
            with open(f"{path}/{number}", "r+b") as file:
                mapped = mmap.mmap(file.fileno(), 0)
            yield name, torch.frombuffer(mapped, dtype=torch.bfloat16).view(size)

    with torch.no_grad():
        model.load_weights(tensors())
    torch.cuda.synchronize()


def worker_takes(worker: Any, backend: str) -> None:
    """Have the worker take weights by one of vLLM's own engines, or by ours again."""
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    worker = getattr(worker, "worker", worker)  # vLLM hands out what wraps it
    if backend == "weightsync":
        worker.weight_transfer_engine = worker.ours
        return
    worker.ours = worker.weight_transfer_engine
    config, model = WeightTransferConfig(backend=backend), worker.model_runner.get_model()
    worker.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
        config, worker.vllm_config, worker.device, model
    )


def worker_sums(worker: Any) -> list[float]:
    """Of the norms and the output layer: enough to see that weights have arrived."""
    model = worker.model_runner.get_model()
    return sums(dict(model.named_parameters()))


def sums(named: dict[str, torch.Tensor]) -> list[float]:
    """Of tensors that the trainer and the engine hold under the same names."""
    chosen = [name for name in named if "norm" in name or "lm_head" in name or "o_proj" in name]
    return [float(named[name].detach().double().sum()) for name in sorted(chosen)]


# ---------------------------------------------------------------- the engine, and what is measured


class Memory:
    """The most that GPU and host memory have grown by, looked at every two milliseconds."""

    def __init__(self) -> None:
        self.gpu = self.host = 0.0
        self._from = self._now()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @staticmethod
    def _now() -> tuple[float, float]:
        free, total = torch.cuda.mem_get_info()
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":") for line in file)
        return (total - free) / 1e9, -int(fields["MemAvailable"].split()[0]) * 1024 / 1e9

    def _watch(self) -> None:
        while not self._over.wait(0.002):
            gpu, host = self._now()
            self.gpu = max(self.gpu, gpu - self._from[0])
            self.host = max(self.host, host - self._from[1])

    def row(self) -> Row:
        self._over.set()
        self._thread.join()
        return {"gpu": self.gpu, "host": self.host}


class Bench:
    def __init__(self, shape: str, rounds: int) -> None:
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        self.shape, self.rounds = shape, rounds
        folder = tempfile.mkdtemp()
        config_of(shape).save_pretrained(folder)
        self.llm = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=2048,
            max_num_seqs=16,
            dtype="bfloat16",
            gpu_memory_utilization=0.25,
            weight_transfer_config=WeightTransferConfig(backend="weightsync"),
        )
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.trainer = context.Process(target=train, args=(other, shape), daemon=True)
        self.trainer.start()
        other.close()  # so that its end is heard
        self.heard()
        self.nbytes = self.ask("nbytes")
        self.url, self.number = "", 0

    def ask(self, name: str, *arguments: Any) -> Any:
        self.pipe.send((name, arguments))
        return self.heard()

    def heard(self) -> Any:
        """
        Raises:
            TrainerError: what was asked for failed, or takes too long.
        """
        if not self.pipe.poll(PATIENCE):
            raise TrainerError(f"the trainer did not answer within {PATIENCE} s")
        answer = self.pipe.recv()
        if isinstance(answer, TrainerError):
            raise answer
        return answer

    def say(self, path: str, limit: float | None = None, **row: Any) -> None:
        """
        Args:
            limit: milliseconds that the bytes take at the speed that bounds the path.
        """
        card = torch.cuda.get_device_name()
        about = {"shape": self.shape, "path": path, "nbytes": self.nbytes, "limit": limit}
        about["device"] = card
        print(json.dumps({**about, **row}), flush=True)

    @contextmanager
    def trying(self, path: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            words = f"{type(error).__name__}: {error!s:.300}"
            print(json.dumps({"shape": self.shape, "path": path, "error": words}), flush=True)

    def end(self) -> None:
        self.pipe.send(None)
        self.trainer.join(20)
        self.llm.llm_engine.engine_core.shutdown()

    # ------------------------------------------------------------ ours

    @contextmanager
    def receiving(self, url: str, **options: Any) -> Iterator[ws.Receiver]:
        """A receiver on the engine that has what the trainer sent before, warm."""
        if url != self.url:
            self.ask("shutdown")
            self.ask("connect", url)
            self.url, self.number = url, 0
        receiver = ws.scheme_from_url(url).create_receiver(self.llm, **options)
        try:
            receiver.connect()
            receiver.poll_and_apply()  # what was sent for the path before
            for _ in range(3):  # both slots are new, and plans are made
                self.change_and_update(receiver)
            yield receiver
        finally:
            receiver.shutdown()

    def ours(self, path: str, url: str, limit: float | None, **options: Any) -> None:
        times: dict[str, list[float]] = {}
        memory = Memory()
        try:
            with self.receiving(url, **options) as receiver:
                for _ in range(self.rounds):
                    report, (began, published), ended = self.change_and_update(receiver)
                    seconds = report.seconds
                    written = [float(n.split()[2]) for n in report.notes if n.startswith("written")]
                    for name, value in (
                        ("publish", published - began),
                        ("apply", seconds.apply),
                        ("pause", seconds.pause),
                        ("end to end", ended - began),
                    ):
                        times.setdefault(name, []).append(value * 1e3)
                    times.setdefault("written", []).extend(written)
                self._require_right(receiver)
                notes = list(report.notes)
                self.say(path, limit, ours=True, notes=notes, **times, **memory.row())
        finally:
            memory.row()

    def _require_right(self, receiver: ws.Receiver) -> None:
        """
        Raises:
            AssertionError: the engine holds something else than the trainer.
        """
        if self.llm.collective_rpc(worker_sums) != [self.ask("sums")]:
            raise AssertionError("the engine's sums are not those of the trainer")
        if self.url.startswith("shm"):  # of a version that was never copied there is nothing left
            outcome = receiver.verify_weights()
            if outcome.different or outcome.unchecked or not outcome.checked:
                raise AssertionError(f"the engine holds something else: {outcome!s:.200}")

    def change_and_update(self, receiver: ws.Receiver) -> tuple[Any, tuple[float, float], float]:
        """
        Returns:
            The report; when the trainer's call began and ended; when the engine had gone on.
        """
        self.ask("change")
        self.number += 1
        self.pipe.send(("publish", (self.number,)))
        report = None
        until = time.monotonic() + PATIENCE
        while report is None and time.monotonic() < until and not self.pipe.poll():
            report = receiver.poll_and_apply(timeout=1)
        if report is None:  # published a moment ago, or failed
            report = receiver.poll_and_apply(timeout=1)
        ended = time.monotonic()
        published = self.heard()
        if report is None:
            raise TrainerError("it was published, and the receiver saw nothing")
        return report, published, ended

    def soak(self, path: str, url: str, updates: int, **options: Any) -> None:
        with self.receiving(url, **options) as receiver:
            found = self.soaked(receiver, updates)
        self.say(f"{path}: soak", soak=found)

    def soaked(self, receiver: ws.Receiver, updates: int) -> dict[str, float]:
        """Updates with requests running, each compared with a dry run of vLLM's own reload.

        ``met``: at how many updates requests were unfinished before it and after it.
        """
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        parameters = SamplingParams(max_tokens=1900, ignore_eos=True, detokenize=False)
        free, running, wrong, met, tokens, begun = [], set(), 0, 0, 0, 0

        def listen(seconds: float) -> None:
            nonlocal tokens
            until = time.monotonic() + seconds
            while engine.has_unfinished_requests() and time.monotonic() < until:
                for output in engine.step():
                    if output.finished:
                        running.discard(output.request_id)
                        tokens += len(output.outputs[0].token_ids)

        for _ in range(updates):
            while len(running) < 8:
                begun += 1
                prompt = {"prompt_token_ids": [1 + begun, 2, 3]}
                engine.add_request(f"soak-{begun}", prompt, parameters)
                running.add(f"soak-{begun}")
            listen(0.1)  # all that has come meanwhile, so that it is known which still run
            before = set(running)
            self.change_and_update(receiver)
            listen(0.1)
            met += bool(before & running)
            outcome = receiver.verify_weights()
            wrong += bool(outcome.different or outcome.unchecked)
            free.append(torch.cuda.mem_get_info()[0])
        listen(PATIENCE)
        lost = (free[updates // 5] - free[-1]) / 1e6
        counts = {"updates": updates, "met": met, "wrong": wrong, "tokens": tokens}
        return {**counts, "requests": begun, "grown MB": lost}

    # ------------------------------------------------------------ others

    def others(self) -> None:
        """vLLM's own engine for the same, in the same worker."""
        self.llm.collective_rpc(worker_takes, args=("ipc",))
        for packed in (False, True):
            with self.trying(f"vLLM's ipc engine{', packed' if packed else ''}"):
                self.vllm_ipc(packed)
        self.llm.collective_rpc(worker_takes, args=("weightsync",))

    def vllm_ipc(self, packed: bool) -> None:
        path = f"vLLM's ipc engine{', packed' if packed else ''}"
        times: list[float] = []
        memory = Memory()
        self.llm.init_weight_transfer_engine({"init_info": {}})
        for number in range(self.rounds + 1):
            self.ask("change")
            if packed:
                self.pipe.send(("packed", ()))
                self.llm.start_weight_update()
                while (info := self.heard()) is not None:
                    self.llm.update_weights({"update_info": info})
                    self.pipe.send("taken")
                began = self.heard()
            else:
                names, dtypes, shapes, handles, began = self.ask("handles")
                info = {
                    "names": names,
                    "dtype_names": dtypes,
                    "shapes": shapes,
                    "ipc_handles": handles,
                }
                self.llm.start_weight_update()
                self.llm.update_weights({"update_info": info})
            self.llm.finish_weight_update()
            self.llm.reset_prefix_cache()
            if number:
                times.append((time.monotonic() - began) * 1e3)
        if self.llm.collective_rpc(worker_sums) != [self.ask("sums")]:
            raise AssertionError("the engine's sums are not those of the trainer")
        self.say(path, None, **{"end to end": times}, **memory.row())

    def torchrl_way(self) -> None:
        memory = Memory()
        published, applied, whole = [], [], []
        folder = tempfile.mkdtemp(dir="/dev/shm", prefix="weightsync-bench-")
        try:
            for number in range(2):
                self.ask("change")
                began, done = self.ask("memmap", folder)
                self.llm.collective_rpc(worker_load, args=(self.shape, folder))
                self.llm.reset_prefix_cache()
                ended = time.monotonic()
                if number:
                    published.append((done - began) * 1e3)
                    applied.append((ended - done) * 1e3)
                    whole.append((ended - began) * 1e3)
        finally:
            shutil.rmtree(folder)
        times = {"publish": published, "apply": applied, "end to end": whole}
        self.say("TorchRL's way: memmap, load_weights", None, **times, **memory.row())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shape")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--soak", type=int, default=0)
    options = parser.parse_args()
    bench = Bench(options.shape, options.rounds)
    try:
        speeds = bench.ask("limits")
        for name, speed in speeds.items():
            time_taken = bench.nbytes / speed * 1e3
            bench.say(f"limit: one copy {name}", time_taken, apply=[time_taken])
        bus = bench.nbytes / min(speeds["to host"], speeds["to device"]) * 1e3
        flat = bench.nbytes / speeds["on device"] * 1e3
        run = f"/dev/shm/weightsync-bench-{os.getpid()}"
        paths: list[tuple[str, str, float, dict[str, Any]]] = [
            ("CUDA IPC, plan", f"cuda-ipc://{run}-a", flat, {"apply": "plan"}),
            ("double buffer, staged", f"shm://{run}-b", bus, {"apply": "plan", "stage": True}),
            ("double buffer, plan", f"shm://{run}-b", 2 * bus, {"apply": "plan"}),
            ("double buffer, vLLM's reload", f"shm://{run}-b", 2 * bus, {"apply": "reload"}),
        ]
        for path, url, limit, more in paths:
            with bench.trying(path):
                bench.ours(path, url, limit, **more)
            if url.startswith("cuda-ipc"):
                bench.others()
        with bench.trying("vLLM's ways, on the GPU"):
            (found,) = bench.llm.collective_rpc(worker_times, args=(options.shape, options.rounds))
            for path, times in found.items():
                bench.say(path, flat, apply=times)
        with bench.trying("TorchRL's way: memmap, load_weights"):
            bench.torchrl_way()
        if options.soak:  # last, since it is long
            with bench.trying("double buffer, staged: soak"):
                _, url, _, more = paths[1]
                bench.soak("double buffer, staged", url, options.soak, **more)
    finally:
        bench.end()


if __name__ == "__main__":
    main()
