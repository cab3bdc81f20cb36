"""The pause that requests see: the largest gap between two tokens of a stream, at each update.

    make bench-engines         # or: python benchmarks/engines.py --rounds 20 --json FILE

Streams run all the time against an engine, an ``AsyncLLM`` of this process and a server of its own.
At each update the gap that covers it is compared with the pause that the update's report gives,
and with the usual time between two tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
from common import parser
from rich.console import Console
from rich.table import Table

import weightsync as ws

STREAMS = 4
PATIENCE = 180.0  # seconds
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_SERVER_DEV_MODE": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCH_COMPILE_DISABLE": "1",
}


@dataclass(frozen=True)
class Result:
    """Milliseconds. ``gaps`` and ``pauses``: one of each update; ``steps``: between updates."""

    form: str
    gaps: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    applies: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)


def make_model(folder: str) -> torch.nn.Module:
    """About 100 MB of float32."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=4096, hidden_size=512, intermediate_size=1408, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=4096,
        architectures=["LlamaForCausalLM"], torch_dtype="float32",
    )  # fmt: skip
    config.save_pretrained(folder)
    return AutoModelForCausalLM.from_config(config).float()


class Streams:
    """Requests that never end, and when each of their tokens came."""

    def __init__(self) -> None:
        self.times: list[list[float]] = []
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, stream: Any) -> None:
        times: list[float] = []
        self.times.append(times)

        async def read() -> None:
            while True:
                async for _ in stream():
                    times.append(time.perf_counter())

        self._tasks.append(asyncio.create_task(read()))

    def gap(self, began: float, ended: float) -> float:
        """The largest gap of any stream that overlaps a span of time, in milliseconds."""
        gaps = [
            later - earlier
            for times in self.times
            for earlier, later in itertools.pairwise(times)
            if later > began and earlier < ended
        ]
        return max(gaps) * 1e3

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def measure(
    form: str, target: Any, stream: Any, model: torch.nn.Module, updates: int
) -> Result:
    result = Result(form)
    streams = Streams()
    path = f"/dev/shm/weightsync-bench-{os.getpid()}"
    scheme = ws.DoubleBufferScheme(path)
    with scheme.create_sender(model) as sender:
        sender.connect()
        receiver = scheme.create_receiver(target)
        await receiver.connect_async(PATIENCE)
        for _ in range(STREAMS):
            streams.start(stream)
        await asyncio.sleep(3)
        for number in range(1, updates + 1):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1e-3)
            await asyncio.to_thread(sender.update_weights, version=number)
            quiet = time.perf_counter()
            await asyncio.sleep(1)
            began = time.perf_counter()
            report = await receiver.poll_and_apply_async(PATIENCE)
            ended = time.perf_counter()
            await asyncio.sleep(1)
            result.gaps.append(streams.gap(began, ended))
            result.steps.append(streams.gap(quiet, began))
            result.pauses.append(report.seconds.pause * 1e3)
            result.applies.append(report.seconds.apply * 1e3)
        await streams.stop()
        await receiver.shutdown_async()
    return result


SAMPLING = {"temperature": 0, "max_tokens": 3000, "ignore_eos": True}
PROMPT = [1, 2, 3, 4]


async def with_async_llm(folder: str, model: torch.nn.Module, updates: int) -> Result:
    from vllm import SamplingParams
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=folder, load_format="dummy", skip_tokenizer_init=True, enforce_eager=True,
            max_model_len=4096, dtype="float32",
            weight_transfer_config=WeightTransferConfig(backend="weightsync"),
        )
    )  # fmt: skip
    numbers = iter(range(1_000_000))

    def stream() -> AsyncIterator[Any]:
        sampling = SamplingParams(**SAMPLING, detokenize=False)
        prompt: Any = {"prompt_token_ids": PROMPT}
        return llm.generate(prompt, sampling, f"bench-{next(numbers)}")

    try:
        return await measure("AsyncLLM", llm, stream, model, updates)
    finally:
        llm.shutdown()


async def with_server(folder: str, model: torch.nn.Module, updates: int) -> Result:
    import httpx

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder,
            "--load-format", "dummy", "--skip-tokenizer-init", "--enforce-eager",
            "--max-model-len", "4096", "--dtype", "float32", "--host", "127.0.0.1",
            "--port", str(port), "--weight-transfer-config", '{"backend": "weightsync"}',
        ],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    client = httpx.AsyncClient(base_url=url, timeout=PATIENCE, trust_env=False)

    async def stream() -> AsyncIterator[str]:
        body = {"model": folder, "prompt": PROMPT, "stream": True, "return_token_ids": True}
        async with client.stream("POST", "/v1/completions", json={**body, **SAMPLING}) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    yield line

    try:
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get("/health")).is_success:
                    break
            await asyncio.sleep(0.5)
        return await measure("server", ws.VLLMServer(url), stream, model, updates)
    finally:
        await client.aclose()
        process.terminate()
        process.wait(30)


def report(results: list[Result], nbytes: int, file: str | None) -> None:
    cores = len(os.sched_getaffinity(0))
    title = (
        f"milliseconds, medians (largest); {nbytes / 1e6:.0f} MB float32, {STREAMS} streams; "
        f"{cores} cores, {date.today()}"
    )
    table = Table(title=title)
    for column in ("form", "between tokens", "gap at an update", "pause in the report", "apply"):
        table.add_column(column, justify="left" if column == "form" else "right")
    for one in results:
        values = (one.steps, one.gaps, one.pauses, one.applies)
        table.add_row(one.form, *(f"{statistics.median(v):.0f} ({max(v):.0f})" for v in values))
    Console(width=130).print(table)
    for one in results:
        pairs = zip(one.gaps, one.pauses, strict=True)
        share = statistics.median(gap / pause for gap, pause in pairs)
        print(f"{one.form}: the gap is {share:.2f} of the pause in the report")
    if file:
        Path(file).write_text(json.dumps([asdict(one) for one in results], indent=1))


async def run(options: Namespace) -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(folder)
        results = [
            await form(folder, model, options.rounds) for form in (with_async_llm, with_server)
        ]
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    report(results, nbytes, options.json)


def main() -> None:
    options = parser(__doc__.splitlines()[0], rounds=20).parse_args()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    asyncio.run(run(options))


if __name__ == "__main__":
    main()
